"""From a step's queries to calls of the TPU kernel, and back to one output for each token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool
from pallas_kernels.scoring import Scoring
from pallas_kernels.tpu_kernel import KernelShape, Scalars, attention_kernel
from pallas_kernels.tpu_loads import Loads
from pallas_kernels.tpu_slab import Slab
from pallas_kernels.tpu_tuning import Chip, Tiles, tiles_for, tuning
from pallas_kernels.tpu_work import Work, decode_work, next_items, pad_items, padded, prefill_work

# Entries of block tables that a call may hold in scalar memory, half of 1 MiB.
MAX_TABLE_ENTRIES = 2**17


class Setup(NamedTuple):
    """What the back end knows before any step."""

    slab: Slab
    chip: Chip
    loads: Loads
    interpret: Any  # as `pl.pallas_call` takes it

    def tiles(self, what: str, block_size: int, table_width: int) -> Tiles:
        """For "decode" or "prefill"."""
        config = tuning(self.chip, what, lanes=self.slab.lanes, dtype=self.slab.dtype)
        return tiles_for(config, block_size, table_width)


def attend_decodes(
    q: Float[Array, "R H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
    setup: Setup,
) -> Float[Array, "R H D"]:
    """The queries of the first R rows, one each."""
    num_rows = q.shape[0]
    if num_rows == 0:
        return q
    room = attn.block_tables.shape[1] * pool.spec.block_size
    work = decode_work(attn, num_rows, room, scoring.window)
    slab = setup.slab
    queries = q.reshape(num_rows, slab.num_kv_heads, -1, slab.head_size)
    parts = []
    for rows in _row_groups(num_rows, attn.block_tables.shape[1]):
        part = Work(*(array[rows] for array in work))
        part = part._replace(row=part.row - rows.start)
        tables = attn.block_tables[rows]
        parts.append(_call(queries[rows], pool, part, tables, scoring, 1, layer=layer, setup=setup))
    return jnp.concatenate(parts).reshape(q.shape)


def attend_prefills(
    q: Float[Array, "C H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
    setup: Setup,
) -> Float[Array, "C H D"]:
    """The queries of the rows after the one-token rows: all but the first T - C tokens."""
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return q
    decode_rows = attn.slot_mapping.shape[0] - num_tokens
    table_width = attn.block_tables.shape[1]
    slab = setup.slab
    config = tuning(setup.chip, "prefill", lanes=slab.lanes, dtype=slab.dtype)
    work, tiling, tokens = prefill_work(
        attn, decode_rows, config.query_tile, table_width * pool.spec.block_size, scoring.window
    )
    heads, group_size = slab.num_kv_heads, q.shape[1] // slab.num_kv_heads
    query_tile = config.query_tile
    queries = q[tokens].reshape(-1, query_tile, heads, group_size, slab.head_size)
    queries = queries.transpose(0, 2, 3, 1, 4)  # [W,K,G,Q,D]
    queries = queries.reshape(-1, heads, group_size * query_tile, slab.head_size)
    out = jnp.zeros_like(queries)
    num_rows = attn.seq_lens.shape[0] - decode_rows
    for rows in _row_groups(num_rows, table_width):
        first, end = decode_rows + rows.start, decode_rows + min(rows.stop, num_rows)
        part = work.only((work.row >= first) & (work.row < end))
        part = part._replace(row=jnp.clip(part.row - first, 0, end - first - 1))
        tables = attn.block_tables[first:end]
        out = out + _call(
            queries, pool, part, tables, scoring, query_tile, layer=layer, setup=setup
        )
    out = out.reshape(-1, heads, group_size, query_tile, slab.head_size)
    out = out[tiling.item, :, :, tiling.place]  # [C,K,G,D]
    out = jnp.where(tiling.real[:, None, None, None], out, 0)
    return out.reshape(q.shape)


def _row_groups(num_rows: int, table_width: int) -> list[slice]:
    """Rows whose block tables fit scalar memory together."""
    together = MAX_TABLE_ENTRIES // table_width
    if together == 0:
        raise ValueError(
            f"block_tables has {table_width} columns; the tpu back end takes at most"
            f" {MAX_TABLE_ENTRIES}: use larger blocks"
        )
    return [slice(i, i + together) for i in range(0, num_rows, together)]


def _call(
    queries: Float[Array, "W K M D"],
    pool: KVPool,
    work: Work,
    tables: Int[Array, "R B"],
    scoring: Scoring,
    query_tile: int,
    *,
    layer: Int[Array, ""],
    setup: Setup,
) -> Float[Array, "W K M D"]:
    spec, slab, chip = pool.spec, setup.slab, setup.chip
    what = "decode" if query_tile == 1 else "prefill"
    tiles = setup.tiles(what, spec.block_size, tables.shape[1])
    num_items, rows = queries.shape[0], queries.shape[2]
    num_padded = -(-num_items // chip.num_cores) * chip.num_cores
    work = padded(work, num_padded)
    first_item, next_item = next_items(work, chip.num_cores)
    dtype = jnp.bfloat16 if queries.dtype == jnp.bfloat16 and slab.packing > 1 else jnp.float32
    shape = KernelShape(
        slab=slab,
        block_size=spec.block_size,
        table_width=tables.shape[1],
        group_size=rows // query_tile,
        query_tile=query_tile,
        fetch_blocks=tiles.fetch_blocks,
        tile_len=tiles.tile_len,
        num_cores=chip.num_cores,
        num_items=num_padded,
        window=scoring.window,
        softcap=scoring.softcap,
        has_sinks=scoring.sinks is not None,
        dtype=jnp.dtype(dtype),
        loads=setup.loads,
        vmem_bytes=chip.vmem_bytes,
    )
    layer_exists = (layer >= 0) & (layer < spec.num_layers)
    block_limit = jnp.where(layer_exists, jnp.int32(spec.num_blocks), 0)
    scalars = Scalars(
        row=work.row,
        position=work.position,
        first_key=work.first_key,
        end_key=work.end_key,
        next_item=next_item,
        first_item=first_item,
        layer_start=(jnp.where(layer_exists, layer, 0) * jnp.int32(spec.num_blocks))[None],
        block_limit=block_limit[None],
        tables=tables.reshape(-1),
        score_scale=_per_head(scoring.k_scale, slab.num_kv_heads, scoring.scale),
        value_scale=_per_head(scoring.v_scale, slab.num_kv_heads, 1.0),
    )
    sinks = jnp.zeros((slab.num_kv_heads, rows, 1), jnp.float32)
    if scoring.sinks is not None:
        sinks = scoring.sinks.reshape(slab.num_kv_heads, -1)
        sinks = jnp.repeat(sinks, query_tile, axis=1)[..., None]
    q = pad_items(slab.pad_queries(queries.astype(dtype)), num_padded)
    out = attention_kernel(
        shape, scalars, q, sinks, pool.arrays, out_dtype=queries.dtype, interpret=setup.interpret
    )
    return slab.take_values(out[:num_items])


def _per_head(
    scale: jax.Array | None, num_kv_heads: int, factor: int | float | jax.Array
) -> Float[Array, " K"]:
    ones = jnp.ones((num_kv_heads,), jnp.float32)
    factor = jnp.asarray(factor, jnp.float32)
    return (ones if scale is None else scale) * factor
