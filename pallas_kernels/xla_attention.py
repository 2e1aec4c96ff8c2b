"""Cuts a step's queries into tiles whose rows have about the same work.

Nothing here has the pool's size, nor the block tables' width.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool
from pallas_kernels.scoring import Scoring
from pallas_kernels.xla_tiles import attend_tile, nth_tile, pick, query_tiles

# Measured on CPUs: larger tiles fall out of the cache and waste more on the rows' ends.
DECODE_GROUP = 4
QUERY_TILE_LEN = 64


def attend_decodes(
    q: Float[Array, "R H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
) -> Float[Array, "R H D"]:
    """The queries of the first R rows, one each; a few rows of similar length at a time."""
    num_rows = q.shape[0]
    if num_rows == 0:
        return q
    seq_lens = attn.seq_lens[:num_rows]
    group = min(DECODE_GROUP, num_rows)
    # Longest first: rows of a group end together, and padding rows come last, where no group
    # is run. The last group is filled up with copies of row 0 that see nothing.
    order = jnp.argsort(-seq_lens).astype(jnp.int32)
    order = jnp.pad(order, (0, -num_rows % group))
    filled = jnp.arange(order.shape[0], dtype=jnp.int32) < num_rows
    position = jnp.where(filled, seq_lens[order] - 1, -1)
    tiles = query_tiles(
        order.reshape(-1, group), position.reshape(-1, group, 1), pool, attn, scoring.window
    )

    def one_group(i, out):
        tile = nth_tile(tiles, i)
        part = attend_tile(pick(q, tile.rows)[:, None], pool, attn, tile, scoring, layer=layer)
        return lax.dynamic_update_slice_in_dim(out, part[:, 0].astype(q.dtype), i * group, axis=0)

    num_groups = (jnp.sum(seq_lens > 0, dtype=jnp.int32) + group - 1) // group
    out = jnp.zeros((order.shape[0], *q.shape[1:]), q.dtype)
    out = lax.fori_loop(0, num_groups, one_group, out)
    return pick(out, jnp.argsort(order[:num_rows]))


def attend_prefills(
    q: Float[Array, "C H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
) -> Float[Array, "C H D"]:
    """The queries of the rows after the one-token rows: all but the first T - C tokens."""
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return q
    decode_rows = attn.slot_mapping.shape[0] - num_tokens
    tile_len = min(QUERY_TILE_LEN, num_tokens)
    starts = attn.query_start_loc[decode_rows:] - decode_rows
    cut = _cut_rows(starts, attn.seq_lens[decode_rows:], num_tokens, tile_len)
    tiles = query_tiles(
        decode_rows + cut.rows[:, None], cut.position[:, None], pool, attn, scoring.window
    )
    queries = jnp.pad(q, ((0, tile_len), (0, 0), (0, 0)))

    def one_tile(i, out):
        start = lax.dynamic_index_in_dim(cut.start, i, keepdims=False)
        part = attend_tile(
            lax.dynamic_slice_in_dim(queries, start, tile_len)[None],
            pool,
            attn,
            nth_tile(tiles, i),
            scoring,
            layer=layer,
        )
        # The tile's tail reaches into the next row: zeros there, until that row's turn comes.
        return lax.dynamic_update_slice_in_dim(out, part[0].astype(q.dtype), start, axis=0)

    out = lax.fori_loop(0, cut.num_tiles, one_tile, jnp.zeros_like(queries))
    return out[:num_tokens]


class _Cut(NamedTuple):
    """Chunks cut into tiles of Q queries of one row; those past `num_tiles` are nobody's."""

    rows: Int[Array, " X"]
    start: Int[Array, " X"]  # of the tile's first query, among those of all chunks
    position: Int[Array, "X Q"]  # -1 past the row's end
    num_tiles: Int[Array, ""]


def _cut_rows(
    starts: Int[Array, " S_plus_1"], seq_lens: Int[Array, " S"], num_tokens: int, tile_len: int
) -> _Cut:
    num_rows = seq_lens.shape[0]
    query_lens = starts[1:] - starts[:-1]
    num_tiles = (query_lens + tile_len - 1) // tile_len  # of each row
    ends = jnp.cumsum(num_tiles)

    tile = jnp.arange(num_tokens // tile_len + num_rows, dtype=jnp.int32)
    row = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    row = jnp.minimum(row.astype(jnp.int32), num_rows - 1)
    first = (tile - (ends - num_tiles)[row]) * tile_len
    lane = jnp.arange(tile_len, dtype=jnp.int32)
    position = ((seq_lens - query_lens)[row] + first)[:, None] + lane[None]
    position = jnp.where(position < seq_lens[row][:, None], position, -1)
    return _Cut(row, starts[row] + first, position, ends[-1])
