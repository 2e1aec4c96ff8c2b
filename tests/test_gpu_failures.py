"""Failures A82 to A90 against the Hopper kernel, interpreted: the contract's own tests, at sizes
with few thread blocks. (A85 and more of A82 and A86: `tests/test_gpu_contract.py`.)
"""

import numpy as np
import pytest

from tests import gpu_interpreter
from tests import test_kernels_contract as contract
from tests import test_kernels_pool as pools
from tests.kernel_steps import Rows, Shape, make_step, random_sequences, run_step

NAME = gpu_interpreter.NAME
INT8 = {"dtype": "bfloat16", "pool_dtype": "int8"}
SMALL = Shape(
    decode_rows=1,
    chunk_rows=1,
    chunk_tokens=24,
    table_width=8,
    num_blocks=24,
    num_heads=2,
    num_kv_heads=1,
    head_size=16,
    dtype="bfloat16",
    pool_dtype="bfloat16",
)
DECODES, CHUNKS = SMALL._replace(chunk_rows=0, chunk_tokens=0), SMALL._replace(decode_rows=0)
MIXED = Rows(decodes=(70,), chunks=((20, 90),))


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with gpu_interpreter.interpreted_gpu():
        yield


def test_a82_a_slot_outside_the_pool_is_dropped():
    shape = SMALL._replace(num_blocks=6, block_size=8, num_layers=3)
    contract.check_slots_outside_the_pool(NAME, shape)


def test_a83_a_step_over_a_very_large_pool_has_no_wide_index():
    pools.check_very_large_pool(NAME, "bfloat16")


def test_a84_ragged_lengths():
    lengths = (5, 1, 9, 3, 8, 4)
    shape = CHUNKS._replace(chunk_rows=6, chunk_tokens=32, block_size=8)
    for order in (lengths, lengths[::-1]):
        step = make_step(shape, Rows(chunks=tuple((length, length) for length in order)))
        contract.assert_close(
            run_step(NAME, shape, step).out, contract.expected_output(shape, step)
        )


@pytest.mark.sweep
def test_a84_ragged_lengths_in_all_orders():
    shape = CHUNKS._replace(chunk_rows=3, chunk_tokens=32, block_size=8)
    contract.check_ragged_lengths(NAME, (2, 3), shape)


@pytest.mark.parametrize("pool_dtype", ["bfloat16", pytest.param("int8", marks=pytest.mark.sweep)])
def test_a86_unused_slots_never_matter(pool_dtype):
    shape = SMALL._replace(pool_dtype=pool_dtype)
    fills = (float("nan"), float("inf"), 0.0)
    steps = [make_step(shape, MIXED, unused_id=i) for i in (0, shape.num_blocks - 1)]
    outs = [run_step(NAME, shape, step, fill=fill).out for step in steps for fill in fills]
    assert np.isfinite(outs[0].astype(np.float32)).all()
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_a87_softcap_of_huge_scores():
    shape = CHUNKS._replace(num_heads=1, chunk_rows=3)
    contract.check_softcap_of_huge_scores(NAME, shape)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (DECODES, Rows(decodes=(24,))),
        (CHUNKS, Rows(chunks=((24, 24),))),
        (CHUNKS, Rows(chunks=((5, 24),))),
    ],
    ids=["decode", "prefill", "chunk"],
)
def test_a88_a_window_is_the_query_and_the_keys_just_before(shape, rows):
    contract.check_window(NAME, rows, shape)


@pytest.mark.parametrize("longest", [5, pytest.param(16, marks=pytest.mark.sweep)])
def test_a89_every_query_length_of_every_key_length(longest):
    shape = CHUNKS._replace(
        chunk_rows=15, chunk_tokens=160, block_size=8, num_blocks=40, num_heads=1
    )
    contract.check_lengths(NAME, longest, shape)


@pytest.mark.parametrize("sizes", [{}, pytest.param(INT8, marks=pytest.mark.sweep)])
def test_a90_a_row_does_not_feel_its_neighbours(sizes):
    """The same bits alone and in company, at another place and over other blocks."""
    shape = SMALL._replace(**sizes)
    company = random_sequences(shape, MIXED)
    together = make_step(shape, MIXED, company)
    out = run_step(NAME, shape, together).out
    for i, rows in enumerate((Rows(decodes=MIXED.decodes), Rows(chunks=MIXED.chunks))):
        alone = make_step(shape, rows, [company[i]], seed=i + 1)
        own = run_step(NAME, shape, alone).out
        np.testing.assert_array_equal(own[alone.sequences[0][0]], out[together.sequences[i][0]])


def test_a_row_of_nan_spoils_no_other():
    contract.check_nan_spoils_no_other(NAME, SMALL, MIXED)
