"""The whole engine on a kernel's back end, so small that it can be interpreted."""

from collections.abc import Sequence

import pytest

from paged_jax import Engine, EngineConfig, SamplingParams, plan
from paged_jax.models import ServedModel
from paged_jax.progress import SilentProgress
from tests.engine_runs import run_all

BLOCK = 8
PROMPTS = {"long": range(3, 19), "short": [*range(3, 11), 40, 41, 42]}  # one block in common


def greedy_tokens(
    model: ServedModel,
    backend: str,
    kv_cache_dtype: str,
    prompts: dict[str, Sequence[int]] = PROMPTS,
    *,
    max_tokens: int = 4,
) -> dict[str, list[int]]:
    """Of each prompt, computed beside the others and in chunks of 12 tokens; then once more alone,
    for which the cache has the prompt's first block, and which must give the same."""
    config = EngineConfig(
        model="test",
        attention_backend=backend,
        kv_cache_dtype=kv_cache_dtype,
        block_size=BLOCK,
        num_blocks=9,
        max_model_len=64,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=12,
        warmup="none",
    )
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_NUM_CHUNKS", 1)  # room for more is work for the interpreter
        engine = Engine(model, config, progress=SilentProgress())
        jobs = {name: (list(prompt), params) for name, prompt in prompts.items()}
        together = run_all(engine, jobs)
        for name, job in jobs.items():
            hits = engine.stats().prefix_hit_tokens
            alone = run_all(engine, {name: job})
            assert engine.stats().prefix_hit_tokens >= hits + BLOCK
            assert alone[name, 0].token_ids == together[name, 0].token_ids
        engine.close()
    return {name: together[name, 0].token_ids for name in jobs}
