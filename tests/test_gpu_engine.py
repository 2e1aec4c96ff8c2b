"""The whole engine through the Hopper kernel's interpreter: the reference back end's tokens."""

import pytest

from paged_jax import Engine, EngineConfig, SamplingParams, plan
from paged_jax.models import load_model
from paged_jax.progress import SilentProgress
from tests import gpu_interpreter
from tests.engine_runs import run_all
from tests.tiny_models import write_tiny_llama


@pytest.fixture(autouse=True)
def one_chunk_a_step(monkeypatch):
    """Room for more costs thread blocks that do nothing, and are interpreted all the same."""
    monkeypatch.setattr(plan, "MAX_NUM_CHUNKS", 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of two query heads and one KV head."""
    directory = tmp_path_factory.mktemp("llama")
    config = write_tiny_llama(directory, num_attention_heads=2, num_key_value_heads=1)
    assert config["num_hidden_layers"] == 2
    return load_model(directory, dtype="bfloat16")


def greedy_tokens(model, backend: str) -> list[int]:
    """Of a prompt of two blocks, computed in two chunks; then a few steps of one token."""
    config = EngineConfig(
        model="test",
        attention_backend=backend,
        kv_cache_dtype="bfloat16",
        block_size=8,
        num_blocks=9,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=12,
        warmup="none",
    )
    engine = Engine(model, config, progress=SilentProgress())
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    samples = run_all(engine, {"a": (list(range(3, 19)), params)})
    engine.close()
    return samples["a", 0].token_ids


def test_greedy_tokens_are_those_of_the_reference(model):
    expected = greedy_tokens(model, "reference")
    assert len(set(expected)) > 1
    with gpu_interpreter.interpreted_gpu():
        gpu_interpreter.forget_races()
        assert greedy_tokens(model, gpu_interpreter.NAME) == expected
        assert not gpu_interpreter.found_races()
