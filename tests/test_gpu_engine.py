"""The whole engine through the Hopper kernel's interpreter: the reference back end's tokens."""

import pytest

from paged_jax.models import load_model
from tests import gpu_interpreter
from tests.kernel_engines import PROMPTS, greedy_tokens
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers of two query heads and one KV head."""
    directory = tmp_path_factory.mktemp("llama")
    config = write_tiny_llama(directory, num_attention_heads=2, num_key_value_heads=1)
    assert config["num_hidden_layers"] == 2
    return load_model(directory, dtype="bfloat16")


@pytest.mark.parametrize(
    "kv_cache_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.sweep)]
)
def test_a90_greedy_tokens_are_those_of_the_reference_cold_and_warm(model, kv_cache_dtype):
    """Two of one prompt, for the interpreter takes half a minute."""
    options = {"prompts": {"long": PROMPTS["long"]}, "max_tokens": 2}
    expected = greedy_tokens(model, "reference", kv_cache_dtype, **options)
    assert len(set(expected["long"])) > 1
    with gpu_interpreter.interpreted_gpu():
        gpu_interpreter.forget_races()
        assert greedy_tokens(model, gpu_interpreter.NAME, kv_cache_dtype, **options) == expected
        assert not gpu_interpreter.found_races()
