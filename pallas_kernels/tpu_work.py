"""Cuts a step's queries into work items: a few queries of one row, and the keys that they see."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.metadata import GroupMetadata


class Work(NamedTuple):
    """W items. Query i of an item stands at `position + i` of its row's sequence."""

    row: Int[Array, " W"]
    position: Int[Array, " W"]
    first_key: Int[Array, " W"]
    """The first key that any of the item's queries sees."""
    end_key: Int[Array, " W"]
    """One past the last such key, 0 for an item without work."""

    def only(self, chosen: Bool[Array, " W"]) -> "Work":
        """The same items; those that are not chosen have no work."""
        return self._replace(end_key=jnp.where(chosen, self.end_key, 0))


class Tiling(NamedTuple):
    """Where the prefill tokens went: item and place in it, for each token."""

    item: Int[Array, " C"]
    place: Int[Array, " C"]
    real: Bool[Array, " C"]


def decode_work(attn: GroupMetadata, num_rows: int, room: int, window: int | None) -> Work:
    """One item for each of the first rows; `room` is how many keys a block table has."""
    seq_lens = attn.seq_lens[:num_rows]
    return _work(
        jnp.arange(num_rows, dtype=jnp.int32), seq_lens - 1, seq_lens, room=room, window=window
    )


def prefill_work(
    attn: GroupMetadata, decode_rows: int, query_tile: int, room: int, window: int | None
) -> tuple[Work, Tiling, Int[Array, "W Q"]]:
    """Each row's queries in tiles of `query_tile`, in the row's own order.

    Also, for each token, where it went, and for each query of each item its token.
    """
    num_tokens = attn.slot_mapping.shape[0] - decode_rows
    starts = attn.query_start_loc[decode_rows:] - decode_rows
    seq_lens = attn.seq_lens[decode_rows:]
    num_rows = seq_lens.shape[0]
    query_lens = starts[1:] - starts[:-1]
    num_tiles = (query_lens + query_tile - 1) // query_tile
    tiles_end = jnp.cumsum(num_tiles, dtype=jnp.int32)
    tiles_start = tiles_end - num_tiles

    most = num_tokens // query_tile + num_rows
    item = jnp.arange(most, dtype=jnp.int32)
    row = jnp.searchsorted(tiles_end, item, side="right").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    first_query = (item - tiles_start[row]) * query_tile
    position = seq_lens[row] - query_lens[row] + first_query
    end = jnp.minimum(position + query_tile, seq_lens[row])
    end = jnp.where(item < tiles_end[-1], end, 0)
    work = _work(decode_rows + row, position, end, room=room, window=window)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    its_row = jnp.searchsorted(starts[1:], token, side="right").astype(jnp.int32)
    real = its_row < num_rows
    its_row = jnp.minimum(its_row, num_rows - 1)
    query = token - starts[its_row]
    tiling = Tiling(
        tiles_start[its_row] + query // query_tile, query % query_tile, real & (token < starts[-1])
    )
    lane = jnp.arange(query_tile, dtype=jnp.int32)
    tokens = starts[row][:, None] + first_query[:, None] + lane[None]
    return work, tiling, jnp.clip(tokens, 0, num_tokens - 1)


def _work(row, position, end, *, room: int, window: int | None) -> Work:
    first = jnp.zeros_like(position)
    if window is not None:
        first = jnp.maximum(position - (window - 1), 0)
    end = jnp.minimum(end, room)
    return Work(row, position, first, jnp.where(first < end, end, 0))


def next_items(work: Work, num_cores: int) -> tuple[Int[Array, " cores"], Int[Array, " W"]]:
    """The first item with work of each core's share, and of each item the one after it; W if
    there is none."""
    num_items = work.row.shape[0]
    item = jnp.arange(num_items, dtype=jnp.int32)
    item = jnp.where(work.end_key > 0, item, num_items).reshape(num_cores, -1)
    at_or_after = lax.cummin(item, axis=1, reverse=True)
    after = jnp.pad(at_or_after[:, 1:], ((0, 0), (0, 1)), constant_values=num_items)
    return at_or_after[:, 0], after.reshape(-1)


def padded(work: Work, num_items: int) -> Work:
    """With items without work at the end."""
    more = num_items - work.row.shape[0]
    return Work(*(jnp.pad(array, (0, more)) for array in work))


def pad_items(array: Float[Array, "W ..."], num_items: int) -> Float[Array, "V ..."]:
    widths = [(0, num_items - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths)
