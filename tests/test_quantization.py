"""Weights in few bits: what they are, how far off, and that the engine serves exactly those."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ConfigError, Engine, EngineConfig, SamplingParams
from paged_jax.attention import dense
from paged_jax.layers import linear
from paged_jax.lora import LoraWeight, with_adapter_ids
from paged_jax.models import ServedModel, from_nnx, load_model, quantized
from paged_jax.progress import SilentProgress
from paged_jax.quantization import QuantizedWeight, quantize
from paged_jax.weights import is_weight, tree_paths
from tests import nnx_models
from tests.dense_decoding import DenseDecoder
from tests.engine_runs import run_all
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("quick_compiles")

SCHEMES = ("int8", "int4", "fp8")
BITS = {"int8": 8, "int4": 4, "fp8": 8}
# Largest error of a value, as a share of the largest of its group: half a step; float8 has steps
# of an eighth of the value.
STEP = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 1 / 16}
PROMPT = list(range(20, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ServedModel:
    directory = tmp_path_factory.mktemp("llama")
    write_tiny_llama(directory)
    return load_model(directory, dtype="float32")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_value_is_the_nearest_that_its_scale_allows(scheme):
    weight = draw(24, 192) * np.logspace(-3, 3, 24)[:, None].astype(np.float32)
    weight[3] = 0.0
    found = quantize(weight, scheme)
    assert found.shape == weight.shape and found.dtype == np.float32
    back = np.asarray(found.dequantized(jnp.float32))
    groups = found.scales.shape[1]
    assert groups == (3 if scheme == "int4" else 1)
    largest = np.abs(weight.reshape(24, groups, -1)).max(axis=2, keepdims=True)
    error = np.abs(back - weight).reshape(24, groups, -1) / np.where(largest > 0, largest, 1)
    assert 0 < error.max() <= 1.001 * STEP[scheme]
    assert not back[3].any()
    again = quantize(back, scheme)  # what can be said exactly stays as it is
    np.testing.assert_array_equal(again.values, found.values)
    assert found.values.nbytes == weight.size * BITS[scheme] // 8


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 100])
def test_a_product_is_that_of_the_rounded_matrix(scheme, dtype, rows):
    x = jnp.asarray(draw(rows, 128, seed=1), dtype)
    weight = quantize(jnp.asarray(draw(48, 128), dtype), scheme)
    bias = jnp.asarray(draw(48, seed=2), dtype)
    got = linear(x, weight, bias)
    assert got.dtype == x.dtype
    exact = np.asarray(x, np.float64) @ np.asarray(weight.dequantized(jnp.float32), np.float64).T
    exact += np.asarray(bias, np.float64)
    tolerance = 1e-4 if dtype == "float32" else 0.15
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, atol=tolerance, rtol=1e-2)


def test_a_stack_is_each_of_its_matrices_rounded_by_itself():
    stack = draw(3, 24, 192) * np.logspace(-2, 2, 3)[:, None, None].astype(np.float32)
    for scheme in SCHEMES:
        found = quantize(stack, scheme)
        assert found.shape == stack.shape and found.values.nbytes * 8 == stack.size * BITS[scheme]
        for i, matrix in enumerate(stack):
            alone = quantize(matrix, scheme).dequantized(jnp.float32)
            np.testing.assert_array_equal(found.dequantized(jnp.float32)[i], alone)


def unpacked(params):
    """The same tree with plain arrays."""
    return jax.tree.map(
        lambda leaf: leaf.dequantized(jnp.float32) if isinstance(leaf, QuantizedWeight) else leaf,
        params,
        is_leaf=is_weight,
    )


# What is not multiplied, or decides: it stays as it is.
KEPT = {
    "llama": set(),
    "gpt2": {"wpe"},
    "mixtral": {"embed_tokens", "gate"},
    "gpt-oss": {"embed_tokens", "router"},
}


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("llama", "int8"), ("gpt2", "int4"), ("mixtral", "int8"), ("gpt-oss", "int4")],
)
def test_head_and_experts_are_rounded_too(name, scheme):
    full = load_model(Path(__file__).parent / "data" / "families" / name, dtype="float32")
    rounded = quantized(full, scheme)
    schemes: dict[str, set] = {}
    for path, leaf in tree_paths(rounded.params).items():
        kind = leaf.scheme if isinstance(leaf, QuantizedWeight) else "kept"
        owner = path[-2] if path[-1] == "weight" else "experts" if "experts" in path else path[-1]
        if len(leaf.shape) > 1 and not str(path[-1]).endswith("bias"):
            schemes.setdefault(kind, set()).add(owner)
    assert schemes.get("kept", set()) == KEPT[name]
    assert schemes["int8"] & {"lm_head", "wte", "embed_tokens"}, "the head is kept in eight bits"
    assert ("experts" in schemes[scheme]) == bool(full.experts)

    ids = jnp.arange(10, 31, dtype=jnp.int32)

    @jax.jit
    def logits(params):
        positions = jnp.arange(len(ids), dtype=jnp.int32)
        hidden = full.apply(params, ids, positions, dense(jnp.zeros_like(ids)))
        return full.logits(params, hidden)

    got, want = logits(rounded.params), logits(unpacked(rounded.params))
    np.testing.assert_allclose(got, want, atol=2e-4)
    assert np.abs(got - logits(full.params)).max() > 1e-3, "nothing was rounded"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_engine_serves_the_rounded_weights(scheme, model):
    rounded = quantized(model, scheme)
    plain = unpacked(rounded.params)
    want = DenseDecoder(model._replace(params=plain), 48).greedy(PROMPT, 8)
    engine = make(model, quantization=scheme)
    assert want.is_clear
    assert run_all(engine, {"r": (PROMPT, GREEDY)})["r", 0].token_ids == list(want.token_ids)
    if scheme == "int8":  # new weights are rounded, too, and nothing else is compiled for them
        engine.update_params(jax.tree.map(lambda leaf: leaf * 1, model.params))
        found = engine.runner._params["layers"][1]["mlp"]["up_proj"]["weight"]
        np.testing.assert_array_equal(
            found.values, rounded.params["layers"][1]["mlp"]["up_proj"]["weight"].values
        )
    engine.close()


def make(model: ServedModel, **config) -> Engine:
    sizes = {
        "max_model_len": 48,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "num_blocks": 16,
        "warmup": "none",
    }
    return Engine(model, progress=SilentProgress(), **(sizes | config))


def test_adapters_lie_over_rounded_weights():
    base = quantize(draw(16, 64), "int4")
    down, up = draw(4, 64, seed=3), draw(4, 16, seed=4)
    weight = LoraWeight(base, down, up, None, 2)
    x = draw(3, 64, seed=5)
    tree = with_adapter_ids({"w": weight}, jnp.asarray([0, 1, 2]))
    got = np.asarray(tree["w"].multiply(x, jnp.float32))
    want = np.asarray(base.multiply(x, jnp.float32))
    np.testing.assert_array_equal(got[0], want[0])
    for row, slot in ((1, 0), (2, 1)):
        own = slice(2 * slot, 2 * slot + 2)
        np.testing.assert_allclose(
            got[row], want[row] + (x[row] @ down[own].T) @ up[own], atol=1e-4
        )


def test_what_cannot_be_quantized_is_refused_by_name(model):
    with pytest.raises(ConfigError, match="quantization must be one of None, int8, int4, fp8"):
        EngineConfig(model="m", quantization="int3")
    with pytest.raises(ConfigError, match=r"paged_jax\.layers\.Linear, and this model multiplies"):
        make(from_nnx(nnx_models.Decoder([(None, 2)])), quantization="int8")
    with pytest.raises(ConfigError, match="a multiple of 8, one has 20"):
        quantize(draw(4, 20), "int4")


@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.sweep)])
def test_a_small_kv_cache_gives_the_same_whatever_happens_to_its_blocks(dtype, model):
    """A token's bytes depend on itself alone: not on chunks, neighbours, caching or swapping."""
    jobs = {f"r{i}": (PROMPT[i:] + PROMPT[: 2 * i], GREEDY) for i in range(3)}
    jobs["again"] = jobs["r0"]
    options = {"kv_cache_dtype": dtype, "attention_backend": "xla"}
    roomy = make(model, **options)
    want = {key: sample.token_ids for key, sample in run_all(roomy, jobs).items()}
    full = make(model)
    layouts = [e.runner.num_block_bytes for e in (roomy, full)]
    full.close()
    roomy.close()
    assert layouts[0] * 16 * 4 == layouts[1] * (16 + 4)  # a byte for each of D=16, and a scale
    tight = make(model, **options, num_blocks=5, preemption_mode="swap", max_num_batched_tokens=7)
    got = {key: sample.token_ids for key, sample in run_all(tight, jobs).items()}
    assert got == want
    assert tight.stats().num_swaps > 0
    tight.close()
