"""The real model's tokens through the TPU kernels, interpreted in the whole engine."""

import json
from pathlib import Path

import pytest

from paged_jax import LLM, SamplingParams, plan
from paged_jax.progress import SilentProgress

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]


@pytest.mark.sweep
@pytest.mark.smollm2
def test_the_first_tokens_of_a_golden(smollm2, monkeypatch):
    """A short prompt and three decodes, over two blocks, through all 30 layers; about a minute."""
    monkeypatch.setattr(plan, "MAX_NUM_CHUNKS", 1)  # room for more is work for the interpreter
    case = GOLDENS[0]
    llm = LLM(
        str(smollm2),
        dtype="float32",
        attention_backend="tpu",
        progress=SilentProgress(),
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        block_size=8,
        num_blocks=3,
        warmup="none",
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    (result,) = llm.generate({"prompt_token_ids": case["prompt_token_ids"]}, greedy)
    assert list(result.outputs[0].token_ids) == case["token_ids"][:4]
