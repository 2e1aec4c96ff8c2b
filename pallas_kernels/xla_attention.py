"""Cuts a step's attention into pieces of about the same work, and puts their results together.

Nothing here has the pool's size, nor the block tables' width.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool
from pallas_kernels.scoring import Scoring
from pallas_kernels.xla_tiles import MASKED, KVTiles, product_precision

MOST_ITEMS = 8  # at once; measured on CPUs, where more fall out of the cache
QUERY_TILE_LEN = 64


def attend_decodes(
    q: Float[Array, "R H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
) -> Float[Array, "R H D"]:
    """The queries of the first R rows, one each.

    Every key tile of every row is one item of a list; a few items are taken at a time, whichever
    rows they are of, so no row waits for a longer one.
    """
    num_rows = q.shape[0]
    if num_rows == 0:
        return q
    tiles = KVTiles(pool, attn.block_tables, scoring, layer)
    precision = product_precision(q.dtype, pool)
    position = attn.seq_lens[:num_rows, None] - 1
    first, end = tiles.span(position)
    items_end = jnp.cumsum(end - first, dtype=jnp.int32)
    # Rows that see something, numbered: those of W neighbouring items are W neighbours at most.
    place = jnp.maximum(jnp.cumsum(end > first, dtype=jnp.int32) - 1, 0)
    queries = tiles.scale_queries(q[:, None])  # [R,K,G,D]
    num_items = min(num_rows, MOST_ITEMS)  # W
    lane = jnp.arange(num_items, dtype=jnp.int32)

    def some_items(i, state):
        item = i * num_items + lane
        row = jnp.sum(item[:, None] >= items_end[None], axis=1, dtype=jnp.int32)
        listed = row < num_rows
        row = jnp.minimum(row, num_rows - 1)
        scores, seen, values = tiles.scores_and_values(
            queries[row],
            row,
            end[row] - items_end[row] + item,
            jnp.where(listed, position[row, 0], -1)[:, None],
            precision,
        )
        start = place[row[0]]
        neighbour = place[row] - start  # [W], below W
        mine = (neighbour[None] == lane[:, None]) & listed[None]  # [W rows, W items]
        top, total, out = (lax.dynamic_slice_in_dim(a, start, num_items) for a in state)
        item_top = jnp.where(mine[..., None, None], scores.max(axis=-1)[None], MASKED)
        new_top = jnp.maximum(top, item_top.max(axis=1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[neighbour][..., None]), 0)
        part = jnp.einsum("rkmj,rkjd->rkmd", weights, values, precision=precision)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + _sum_by_row(mine, weights.sum(axis=-1))
        out = out * shrink[..., None] + _sum_by_row(mine, part)
        new = (new_top, total, out)
        return tuple(
            lax.dynamic_update_slice_in_dim(a, b, start, axis=0)
            for a, b in zip(state, new, strict=True)
        )

    top, total = tiles.start((num_rows + num_items, *queries.shape[1:3]))
    out = jnp.zeros((*top.shape, queries.shape[3]), jnp.float32)
    num_steps = (items_end[-1] + num_items - 1) // num_items
    _, total, out = lax.fori_loop(0, num_steps, some_items, (top, total, out))
    out = tiles.finish(total, out, num_queries=1)[place, 0]
    return jnp.where((end > first)[:, None, None], out, 0).astype(q.dtype)


def _sum_by_row(mine: Bool[Array, "W W"], items: Float[Array, "W ..."]) -> Float[Array, "W ..."]:
    """Each row's sum over its own items."""
    flat = items.reshape(items.shape[0], -1)
    total = jnp.einsum("ri,ie->re", mine.astype(flat.dtype), flat, precision=lax.Precision.HIGHEST)
    return total.reshape(items.shape)


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
    tiles = KVTiles(pool, attn.block_tables, scoring, layer)
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
        part = _attend_query_tile(
            lax.dynamic_slice_in_dim(queries, start, tile_len), tiles, row + decode_rows, at
        )
        # The tile's tail reaches into the next row: zeros there, until that row's turn comes.
        return lax.dynamic_update_slice_in_dim(out, part.astype(q.dtype), start, axis=0)

    out = lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(queries))
    return out[:num_tokens]


def _attend_query_tile(
    q: Float[Array, "Q H D"], tiles: KVTiles, row: Int[Array, ""], position: Int[Array, " Q"]
) -> Float[Array, "Q H D"]:
    """Q queries of a row, in float32, one key tile after the other; a query with a negative
    position gives 0."""
    precision = product_precision(q.dtype, tiles.pool)
    queries = tiles.scale_queries(q[None])  # [1,K,Q*G,D]
    group_size = q.shape[1] // tiles.pool.spec.num_kv_heads
    per_head = jnp.repeat(position, group_size)[None]  # [1,Q*G]
    (first,), (end,) = tiles.span(position[None])

    def one_tile(tile, state):
        top, total, out = state
        scores, seen, values = tiles.scores_and_values(
            queries, row[None], tile[None], per_head, precision
        )
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(axis=-1)
        part = jnp.einsum("rkmj,rkjd->rkmd", weights, values, precision=precision)
        return new_top, total, out * shrink[..., None] + part

    state = (*tiles.start(queries.shape[:-1]), jnp.zeros_like(queries))
    _, total, out = lax.fori_loop(first, end, one_tile, state)
    return tiles.finish(total, out, num_queries=q.shape[0])[0]
