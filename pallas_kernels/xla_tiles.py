"""A few queries against their rows' keys: an online softmax over tiles of a few blocks."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import MAX_INT32, KVPool
from pallas_kernels.quantized_kv import decode
from pallas_kernels.scoring import Scoring

KV_TILE_LEN = 64  # keys of a row taken together, in whole blocks; measured on CPUs
FEW_QUERIES = 32  # of a row and KV head
NO_KEY = -1e30  # the maximum of no scores: finite, so that a query that sees nothing gives no NaN
MASKED = 2 * NO_KEY  # below it, so that its weight is 0 even there


class QueryTile(NamedTuple):
    """Q queries of each of R rows, which walk their keys together; or X of them, on axis 0."""

    rows: Int[Array, "*X R"]
    position: Int[Array, "*X R Q"]  # of each query; negative: none
    first_key: Int[Array, "*X R"]  # that any query of the row sees
    last_key: Int[Array, "*X R"]  # likewise; one less than the first where none sees any
    num_key_tiles: Int[Array, "*X"]  # from the first, of the row that has the most


def query_tiles(
    rows: Int[Array, "X R"],
    position: Int[Array, "X R Q"],
    pool: KVPool,
    attn: GroupMetadata,
    window: int | None,
) -> QueryTile:
    """X tiles. Nothing of them is of a layer: XLA computes them once for all that are alike."""
    kv_tile_len = _key_tile(pool, attn)[1]
    num_table_keys = attn.block_tables.shape[1] * pool.spec.block_size
    last = jnp.minimum(jnp.max(position, axis=2), num_table_keys - 1)
    first = jnp.zeros_like(last)
    if window is not None:
        lowest = jnp.min(jnp.where(position >= 0, position, MAX_INT32), axis=2)
        first = jnp.minimum(jnp.maximum(lowest - window + 1, 0), last + 1)
    num_key_tiles = last // kv_tile_len - first // kv_tile_len + 1
    num_key_tiles = jnp.where(last >= first, num_key_tiles, 0)
    return QueryTile(rows, position, first, last, jnp.max(num_key_tiles, axis=1))


def nth_tile(tiles: QueryTile, i: Int[Array, ""]) -> QueryTile:
    """One of X tiles."""
    nth = partial(lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False)
    return jax.tree.map(lambda x: nth(x, i), tiles)


def pick(array: jax.Array, index: Any) -> jax.Array:
    """`array[index]` for indices that are there: XLA is not told to mend others."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _key_tile(pool: KVPool, attn: GroupMetadata) -> tuple[int, int]:
    """Blocks and keys of a row that are taken together."""
    block_size, table_width = pool.spec.block_size, attn.block_tables.shape[1]
    tile_blocks = min(max(KV_TILE_LEN // block_size, 1), table_width)
    return tile_blocks, tile_blocks * block_size


def attend_tile(
    q: Float[Array, "R Q H D"],
    pool: KVPool,
    attn: GroupMetadata,
    tile: QueryTile,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
) -> Float[Array, "R Q H D"]:
    """The attention of a tile of queries, in float32; a query with a negative position gives 0.

    Walks each row's keys from the first that its queries see to the last, a tile of every row at
    a time, so the work is that of the row that has the most of them.
    """
    kv_tile_len = _key_tile(pool, attn)[1]
    num_layers, num_blocks, block_size, num_kv_heads, *_ = pool.spec
    num_rows, num_queries, num_heads, head_size = q.shape
    group_size = num_heads // num_kv_heads
    # Exact float32 products unless both sides are short: an accelerator's default is less.
    short = q.dtype.itemsize == pool.arrays[0].dtype.itemsize == 2
    precision = lax.Precision.DEFAULT if short else lax.Precision.HIGHEST

    queries = _scale_queries(q, scoring, num_kv_heads)  # [R,K,Q*G,D]
    per_head = jnp.repeat(tile.position, group_size, axis=1)[:, :, None]  # [R,Q*G,1]
    first, last = tile.first_key[:, None], tile.last_key[:, None]  # [R,1]
    first_tile = first // kv_tile_len
    lanes = jnp.arange(kv_tile_len, dtype=jnp.int32)[None]

    def one_tile(i, state):
        top, total, out = state
        key_tile = first_tile + i  # [R,1]
        block_ids = _block_ids(pool, attn, tile.rows, key_tile)  # [R,t]
        keys, values = _keys_and_values(pool, layer * num_blocks + block_ids)
        key = key_tile * kv_tile_len + lanes  # its position: [R,J]
        there = jnp.repeat(block_ids > 0, block_size, axis=1) & (key <= last)
        if scoring.window is not None:
            there &= key >= first
        # Zero times NaN is NaN: an unseen slot's value must not meet its zero weight.
        values = jnp.where(there[:, None, :, None], values, 0)
        seen = there[:, None]  # [R,1,J]; by one query, which sees all that is there
        if num_queries > 1:
            seen &= key[:, None] <= per_head  # [R,Q*G,J]
            if scoring.window is not None:
                seen &= key[:, None] > per_head - scoring.window

        scores = _multiply_keys(queries, keys, precision)
        if scoring.softcap is not None:
            scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
        scores = jnp.where(seen[:, None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])  # 0 for what is masked
        shrink = jnp.exp(top - new_top)
        total = total * shrink + weights.sum(axis=-1)
        part = jnp.einsum("rkmj,rkjd->rkmd", weights, values, precision=precision)
        return new_top, total, out * shrink[..., None] + part

    top, total = _start(queries.shape[:-1], scoring, group_size)
    state = (top, total, jnp.zeros_like(queries))
    exists = (layer >= 0) & (layer < num_layers)
    num_tiles = jnp.where(exists, tile.num_key_tiles, 0)
    top, total, out = lax.fori_loop(0, num_tiles, one_tile, state)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    if scoring.v_scale is not None:
        out = out * scoring.v_scale[None, :, None, None]
    out = out.reshape(num_rows, num_kv_heads, num_queries, group_size, head_size)
    return out.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _scale_queries(
    q: Float[Array, "R Q H D"], scoring: Scoring, num_kv_heads: int
) -> Float[Array, "R K M D"]:
    """Queries of a KV head together (M = Q * G), with everything linear folded in."""
    num_rows, num_queries, num_heads, head_size = q.shape
    q = q.astype(jnp.float32) * jnp.asarray(scoring.scale, jnp.float32)
    q = q.reshape(num_rows, num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
    if scoring.k_scale is not None:
        q = q * scoring.k_scale[None, None, :, None, None]
    return q.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, -1, head_size)


def _start(
    shape: tuple[int, ...], scoring: Scoring, group_size: int
) -> tuple[Float[Array, "R K M"], Float[Array, "R K M"]]:
    """The softmax's running maximum and sum before any key: a sink is a key seen already."""
    if scoring.sinks is None:
        return jnp.full(shape, NO_KEY, jnp.float32), jnp.zeros(shape, jnp.float32)
    num_rows, num_kv_heads, num_queries = shape
    sinks = scoring.sinks.reshape(1, num_kv_heads, 1, group_size)
    sinks = jnp.broadcast_to(
        sinks, (num_rows, num_kv_heads, num_queries // group_size, group_size)
    ).reshape(shape)
    return jnp.maximum(sinks, NO_KEY), jnp.ones(shape, jnp.float32)


def _block_ids(
    pool: KVPool, attn: GroupMetadata, rows: Int[Array, " R"], key_tile: Int[Array, "R 1"]
) -> Int[Array, "R t"]:
    """The blocks of one tile of keys of each row. What is no block is 0, the null block; past the
    table's end it is any of the row's."""
    tile_blocks = _key_tile(pool, attn)[0]
    column = key_tile * tile_blocks + jnp.arange(tile_blocks, dtype=jnp.int32)[None]
    inside = jnp.minimum(column, attn.block_tables.shape[1] - 1)
    ids = pick(attn.block_tables, (rows[:, None], inside))
    return jnp.where((ids > 0) & (ids < pool.spec.num_blocks), ids, 0)


def _keys_and_values(
    pool: KVPool, index: Int[Array, "R t"]
) -> tuple[Float[Array, "R K t D b"], Float[Array, "R K J D"]]:
    """Those of these blocks, in float32."""
    keys, values, *scales = (_gather(array, index) for array in pool.arrays)
    if scales:
        dtype = pool.spec.dtype
        keys = decode(keys.swapaxes(-1, -2), scales[0], dtype).swapaxes(-1, -2)
        values = decode(values, scales[1], dtype)
    num_rows, num_kv_heads, *_, head_size = values.shape
    values = values.reshape(num_rows, num_kv_heads, -1, head_size)
    return keys.astype(jnp.float32), values.astype(jnp.float32)


def _gather(array: Shaped[Array, "N K ..."], index: Int[Array, "R t"]) -> jax.Array:
    """Blocks by KV head `[R, K, t, ...]`.

    One index for each slice that lies together: XLA's CPU copies those fastest.
    """
    num_blocks, num_kv_heads, *inner = array.shape
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    index = index[:, None] * num_kv_heads + heads  # [R,K,t]
    flat = array.reshape(num_blocks * num_kv_heads, -1)
    tile = pick(flat, index.reshape(-1))
    return tile.reshape(*index.shape, *inner)


def _multiply_keys(
    queries: Float[Array, "R K M D"],
    keys: Float[Array, "R K t D b"],
    precision: lax.Precision,
) -> Float[Array, "R K M J"]:
    """Each query times each key. A few queries meet the blocks one by one, as they lie; for many
    it pays to put the blocks side by side first."""
    num_rows, num_kv_heads, num_queries, head_size = queries.shape
    tile_blocks, block_size = keys.shape[2], keys.shape[4]
    if num_queries <= FEW_QUERIES:
        queries = jnp.broadcast_to(
            queries[:, :, None], (num_rows, num_kv_heads, tile_blocks, num_queries, head_size)
        )
        scores = jnp.einsum("rktmd,rktdb->rktmb", queries, keys, precision=precision)
        scores = scores.transpose(0, 1, 3, 2, 4)
    else:
        scores = jnp.einsum("rkmd,rktdb->rkmtb", queries, keys, precision=precision)
    return scores.reshape(num_rows, num_kv_heads, num_queries, tile_blocks * block_size)
