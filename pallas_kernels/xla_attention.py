"""Attention over a paged pool by tiles of a few blocks, with an online softmax.

Work is cut into query tiles, each of one row, so that a tile walks only the keys its own queries
see. Nothing here has the pool's size, nor the block tables' width.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.pool import KVPool, block_in_range
from pallas_kernels.scoring import Scoring

BLOCKS_PER_TILE = 8
QUERY_TILE = 32
MASKED = -1e30  # finite, so that a tile without a visible key gives no NaN


def attend_decodes(
    q: Float[Array, "R H D"],
    pool: KVPool,
    block_tables: Int[Array, "R B"],
    seq_lens: Int[Array, " R"],
    scoring: Scoring,
    *,
    layer: int | Int[Array, ""],
) -> Float[Array, "R H D"]:
    """One query a row, at the row's last position."""
    if q.shape[0] == 0:
        return q
    out = _attend_tile(q[:, None], pool, block_tables, seq_lens[:, None] - 1, scoring, layer)
    return out[:, 0]


def attend_prefills(
    q: Float[Array, "C H D"],
    pool: KVPool,
    block_tables: Int[Array, "R B"],
    seq_lens: Int[Array, " R"],
    query_start_loc: Int[Array, " R_plus_1"],
    scoring: Scoring,
    *,
    layer: int | Int[Array, ""],
) -> Float[Array, "C H D"]:
    """Ragged queries: row r owns tokens `query_start_loc[r]` to `query_start_loc[r + 1] - 1`."""
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return q
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    tiles_end = jnp.cumsum((query_lens + QUERY_TILE - 1) // QUERY_TILE)
    padding = ((0, QUERY_TILE), (0, 0), (0, 0))
    q = jnp.pad(q, padding)
    lane = jnp.arange(QUERY_TILE, dtype=jnp.int32)

    def one_tile(tile: Int[Array, ""], out: Float[Array, "C_plus H D"]):
        row = jnp.searchsorted(tiles_end, tile, side="right").astype(jnp.int32)
        tile_in_row = tile - jnp.where(row > 0, tiles_end[row - 1], 0)
        first = tile_in_row * QUERY_TILE
        start = query_start_loc[row] + first
        position = seq_lens[row] - query_lens[row] + first + lane
        position = jnp.where(position < seq_lens[row], position, -1)
        queries = lax.dynamic_slice_in_dim(q, start, QUERY_TILE)
        table = lax.dynamic_slice_in_dim(block_tables, row, 1)
        tile_out = _attend_tile(queries[None], pool, table, position[None], scoring, layer)
        # The tile's tail reaches into the next row: zeros there, until that row's turn comes.
        return lax.dynamic_update_slice_in_dim(out, tile_out[0], start, axis=0)

    out = lax.fori_loop(0, tiles_end[-1], one_tile, jnp.zeros_like(q))
    return out[:num_tokens]


def _attend_tile(
    q: Float[Array, "R Q H D"],
    pool: KVPool,
    block_tables: Int[Array, "R B"],
    position: Int[Array, "R Q"],
    scoring: Scoring,
    layer: int | Int[Array, ""],
) -> Float[Array, "R Q H D"]:
    """Q queries of each of R rows; a query with a negative position gives 0."""
    keys, values = pool.arrays
    spec = pool.spec
    num_rows, num_queries, num_heads, head_size = q.shape
    num_kv_heads, block_size = spec.num_kv_heads, spec.block_size
    group_size = num_heads // num_kv_heads
    table_width = block_tables.shape[1]
    past_the_end = spec.num_layers * spec.num_blocks
    kv_tile = BLOCKS_PER_TILE * block_size

    scale = jnp.float32(scoring.scale)
    q32 = q.astype(jnp.float32).reshape(num_rows, num_queries, num_kv_heads, group_size, head_size)
    q32 = q32.transpose(0, 2, 1, 3, 4) * scale  # [R,K,Q,G,D]
    if scoring.k_scale is not None:
        q32 = q32 * scoring.k_scale[None, :, None, None, None]

    def one_tile(tile, state):
        top, total, out = state
        column = tile * BLOCKS_PER_TILE + jnp.arange(BLOCKS_PER_TILE, dtype=jnp.int32)
        ids = jnp.take(block_tables, jnp.minimum(column, table_width - 1), axis=1)
        ids = jnp.where(column[None] < table_width, ids, 0)
        index = block_in_range(spec, layer, ids)
        exists = (ids > 0) & (index < past_the_end)
        index = jnp.where(exists, index, 0)
        k_tile = keys[index].astype(jnp.float32)  # [R,t,K,D,b]
        v_tile = values[index].astype(jnp.float32)  # [R,t,K,b,D]
        key_position = (tile * kv_tile + jnp.arange(kv_tile, dtype=jnp.int32))[None, None]
        exists = jnp.repeat(exists, block_size, axis=1)
        seen = exists[:, None] & (key_position <= position[:, :, None])  # [R,Q,t*b]
        if scoring.window is not None:
            seen &= key_position > position[:, :, None] - scoring.window
        used = seen.any(axis=1).reshape(num_rows, BLOCKS_PER_TILE, 1, block_size, 1)
        v_tile = jnp.where(used, v_tile, 0)

        scores = jnp.einsum("rkqgd,rtkdb->rkqgtb", q32, k_tile)
        scores = scores.reshape(*scores.shape[:4], kv_tile)
        if scoring.softcap is not None:
            scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
        seen = seen[:, None, :, None]
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, where=seen, initial=MASKED))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(axis=-1)
        weights = weights.reshape(*weights.shape[:4], BLOCKS_PER_TILE, block_size)
        out = out * shrink[..., None] + jnp.einsum("rkqgtb,rtkbd->rkqgd", weights, v_tile)
        return new_top, total, out

    shape = q32.shape[:-1]
    top = jnp.full(shape, MASKED, jnp.float32)
    total = jnp.zeros(shape, jnp.float32)
    if scoring.sinks is not None:
        sinks = scoring.sinks.reshape(1, num_kv_heads, 1, group_size)
        top, total = jnp.broadcast_to(sinks, shape), jnp.ones(shape, jnp.float32)
    first = jnp.int32(0)
    if scoring.window is not None:
        lowest = jnp.min(jnp.where(position >= 0, position, jnp.int32(2**31 - 1)))
        first = jnp.maximum(lowest - scoring.window + 1, 0) // kv_tile
    end = (jnp.max(position) + kv_tile) // kv_tile
    end = jnp.minimum(end, -(-table_width // BLOCKS_PER_TILE))
    top, total, out = lax.fori_loop(first, end, one_tile, (top, total, jnp.zeros_like(q32)))
    out = out / jnp.where(total > 0, total, 1)[..., None]
    if scoring.v_scale is not None:
        out = out * scoring.v_scale[None, :, None, None, None]
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape).astype(q.dtype)
