"""The shared layers against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import layers
from paged_jax.layers import (
    FEW_ROWS,
    Embedding,
    GatedMLP,
    Linear,
    RMSNorm,
    linear,
    rows_first,
    weights_first,
)


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 8, 33, FEW_ROWS, FEW_ROWS + 1])
def test_linear_equals_numpy_for_few_and_many_rows(rows):
    x, w, b = draw(0, rows, 48), draw(1, 80, 48), draw(2, 80)
    want = x.astype(np.float64) @ w.astype(np.float64).T
    np.testing.assert_allclose(jax.jit(linear)(x, w), want, atol=2e-5)
    np.testing.assert_allclose(jax.jit(linear)(x, w, b), want + b, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_ways_to_multiply_agree(dtype):
    x, w = jnp.asarray(draw(0, 8, 64), dtype), jnp.asarray(draw(1, 32, 64), dtype)
    outs = [
        jax.jit(way, static_argnums=2)(x, w, jnp.dtype(dtype))
        for way in (rows_first, weights_first)
    ]
    assert all(out.dtype == dtype for out in outs)
    one, other = (np.asarray(out, np.float32) for out in outs)
    # One rounding of the result, and the order in which float32 sums of 64 products were taken.
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(one, other, rtol=eps, atol=1e-5)


def test_linear_accumulates_and_returns_in_the_dtype_asked_for():
    x, w = jnp.asarray(draw(0, 4, 512), jnp.bfloat16), jnp.asarray(draw(1, 16, 512), jnp.bfloat16)
    out = linear(x, w, dtype=jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, atol=1e-4)  # bfloat16 would be off by about 0.1
    assert linear(x, w).dtype == jnp.bfloat16


def test_linear_picks_its_form_for_the_platform_it_is_lowered_for():
    """Few rows on the CPU go through the barriers; other platforms and many rows do not."""

    def text(rows: int, platform: str) -> str:
        x, w = jax.ShapeDtypeStruct((rows, 16), jnp.float32), jnp.zeros((8, 16))
        lowered = jax.jit(linear).trace(x, w).lower(lowering_platforms=(platform,))
        return lowered.as_text()

    assert "optimization_barrier" in text(4, "cpu")
    assert "optimization_barrier" not in text(4, "tpu")
    assert "optimization_barrier" not in text(4, "cuda")
    assert "optimization_barrier" not in text(FEW_ROWS + 1, "cpu")


def test_linear_on_the_cpu_compiles_to_one_plain_product():
    """Nothing of the choice is left at run time, and the barriers kept the order of the factors."""
    x, w = draw(0, 4, 16), draw(1, 8, 16)
    text = jax.jit(linear).lower(x, w).compile().as_text()
    assert "conditional" not in text
    transposed = "f32[8,4]"  # the shape of w @ x.T, which x @ w.T never has
    assert transposed in text
    plain = jax.jit(rows_first, static_argnums=2).lower(x, w, jnp.dtype("float32"))
    assert transposed not in plain.compile().as_text()


def test_what_all_layers_have_is_traced_once(monkeypatch):
    """Every layer traced anew is what a program of thirty layers would wait for in Python."""
    traced = []

    def noted(x, w, dtype):
        traced.append(w.shape)
        return rows_first(x, w, dtype)

    monkeypatch.setattr(layers, "on_cpu", noted)
    x = jnp.zeros((3, 17))  # a size that no other test has

    def model(ws):
        return [linear(x, w) for w in ws]

    jax.eval_shape(model, [jnp.zeros((5, 17)), jnp.zeros((5, 17)), jnp.zeros((7, 17))])
    assert traced == [(5, 17), (7, 17)]


def test_linear_can_be_differentiated():
    x, w = draw(0, 4, 16), draw(1, 8, 16)
    dx, dw = jax.grad(lambda x, w: linear(x, w).sum(), (0, 1))(x, w)
    np.testing.assert_allclose(dx, np.tile(w.sum(0), (4, 1)), atol=1e-5)
    np.testing.assert_allclose(dw, np.tile(x.sum(0), (8, 1)), atol=1e-5)


def test_linear_module_has_a_bias_only_where_asked():
    x = jnp.asarray(draw(0, 3, 16))
    with_bias, without = (
        Linear(16, 8, bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0)) for bias in (True, False)
    )
    assert without.bias is None
    with_bias.bias[...] = jnp.arange(8.0)
    np.testing.assert_allclose(
        with_bias(x) - without(x), np.tile(np.arange(8.0), (3, 1)), atol=1e-6
    )


def test_rms_norm_is_float32_inside():
    x = jnp.asarray(300 * draw(0, 2, 3, 64), jnp.float16)  # squares are past float16's range
    norm = RMSNorm(64, eps=1e-6, dtype=jnp.float16)
    norm.weight[...] = jnp.asarray(draw(1, 64), jnp.float16)
    wide = np.asarray(x, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    out = norm(x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, want * np.asarray(norm.weight[...]), rtol=2**-10, atol=1e-6)


def test_rms_norm_uses_its_epsilon():
    norm = RMSNorm(4, eps=3.0, dtype=jnp.float32)
    np.testing.assert_allclose(norm(jnp.ones((1, 4))), np.full((1, 4), 0.5), atol=1e-6)


def test_embedding_looks_rows_up():
    table = Embedding(10, 4, dtype=jnp.float32, rngs=nnx.Rngs(0))
    got = table(jnp.array([3, 0, 9]))
    np.testing.assert_array_equal(got, np.asarray(table.weight[...])[[3, 0, 9]])


def test_gated_mlp_equals_numpy():
    mlp = GatedMLP(16, 24, bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))
    parts = {"gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
    weights, biases = {}, {}
    for seed, (name, part) in enumerate(parts.items()):
        weights[name], biases[name] = draw(seed, *part.weight.shape), draw(seed, *part.bias.shape)
        part.weight[...], part.bias[...] = jnp.asarray(weights[name]), jnp.asarray(biases[name])
    x = draw(7, 5, 16).astype(np.float64)
    gate, up = (x @ weights[name].T + biases[name] for name in ("gate", "up"))
    want = (gate / (1 + np.exp(-gate)) * up) @ weights["down"].T + biases["down"]
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), want, atol=2e-4)
