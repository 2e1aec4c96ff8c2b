"""Cuts a step's queries into tiles whose rows have about the same work.

Nothing here has the pool's size, nor the block tables' width.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool
from pallas_kernels.scoring import Scoring
from pallas_kernels.xla_tiles import attend_tile

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

    def one_group(i, out):
        rows = lax.dynamic_slice_in_dim(order, i * group, group)
        at = lax.dynamic_slice_in_dim(position, i * group, group)
        part = attend_tile(
            q[rows][:, None],
            pool,
            attn.block_tables,
            rows,
            at[:, None],
            scoring,
            layer=layer,
        )
        return lax.dynamic_update_slice_in_dim(out, part[:, 0].astype(q.dtype), i * group, axis=0)

    num_groups = (jnp.sum(seq_lens > 0, dtype=jnp.int32) + group - 1) // group
    out = jnp.zeros((order.shape[0], *q.shape[1:]), q.dtype)
    out = lax.fori_loop(0, num_groups, one_group, out)
    return out[jnp.argsort(order[:num_rows])]


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
    starts = attn.query_start_loc[decode_rows:] - decode_rows
    seq_lens = attn.seq_lens[decode_rows:]
    tile_len = min(QUERY_TILE_LEN, num_tokens)
    query_lens = starts[1:] - starts[:-1]
    tiles_end = jnp.cumsum((query_lens + tile_len - 1) // tile_len)
    queries = jnp.pad(q, ((0, tile_len), (0, 0), (0, 0)))
    lane = jnp.arange(tile_len, dtype=jnp.int32)

    def one_tile(tile, out):
        row = jnp.searchsorted(tiles_end, tile, side="right").astype(jnp.int32)
        num_tiles = (query_lens[row] + tile_len - 1) // tile_len
        first = (tile - (tiles_end[row] - num_tiles)) * tile_len
        at = seq_lens[row] - query_lens[row] + first + lane
        at = jnp.where(at < seq_lens[row], at, -1)
        start = starts[row] + first
        part = attend_tile(
            lax.dynamic_slice_in_dim(queries, start, tile_len)[None],
            pool,
            attn.block_tables,
            row[None] + decode_rows,
            at[None],
            scoring,
            layer=layer,
        )
        # The tile's tail reaches into the next row: zeros there, until that row's turn comes.
        return lax.dynamic_update_slice_in_dim(out, part[0].astype(q.dtype), start, axis=0)

    out = lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(queries))
    return out[:num_tokens]
