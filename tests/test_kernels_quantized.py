"""A KV cache of one byte a value: exactly its own rounding, and how far that is off."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import copy_blocks, read_blocks, write_blocks
from pallas_kernels.pool import check_spec
from tests.kernel_steps import PORTABLE, Rows, Shape, make_step, rounded, run_step
from tests.oracles import paged_attention_float64

OFF = {"int8": 0.02, "float8_e4m3fn": 0.06, "float8_e5m2": 0.12}  # of the norm of the result
DTYPES = tuple(OFF)
# The others of the interpreted kernels are in their own tests.
CASES = [*itertools.product(PORTABLE, DTYPES), ("tpu", "float8_e5m2")]
ROWS = Rows(decodes=(1, 17, 40), chunks=((5, 21), (30, 30)))
SCORING = {"window": 25, "softcap": 30.0}


def shape_of(dtype: str) -> Shape:
    return Shape(pool_dtype=dtype, chunk_tokens=40, num_blocks=32, table_width=4)


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_attention_is_that_of_the_rounded_keys_and_values(backend, dtype):
    shape = shape_of(dtype)
    step = make_step(shape, ROWS)
    out = run_step(backend, shape, step, **SCORING).out
    for tokens, (q, keys, values) in step.sequences:
        own = paged_attention_float64(q, rounded(keys, dtype), rounded(values, dtype), **SCORING)
        np.testing.assert_allclose(out[tokens], own, rtol=2e-5, atol=2e-5)
        exact = paged_attention_float64(q, keys, values, **SCORING)
        error = np.linalg.norm(out[tokens] - exact) / np.linalg.norm(exact)
        assert 0 < error < OFF[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_rounded_by_its_own_scale(dtype):
    x = np.random.default_rng(0).standard_normal((6, 2, 64)).astype(np.float32)
    x *= np.logspace(-6, 6, 6)[:, None, None].astype(np.float32)
    x[2, 1] = 0
    back = rounded(x, dtype)
    largest = np.abs(x).max(axis=2, keepdims=True)
    step = {"int8": 0.5 / 127, "float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8}[dtype]
    assert (np.abs(back - x) <= 1.001 * step * np.maximum(largest, 1e-30)).all()
    assert not back[2, 1].any()
    x[3, 0, 5] = np.nan
    assert np.isnan(rounded(x, dtype)[3, 0]).all()  # it does not hide


@pytest.mark.parametrize(("backend", "dtype"), CASES)
def test_whole_blocks_move_with_their_scales(backend, dtype):
    shape = shape_of(dtype)
    pool = run_step(backend, shape, make_step(shape, ROWS), fill=0.0, **SCORING).pool
    ids, others = jnp.asarray([3, 7], jnp.int32), jnp.asarray([30, 31], jnp.int32)
    before = read_blocks(pool, ids)
    bytes_of, *_, scales_of = before  # keys and values together or apart
    assert bytes_of.dtype.itemsize == 1 and np.asarray(bytes_of).any()
    assert scales_of.dtype == np.float32 and scales_of.shape[:2] == (2, shape.num_layers)
    copied = copy_blocks(pool, ids, others)
    written = write_blocks(pool, others, before)
    for moved in (copied, written):
        for array, expected in zip(read_blocks(moved, others), before, strict=True):
            np.testing.assert_array_equal(array, expected)
    absent = read_blocks(pool, jnp.asarray([99], jnp.int32))
    assert np.isnan(absent[-1]).all() and not np.asarray(absent[0]).any()


def test_a_back_end_that_knows_no_scales_refuses_by_name():
    spec = Shape(pool_dtype="int8").spec
    with pytest.raises(ValueError, match="must be one of float32, bfloat16, float16, got int8"):
        check_spec(spec)
    assert check_spec(spec, quantized=True) == spec
