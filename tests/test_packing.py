"""The packed layout of a step's tokens: no padding between decodes and chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_jax.packing import pack, unpack

ROWS, SIZE = 5, 12  # D and C


@st.composite
def steps(draw) -> tuple[int, int]:
    """Decodes and tokens of chunks that fit."""
    num_decodes = draw(st.integers(0, ROWS))
    return num_decodes, draw(st.integers(0, SIZE - num_decodes))


def tokens_of(num_decodes: int, num_chunk_tokens: int) -> np.ndarray:
    """By row: decodes from 1 on, chunks from 101 on, padding NaN."""
    tokens = np.full(ROWS + SIZE, np.nan, np.float32)
    tokens[:num_decodes] = 1 + np.arange(num_decodes)
    tokens[ROWS : ROWS + num_chunk_tokens] = 101 + np.arange(num_chunk_tokens)
    return tokens


@given(steps())
def test_the_decodes_come_first_and_the_chunks_right_behind_them(step):
    num_decodes, num_chunk_tokens = step
    packed = pack(jnp.asarray(tokens_of(*step)), jnp.int32(num_decodes), decode_rows=ROWS)
    expected = [*(1 + np.arange(num_decodes)), *(101 + np.arange(num_chunk_tokens))]
    np.testing.assert_array_equal(packed[: sum(step)], np.asarray(expected, np.float32))
    assert packed.shape == (SIZE,)


@given(steps())
def test_what_was_packed_comes_back_where_it_was(step):
    tokens = tokens_of(*step)
    num_decodes = jnp.int32(step[0])
    packed = pack(jnp.asarray(tokens), num_decodes, decode_rows=ROWS)
    back = np.asarray(unpack(packed, num_decodes, decode_rows=ROWS))
    real = ~np.isnan(tokens)
    np.testing.assert_array_equal(back[real], tokens[real])
    assert back.shape == tokens.shape


@pytest.mark.parametrize("size", [1, ROWS - 2, ROWS, SIZE])
def test_there_may_be_more_rows_than_tokens(size):
    tokens = jnp.arange(ROWS + size)
    packed = pack(tokens, jnp.int32(0), decode_rows=ROWS)
    assert packed.tolist() == list(range(ROWS, ROWS + size))
    assert unpack(packed, jnp.int32(0), decode_rows=ROWS)[ROWS:].tolist() == packed.tolist()


def test_axes_behind_the_tokens_are_kept():
    x = jax.random.normal(jax.random.key(0), (ROWS + SIZE, 3, 2))
    packed = pack(x, jnp.int32(2), decode_rows=ROWS)
    np.testing.assert_array_equal(packed, np.concatenate([x[:2], x[ROWS : ROWS + SIZE - 2]]))
