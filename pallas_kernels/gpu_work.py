"""What each thread block of the Hopper kernel does: plain jnp on a few small int32 arrays.

A *tile* is up to `rows` (query, head) pairs of one row of the batch and one KV head: its queries'
heads side by side, so that no group size wastes rows between queries.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu_tuning import ROW_TILE_LEN, TuningConfig
from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import MAX_INT32, KVSpec

# Columns of `Work.spans`.
ROW, FIRST, FAST, SLOW, END, LOWEST, HIGHEST = range(7)
SPAN_LEN = 8


class Tiles(NamedTuple):
    """Which queries lie in which tile; `X` is the number of tiles, `M` of rows in one."""

    row: Int[Array, " X"]  # of the batch
    token: Int[Array, "X M"]  # whose query it is, counted from the first of these tiles
    head: Int[Array, "X M"]  # which head of the group
    position: Int[Array, "X M"]  # in the sequence; -1 where there is no query


class Work(NamedTuple):
    """What the kernel reads beside queries and pool."""

    # [X, splits, 8]: row; the key tiles FIRST..END, of which FAST..SLOW are seen whole by every
    # query; the LOWEST and HIGHEST key that any query of the tile sees.
    spans: Int[Array, "X W 8"]
    # [X, 64 for each warpgroup]: -1 where there is no query.
    positions: Int[Array, "X M64"]
    # [S, key tiles]: bit j says that the tile's j-th block exists.
    existing: Int[Array, "S Y"]


def decode_tiles(attn: GroupMetadata, decode_rows: int, group_size: int, rows: int) -> Tiles:
    """One query a row: its heads fill one tile, or a few if there are more than `rows`."""
    pieces = -(-group_size // rows)
    row = jnp.repeat(jnp.arange(decode_rows, dtype=jnp.int32), pieces)
    piece = jnp.tile(jnp.arange(pieces, dtype=jnp.int32), decode_rows)
    head = piece[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)[None]
    real = (head < group_size) & (attn.seq_lens[row] > 0)[:, None]
    position = jnp.where(real, attn.seq_lens[row][:, None] - 1, -1)
    token = jnp.broadcast_to(row[:, None], head.shape)
    return Tiles(row, token, jnp.minimum(head, group_size - 1), position)


def prefill_tiles(
    attn: GroupMetadata, decode_rows: int, num_tokens: int, group_size: int, rows: int
) -> Tiles:
    """The chunks' queries, each chunk cut from its start; the heads of a query side by side."""
    starts = attn.query_start_loc[decode_rows:] - decode_rows
    seq_lens = attn.seq_lens[decode_rows:]
    query_lens = starts[1:] - starts[:-1]
    tiles_end = jnp.cumsum(_div_up(query_lens * group_size, rows))
    # The most that the tokens can need, however they are shared among the chunks.
    num_tiles = num_tokens * group_size // rows + query_lens.shape[0]
    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(tiles_end, tile, side="right").astype(jnp.int32)
    exists = row < query_lens.shape[0]
    row = jnp.minimum(row, query_lens.shape[0] - 1)
    first = (tile - tiles_end[row]) * rows + _div_up(query_lens[row] * group_size, rows) * rows
    pair = first[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    query, head = pair // group_size, pair % group_size
    real = exists[:, None] & (query < query_lens[row][:, None]) & (seq_lens[row] > 0)[:, None]
    position = (seq_lens[row] - query_lens[row])[:, None] + query
    token = jnp.where(real, starts[row][:, None] + query, 0)
    return Tiles(row + decode_rows, token, head, jnp.where(real, position, -1))


def where_tokens_went(
    attn: GroupMetadata, decode_rows: int, num_tokens: int, group_size: int, rows: int
) -> tuple[Int[Array, "C G"], Bool[Array, " C"]]:
    """The inverse of `prefill_tiles`: where each (token, head) lies among all rows of all tiles,
    and which tokens have a query at all."""
    starts = attn.query_start_loc[decode_rows:] - decode_rows
    seq_lens = attn.seq_lens[decode_rows:]
    query_lens = starts[1:] - starts[:-1]
    num_tiles = _div_up(query_lens * group_size, rows)
    first_tile = jnp.cumsum(num_tiles) - num_tiles
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(starts[1:], token, side="right").astype(jnp.int32)
    real = row < query_lens.shape[0]
    row = jnp.minimum(row, query_lens.shape[0] - 1)
    real &= (token >= starts[row]) & (seq_lens[row] > 0)
    pair = (token - starts[row])[:, None] * group_size
    pair = pair + jnp.arange(group_size, dtype=jnp.int32)[None]
    place = first_tile[row][:, None] * rows + pair
    return jnp.where(real[:, None], place, 0), real


def plan_work(
    tiles: Tiles, attn: GroupMetadata, spec: KVSpec, window: int | None, config: TuningConfig
) -> Work:
    """The keys of each tile's queries, shared out among the splits."""
    tile_len = config.tile_len
    existing = existing_blocks(attn.block_tables, spec, tile_len)
    seen = tiles.position >= 0
    highest = jnp.max(tiles.position, axis=1)
    least = jnp.min(jnp.where(seen, tiles.position, MAX_INT32), axis=1)
    lowest = jnp.zeros_like(highest) if window is None else jnp.maximum(least - window + 1, 0)
    capacity = attn.block_tables.shape[1] * spec.block_size
    end = jnp.minimum(_div_up(highest + 1, tile_len), -(-capacity // tile_len))
    first = jnp.minimum(lowest // tile_len, end)

    # Keys that every query sees lie from the last window's start to the first query.
    every_from = 0 if window is None else jnp.maximum(highest - window + 1, 0)
    fast_first = _div_up(jnp.asarray(every_from, jnp.int32), tile_len)
    fast_end = jnp.where(seen.all(axis=1), (least + 1) // tile_len, 0)
    if config.fast_tiles:
        key_tile = jnp.arange(existing.shape[1], dtype=jnp.int32)[None]
        inside = (key_tile >= fast_first.reshape(-1, 1)) & (key_tile < fast_end[:, None])
        whole = (existing == _all_bits(spec, tile_len))[tiles.row]
        fast_end = jnp.where((whole | ~inside).all(axis=1), fast_end, 0)
    else:
        fast_end = jnp.zeros_like(fast_end)

    split = jnp.arange(config.splits, dtype=jnp.int32)[None]
    share = _div_up(end - first, config.splits)
    share = jnp.maximum(share, max(256 // tile_len, 1))[:, None]
    split_first = jnp.minimum(first[:, None] + split * share, end[:, None])
    split_end = jnp.minimum(split_first + share, end[:, None])
    fast = jnp.clip(fast_first.reshape(-1, 1), split_first, split_end)
    slow = jnp.clip(fast_end[:, None], fast, split_end)
    columns = [tiles.row[:, None], split_first, fast, slow, split_end]
    columns += [lowest[:, None], highest[:, None], jnp.zeros_like(split_first)]
    spans = jnp.stack([jnp.broadcast_to(c, split_first.shape) for c in columns], axis=-1)
    padding = config.warpgroups * ROW_TILE_LEN - config.rows
    positions = jnp.pad(tiles.position, ((0, 0), (0, padding)), constant_values=-1)
    return Work(spans, positions, existing)


def existing_blocks(
    block_tables: Int[Array, "S B"], spec: KVSpec, tile_len: int
) -> Int[Array, "S Y"]:
    """For each key tile a bit for each of its blocks: whether the table names a real one."""
    real = (block_tables > 0) & (block_tables < spec.num_blocks)
    if spec.block_size >= tile_len:
        return jnp.repeat(real.astype(jnp.int32), spec.block_size // tile_len, axis=1)
    blocks = tile_len // spec.block_size
    real = jnp.pad(real, ((0, 0), (0, -real.shape[1] % blocks)))
    bits = real.reshape(real.shape[0], -1, blocks).astype(jnp.int32)
    return jnp.sum(
        bits << jnp.arange(blocks, dtype=jnp.int32)[None, None], axis=-1, dtype=jnp.int32
    )


def gather_queries(
    q: Float[Array, "C H D"], tiles: Tiles, num_kv_heads: int
) -> Float[Array, "K X M D"]:
    num_tokens, num_heads, head_size = q.shape
    q = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[:, None, None]
    return q.at[tiles.token[None], heads, tiles.head[None]].get(mode="promise_in_bounds")


def _all_bits(spec: KVSpec, tile_len: int) -> int:
    return (1 << max(tile_len // spec.block_size, 1)) - 1


def _div_up(a: Int[Array, "..."], b: int) -> Int[Array, "..."]:
    return (a + (b - 1)) // b
