"""The TPU kernels, interpreted: the contract's cases against float64, and its failure cases."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import KVSpec, TpuBackend, choose_backend, get_backend, tpu_attention, tpu_loads
from pallas_kernels.tpu_slab import Slab
from tests import test_kernels_contract as contract
from tests import test_kernels_pool as pools
from tests.kernel_steps import Rows, Shape, make_step, run_step
from tests.pairwise import drawn, pairwise

DTYPES = {  # of the queries and of the pool
    "f32": ("float32", "float32"),
    "bf16": ("bfloat16", "bfloat16"),
    "f32_bf16": ("float32", "bfloat16"),
    "bf16_f32": ("bfloat16", "float32"),
}
OF_BYTES = {
    "bf16_int8": ("bfloat16", "int8"),
    "f32_e4m3": ("float32", "float8_e4m3fn"),
    "bf16_e5m2": ("bfloat16", "float8_e5m2"),
}
FACTORS = {
    "head_size": (64, 80, 96, 128, 256),
    "heads": ((4, 2), (3, 3), (5, 1)),  # H, K: groups of 2, 1 and 5; K odd and even
    "block_size": (8, 16, 32, 64, 256),
    "dtype": tuple(DTYPES),
    # Interpreted, a fetch has 128 keys, a tile of them 64, a tile of queries 32.
    "rows": ("decode", "prefill"),
    "window": (None, 1, 20),
    "softcap": (None, 5.0),
    "sinks": (False, True),
    "scales": (False, True),
}
CASES = pairwise(FACTORS, seed=6)
# What a byte a value changes: rows and lanes of slabs, lines of scales, what is cleared.
CASES_OF_BYTES = pairwise(
    {
        "head_size": (64, 128),
        "heads": ((4, 2), (3, 3), (8, 8)),
        "block_size": (16, 256),
        "dtype": tuple(OF_BYTES),
        "rows": ("decode", "prefill"),
        "window": (None, 20),
    }
)
CASES += {case["dtype"]: case for case in CASES_OF_BYTES}.values()  # one of each; the sweep has all
# Of the 25,200 of the full product, some minutes' worth.
MORE_CASES = [case for case in CASES_OF_BYTES if case not in CASES]
MORE_CASES += drawn(FACTORS | {"dtype": (*DTYPES, *OF_BYTES)}, 100, seed=0)
ROWS = {
    "decode": Rows(decodes=(1, 63, 150)),
    "prefill": Rows(chunks=((33, 33), (1, 129))),
}


def name_of(case: dict[str, Any]) -> str:
    return "-".join(
        f"{name}_{value}".replace(" ", "")
        for name, value in case.items()
        if value not in (None, False)
    )


def case_of(case: dict[str, Any]) -> tuple[Shape, Rows, dict[str, Any]]:
    num_heads, num_kv_heads = case["heads"]
    dtype, pool_dtype = (DTYPES | OF_BYTES)[case["dtype"]]
    decode = case["rows"] == "decode"
    block_size = case["block_size"]
    shape = Shape(
        decode_rows=5 if decode else 0,
        chunk_rows=0 if decode else 3,
        chunk_tokens=0 if decode else 40,
        table_width=-(-152 // block_size),
        num_blocks=216 // block_size + 5,
        block_size=block_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=case["head_size"],
        dtype=dtype,
        pool_dtype=pool_dtype,
    )
    scoring = {name: case[name] for name in ("window", "softcap") if case.get(name)}
    if case.get("sinks"):
        scoring["sinks"] = np.linspace(-2, 3, num_heads, dtype=np.float32)
    if case.get("scales"):
        scoring["k_scale"] = np.linspace(0.2, 1.5, num_kv_heads, dtype=np.float32)
        scoring["v_scale"] = np.linspace(0.5, 2, num_kv_heads, dtype=np.float32)
    return shape, ROWS[case["rows"]], scoring


def check_case(case: dict[str, Any]) -> None:
    """Over permuted blocks; whatever is no key of a row is NaN."""
    shape, rows, scoring = case_of(case)
    step = make_step(shape, rows)
    out = run_step("tpu", shape, step, **scoring).out
    expected = contract.expected_output(shape, step, **scoring)
    contract.assert_close(out, expected)
    assert (out[np.all(expected == 0, axis=(1, 2))] == 0).all()


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_attention_is_that_of_float64(case):
    check_case(case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", MORE_CASES, ids=name_of)
def test_attention_is_that_of_float64_in_more_cases(case):
    check_case(case)


def test_there_are_as_many_cases_as_promised():
    assert len(CASES) >= 24
    assert len(MORE_CASES) > 100
    assert {case["dtype"] for case in CASES} == {*DTYPES, *OF_BYTES}


def test_a11_writing_replaces_what_was_in_the_slot():
    contract.test_a11_writing_replaces_what_was_in_the_slot("tpu")


def test_a82_a_slot_outside_the_pool_is_dropped():
    contract.test_a82_a_slot_outside_the_pool_is_dropped("tpu")


@pytest.mark.parametrize("bad_id", [0, 128, -1, 2**31 - 1, -(2**31)])
def test_a82_the_null_block_and_blocks_outside_the_pool_are_not_read(bad_id):
    contract.test_a82_the_null_block_and_blocks_outside_the_pool_are_not_read("tpu", bad_id)


def test_a83_a_step_over_a_very_large_pool_has_no_wide_index():
    pools.test_a83_a_step_over_a_very_large_pool_has_no_wide_index("tpu")


def test_a84_ragged_lengths_in_all_orders():
    contract.test_a84_ragged_lengths_in_all_orders("tpu", counts=(2, 3))


def test_a85_rows_without_keys_give_zero_and_change_nothing():
    contract.test_a85_rows_without_keys_give_zero_and_change_nothing("tpu")


def test_a86_unused_slots_never_matter():
    contract.test_a86_unused_slots_never_matter("tpu", "plain")


def test_a87_softcap_of_huge_scores():
    contract.test_a87_softcap_of_huge_scores("tpu", "bfloat16")


@pytest.mark.parametrize(
    "rows",
    [Rows(decodes=(24,)), Rows(chunks=((24, 24),)), Rows(chunks=((5, 24),))],
    ids=["decode", "prefill", "chunk"],
)
def test_a88_a_window_is_the_query_and_the_keys_just_before(rows):
    contract.test_a88_a_window_is_the_query_and_the_keys_just_before("tpu", rows)


def test_a89_every_query_length_of_every_key_length():
    contract.test_a89_every_query_length_of_every_key_length("tpu")


@pytest.mark.parametrize("decodes", [(300, 17, 130), (17, 65, 300)])
def test_a90_a_row_does_not_feel_its_neighbours(decodes):
    contract.test_a90_a_row_does_not_feel_its_neighbours("tpu", "plain", decodes)


def test_a_row_of_nan_spoils_no_other():
    contract.test_a_row_of_nan_spoils_no_other("tpu")


def test_a_row_longer_than_its_table_sees_what_the_table_has():
    contract.test_a_row_longer_than_its_table_sees_what_the_table_has("tpu")


def test_64_bit_mode_changes_nothing():
    contract.test_64_bit_mode_changes_nothing("tpu")


def test_block_tables_larger_than_scalar_memory_are_split(monkeypatch):
    """Into calls of a few rows each; the result is the same bits."""
    shape, scoring = contract.CONFIGS["plain"]
    step = make_step(shape, contract.BATCHES["mixed"])
    whole = run_step("tpu", shape, step, **scoring).out
    monkeypatch.setattr(tpu_attention, "MAX_TABLE_ENTRIES", 2 * shape.table_width)
    other = shape._replace(num_blocks=shape.num_blocks + 1)  # a program of its own
    split = run_step("tpu", other, step, **scoring).out
    np.testing.assert_array_equal(split, whole)
    monkeypatch.setattr(tpu_attention, "MAX_TABLE_ENTRIES", shape.table_width - 1)
    with pytest.raises(ValueError, match=r"block_tables has 24 columns; .* at most 23"):
        run_step("tpu", shape._replace(num_blocks=shape.num_blocks + 2), step, **scoring)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_both_ways_to_load_rows_give_the_same_bits(stored):
    """The only function that differs between interpreted and compiled kernels."""
    dtype = jnp.dtype(stored)
    slab = Slab(3, 128, dtype)
    bits = np.random.default_rng(0).integers(0, 256, (16, *slab.shape, dtype.itemsize), np.uint8)
    values = bits.view(dtype)[..., 0]
    wide = values.astype(np.float32)
    least = float(jnp.finfo(dtype).smallest_normal) if jnp.issubdtype(dtype, jnp.floating) else 0
    stored_ones = np.isfinite(wide) & (np.abs(wide) >= least)  # see `quantized_kv.encode`
    values = np.where(stored_ones, values, np.zeros_like(values))
    slabs = jnp.asarray(values.view(slab.stored))

    def rows(loads):
        def kernel(ref, out):
            for row in range(slab.num_rows):
                out[row] = tpu_loads.load_rows(ref, range(row, row + 1), dtype, jnp.float32, loads)

        shape = jax.ShapeDtypeStruct((slab.num_rows, 16, 128), jnp.float32)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(slabs)

    words, packing, lanes = slab.shape
    expected = values.astype(np.float32).reshape(16, words * packing, lanes)
    for loads in ("strided", "plain"):
        np.testing.assert_array_equal(rows(loads), expected.swapaxes(0, 1)[: slab.num_rows])


SPEC = KVSpec(2, 8, 16, 2, 64, jnp.dtype("bfloat16"))


def test_auto_takes_it_on_a_tpu_and_xla_where_it_cannot():
    backend, reason = choose_backend("auto", "TPU v5 lite", [SPEC])
    assert (backend.name, backend.chip.name) == ("tpu", "v5e")
    assert reason == "tpu: auto, made for 'TPU v5 lite'"
    for change, why in (
        ({"dtype": jnp.dtype("float16")}, "a pool of dtype float16"),
        ({"block_size": 12}, "block_size=12"),
        ({"block_size": 24, "dtype": jnp.dtype("int8")}, "block_size=24 with dtype int8"),
    ):
        spec = SPEC._replace(**change)
        backend, reason = choose_backend("auto", "TPU v5 lite", [SPEC, spec])
        assert backend.name == "xla"
        assert f"tpu cannot: {why}" in reason
        by_name, _ = choose_backend("tpu", "TPU v5 lite")
        with pytest.raises(ValueError, match=f"the tpu back end cannot take {why}"):
            by_name.layout(spec)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_a_pool_of_bytes_is_half_of_one_of_bfloat16(dtype):
    """And its scales an eighth of it at most, in blocks of 64 and more."""
    backend = TpuBackend()
    for block_size, share in ((64, 0.54), (128, 0.52), (256, 0.52)):
        spec = KVSpec(2, 8, block_size, 8, 128, jnp.dtype("bfloat16"))
        whole = backend.layout(spec).num_bytes
        small = backend.layout(spec._replace(dtype=jnp.dtype(dtype))).num_bytes
        assert whole / 2 < small < share * whole


def test_where_there_is_no_tpu_it_is_interpreted():
    backend, _ = choose_backend("tpu", "cpu")
    assert backend == TpuBackend() == get_backend("tpu")
    assert hash(backend) == hash(dataclasses.replace(backend))


def test_queries_of_float16_are_refused_by_name():
    shape = Shape(dtype="float16", chunk_rows=0, chunk_tokens=0)
    with pytest.raises(ValueError, match="q has dtype float16"):
        run_step("tpu", shape, make_step(shape, Rows(decodes=(3,))))
