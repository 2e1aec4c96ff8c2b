"""The whole engine through the TPU kernels, interpreted: tokens of a tiny model and of the real."""

import json
from pathlib import Path

import pytest

from paged_jax import LLM, SamplingParams, plan
from paged_jax.models import load_model
from paged_jax.progress import SilentProgress
from tests.kernel_engines import greedy_tokens
from tests.tiny_models import write_tiny_llama

GOLDENS = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())["cases"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of two query heads and one KV head."""
    directory = tmp_path_factory.mktemp("llama")
    write_tiny_llama(directory, num_attention_heads=2, num_key_value_heads=1)
    return load_model(directory, dtype="float32")


@pytest.mark.sweep
@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8"])
def test_a90_greedy_tokens_are_those_of_the_reference_cold_and_warm(model, kv_cache_dtype):
    expected = greedy_tokens(model, "reference", kv_cache_dtype)
    assert all(len(set(tokens)) > 1 for tokens in expected.values())
    assert greedy_tokens(model, "tpu", kv_cache_dtype) == expected


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
