"""Loading: strict about tensors, tied heads in three forms, one tensor in memory at a time."""

import contextlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from paged_jax.attention import dense
from paged_jax.errors import ConfigError, ModelLoadError
from paged_jax.models import FAMILIES, describe_model, load_model
from tests.oracle_llama import llama_logits
from tests.tiny_models import TINY_LLAMA, llama_shapes, llama_tensors, write_model, write_tiny_llama

TOKENS = [5, 80, 3, 3, 150, 41]


def logits(directory: Path) -> np.ndarray:
    model = load_model(directory, dtype="float32")

    @jax.jit
    def run(params, ids):
        hidden = model.apply(params, ids, jnp.arange(len(ids)), dense(jnp.zeros_like(ids)))
        return model.logits(params, hidden)

    return np.asarray(run(model.params, jnp.asarray(TOKENS)))


def change_tensors(directory: Path, **changes: np.ndarray | None) -> None:
    """Add, replace or (None) remove tensors; `__` in a name stands for a point."""
    tensors = load_file(directory / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")


def test_shapes_are_found_without_counting_draws(tmp_path, monkeypatch):
    """Flax counts them, and under a trace each one takes longer than the one before."""
    write_tiny_llama(tmp_path)
    want = jax.tree.map(lambda x: (x.shape, x.dtype), load_model(tmp_path, dtype="float32").params)

    def counted(stream):
        raise AssertionError("a draw was counted")

    monkeypatch.setattr(nnx.RngStream, "__call__", counted)
    described = describe_model(tmp_path, dtype="float32").params
    assert jax.tree.map(lambda x: (x.shape, x.dtype), described) == want


def test_a70_tied_without_a_head_uses_the_embedding(tmp_path, caplog):
    config = write_tiny_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    np.testing.assert_allclose(logits(tmp_path), llama_logits(config, tensors, TOKENS), atol=1e-4)
    assert caplog.records == []


def test_a70_tied_with_another_head_ignores_it_and_warns(tmp_path, caplog):
    config = write_tiny_llama(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    change_tensors(tmp_path, lm_head__weight=embedding + np.float32(0.5))
    with caplog.at_level(logging.WARNING):
        got = logits(tmp_path)
    np.testing.assert_allclose(got, llama_logits(config, tensors, TOKENS), atol=1e-4)
    assert "lm_head.weight is ignored" in caplog.text


def test_tied_with_the_same_head_says_nothing(tmp_path, caplog):
    write_tiny_llama(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, lm_head__weight=embedding)
    with caplog.at_level(logging.WARNING):
        logits(tmp_path)
    assert caplog.records == []


def test_a70_untied_without_a_head_is_an_error(tmp_path):
    write_tiny_llama(tmp_path)
    change_tensors(tmp_path, lm_head__weight=None)
    with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
        load_model(tmp_path, dtype="float32")


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    write_tiny_llama(tmp_path)
    change_tensors(
        tmp_path,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__0__self_attn__q_proj__weight=np.zeros((64, 32), np.float32),
        model__layers__0__input_layernorm__weight=np.zeros(64, np.int8),
        model__layers__0__self_attn__q_proj__bias=np.zeros(64, np.float32),
    )
    with pytest.raises(ModelLoadError) as caught:
        load_model(tmp_path, dtype="float32")
    assert str(caught.value) == (
        "the tensors do not fit config.json; "
        "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; "
        "unexpected: model.layers.0.self_attn.q_proj.bias; "
        "of another shape: "
        "model.layers.0.self_attn.q_proj.weight is (64, 32) in the file, (64, 64) by config.json; "
        "of a dtype that cannot be loaded: model.layers.0.input_layernorm.weight is int8"
    )


@pytest.mark.parametrize(("file_layers", "kind"), [(1, "missing"), (3, "unexpected")])
def test_another_number_of_layers_is_an_error(tmp_path, file_layers, kind):
    write_model(
        tmp_path, TINY_LLAMA, llama_tensors({**TINY_LLAMA, "num_hidden_layers": file_layers})
    )
    with pytest.raises(ModelLoadError, match=rf"{kind}: model\.layers\.{min(file_layers, 2)}\."):
        load_model(tmp_path, dtype="float32")


def test_long_lists_are_cut(tmp_path):
    config = {**TINY_LLAMA, "num_hidden_layers": 4}
    write_model(tmp_path, config, llama_tensors(TINY_LLAMA))
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight and 6 more$"):
        load_model(tmp_path, dtype="float32")


def test_old_buffers_are_passed_over(tmp_path):
    write_tiny_llama(tmp_path)
    before = logits(tmp_path)
    change_tensors(
        tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(8, np.float32)
    )
    np.testing.assert_array_equal(logits(tmp_path), before)


@pytest.mark.parametrize(
    "overrides",
    [
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": ["GrokForCausalLM"], "model_type": "grok"},
        {"architectures": None, "model_type": "grok"},
    ],
)
def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path, overrides):
    write_tiny_llama(tmp_path, **overrides)
    with pytest.raises(ModelLoadError) as caught:
        load_model(tmp_path, dtype="float32")
    message = str(caught.value)
    assert repr(overrides["architectures"] or overrides["model_type"]) in message
    assert all(family.architecture in message for family in FAMILIES)


def test_the_model_type_serves_where_no_architecture_is_named(tmp_path):
    write_tiny_llama(tmp_path)
    before = logits(tmp_path)
    write_tiny_llama(tmp_path, architectures=None)
    np.testing.assert_array_equal(logits(tmp_path), before)


@pytest.mark.parametrize("file_dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_files_of_another_dtype_are_converted(tmp_path, file_dtype):
    tensors = {name: t.astype(file_dtype) for name, t in llama_tensors(TINY_LLAMA).items()}
    write_model(tmp_path, TINY_LLAMA, tensors)
    model = load_model(tmp_path, dtype=jnp.float32)
    np.testing.assert_array_equal(
        model.params["layers"][1]["mlp"]["up_proj"]["weight"],
        tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float32),
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"float32"}


@pytest.mark.parametrize("dtype", ["int8", "float64", "float8_e4m3fn"])
def test_parameters_of_other_dtypes_are_refused(tmp_path, dtype):
    write_tiny_llama(tmp_path)
    with pytest.raises(ConfigError, match="float32, bfloat16, float16; got"):
        load_model(tmp_path, dtype=dtype)


def test_the_model_knows_its_sizes(tmp_path):
    write_tiny_llama(tmp_path, vocab_size=200, max_position_embeddings=77)
    model = load_model(str(tmp_path), dtype="float32")
    assert (model.vocab_size, model.hidden_size, model.max_position) == (200, 64, 77)
    assert model.num_layers is None


def test_progress_counts_every_byte(tmp_path):
    write_tiny_llama(tmp_path)
    calls = []

    class Recorder:
        def say(self, text):
            raise AssertionError("nothing to say")

        @contextlib.contextmanager
        def track(self, text, total, *, unit=""):
            calls.append((total, unit))
            yield calls.append

    load_model(tmp_path, dtype="bfloat16", progress=Recorder())
    (total, unit), *steps = calls
    num_bytes = {name: t.nbytes for name, t in llama_tensors(TINY_LLAMA).items()}
    assert (total, unit) == (sum(num_bytes.values()), "B")
    assert sorted(steps) == sorted(num_bytes.values())
    assert steps == sorted(steps, reverse=True)


PEAK = """
import json, sys
import jax
from paged_jax.models import load_model

def peak_bytes():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

load_model(sys.argv[1], dtype="float32")  # a tiny one: what the libraries themselves take
before = peak_bytes()
model = load_model(sys.argv[2], dtype=sys.argv[3])
weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
print(json.dumps([weights, peak_bytes() - before]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_peaks_little_above_the_weights(tmp_path, dtype):
    """On the CPU the weights live in host memory: they, and no second copy, are in the peak."""
    write_tiny_llama(tmp_path / "tiny")
    config = {**TINY_LLAMA, "vocab_size": 24_000, "hidden_size": 512, "intermediate_size": 2048}
    config |= {"num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 64}
    ones = {name: np.ones(shape, np.float32) for name, shape in llama_shapes(config).items()}
    write_model(tmp_path / "large", config, ones)

    command = [sys.executable, "-c", PEAK, tmp_path / "tiny", tmp_path / "large", dtype]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    weights, peak = json.loads(run.stdout)
    assert weights > 80e6
    assert weights * 0.9 < peak < weights * 1.3
