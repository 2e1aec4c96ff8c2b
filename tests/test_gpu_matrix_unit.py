"""All in which the compiled and the interpreted Hopper kernel differ: that both mean the same.

The interpreted one is held against NumPy. Of the compiled one, which no machine here can run, what
the compiler wrote is read: which instructions, how many, of which types, and how they accumulate.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.aot_gpu import compile_for_gpu, why_no_gpu_compiler
from pallas_kernels.gpu_kernel import _tiled_smem
from pallas_kernels.gpu_matrix_unit import Interpreted, Wgmma
from pallas_kernels.quantized_kv import decode, encode
from tests.conftest import CI

M, J, D = 64, 64, 128  # rows of a tile, its keys, head size
BYTES = ("int8", "float8_e4m3fn", "float8_e5m2")


def random(*shape: int, dtype="float32", seed: int = 0) -> jax.Array:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(numbers, jnp.float32).astype(dtype)


def float64(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32)).astype(np.float64)


def methods(unit: type) -> dict[str, inspect.Signature]:
    functions = inspect.getmembers(unit, inspect.isfunction)
    return {name: inspect.signature(f) for name, f in functions if not name.startswith("_")}


def test_both_have_the_same_functions():
    assert methods(Wgmma) == methods(Interpreted)
    assert {"scores", "add_values", "widen"} <= set(methods(Wgmma))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreted_scores_are_queries_times_keys(dtype):
    q, k = random(M, D, dtype=dtype), random(J, D, dtype=dtype, seed=1)
    scores = Interpreted().scores(q, k)
    assert (scores.shape, scores.dtype) == ((M, J), jnp.float32)
    np.testing.assert_allclose(scores, float64(q) @ float64(k).T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_interpreted_values_are_added_with_weights_rounded_to_their_dtype(dtype):
    weights, v = jnp.abs(random(M, J, seed=2)), random(J, D, dtype=dtype, seed=3)
    acc = random(M, D, seed=4)
    out = Interpreted().add_values(acc, weights, v)
    assert (out.shape, out.dtype) == ((M, D), jnp.float32)
    expected = float64(acc) + float64(weights.astype(dtype)) @ float64(v)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", BYTES)
def test_interpreted_bytes_are_widened_as_they_are_decoded(dtype):
    kind = jnp.dtype(dtype)
    numbers, scales = (a[:, 0] for a in encode(random(J, 1, D, seed=5), kind))
    wide = jax.new_ref(jnp.zeros((J, D), jnp.bfloat16))
    Interpreted().widen(numbers, scales, kind, wide)
    expected = decode(numbers, scales, kind).astype(jnp.bfloat16)
    np.testing.assert_array_equal(float64(wide[...]), float64(expected))


# The compiled one


@pytest.fixture(scope="module")
def compiler():
    if reason := why_no_gpu_compiler():
        if CI and "not installed" in reason:
            pytest.fail(reason)
        pytest.skip(f"needs a GPU compiler: {reason}")


def wgmmas_of(body, out: jax.ShapeDtypeStruct, **inputs: jax.ShapeDtypeStruct):
    """Compiles `body(out_ref, **refs)` over inputs in shared memory, laid out as in the kernel."""

    def kernel(*refs, barrier, **places):
        *input_refs, out_ref = refs
        for ref, place in zip(input_refs, places.values(), strict=True):
            plgpu.copy_gmem_to_smem(ref, place, barrier)
            plgpu.barrier_wait(barrier)
        body(out_ref, **places)

    def place(like):
        if len(like.shape) == 1:
            return plgpu.SMEM(like.shape, like.dtype)
        return _tiled_smem(like.shape[:-1], like.dtype, head_size=like.shape[-1])

    places = {name: place(like) for name, like in inputs.items()}
    program = plgpu.kernel(
        kernel, out_type=out, scratch_types={**places, "barrier": plgpu.Barrier()}
    )
    _, (assembled,) = compile_for_gpu("h200", program, *inputs.values())
    assert assembled.spill_bytes == 0
    return assembled.wgmmas


def like(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiled_scores_multiply_both_operands_from_shared_memory(dtype):
    def body(out_ref, q, k):
        out_ref[...] = Wgmma().scores(q, k)

    inputs = {"q": like(M, D, dtype=dtype), "k": like(J, D, dtype=dtype)}
    wgmmas = wgmmas_of(body, like(M, J, dtype="float32"), **inputs)
    kind = "bf16" if dtype == "bfloat16" else "f16"
    # All of the head, sixteen at a time. Keys lie as the unit wants its second operand, each one's
    # features together: neither operand is transposed.
    assert wgmmas == (f"m64n{J}k16.f32.{kind}.{kind} 1, 1, 0, 0",) * (D // 16)


@pytest.mark.usefixtures("compiler")
def test_compiled_values_are_added_to_the_accumulator():
    def body(out_ref, v):
        layout = plgpu.Layout.WGMMA
        weights = plgpu.layout_cast(jnp.full((M, J), 0.5, jnp.float32), layout)
        acc = plgpu.layout_cast(jnp.full((M, D), 1.0, jnp.float32), layout)
        out_ref[...] = Wgmma().add_values(acc, weights, v)

    wgmmas = wgmmas_of(body, like(M, D, dtype="float32"), v=like(J, D))
    # All of the keys. Weights come in registers; values lie by key, and are transposed.
    assert wgmmas == (f"m64n{D}k16.f32.bf16.bf16 1, 1, 1",) * (J // 16)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", BYTES)
def test_compiled_bytes_are_widened_without_a_product(dtype):
    kind = jnp.dtype(dtype)
    stored = "int8" if dtype == "int8" else "uint8"

    def body(out_ref, numbers, scales, wide):
        Wgmma().widen(numbers, scales, kind, wide)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(wide, out_ref)
        plgpu.wait_smem_to_gmem(0)

    inputs = {
        "numbers": like(J, D, dtype=stored),
        "scales": like(J, dtype="float32"),
        "wide": like(J, D),
    }
    assert wgmmas_of(body, like(J, D), **inputs) == ()
