"""From a batch to the Hopper kernel and back: tiles out of queries, one result out of splits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu_kernel, gpu_work
from pallas_kernels.gpu_matrix_unit import Interpreted, Wgmma
from pallas_kernels.gpu_tuning import (
    TuningConfig,
    stored_head_size,
    tune_decodes,
    tune_prefills,
    unit_dtype,
)
from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool
from pallas_kernels.scoring import Scoring


def attend_decodes(
    q: Float[Array, "R H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
    interpret=None,
    config: TuningConfig | None = None,
) -> Float[Array, "R H D"]:
    """The queries of the first R rows, one each; a tile holds the heads of one KV head."""
    num_rows, num_heads, head_size = q.shape
    if num_rows == 0:
        return q
    group_size = num_heads // pool.spec.num_kv_heads
    capacity = attn.block_tables.shape[1] * pool.spec.block_size
    exact = _is_exact(q, pool, scoring)
    config = config or tune_decodes(pool.spec, num_rows, group_size, capacity, exact)
    tiles = gpu_work.decode_tiles(attn, num_rows, group_size, config.rows)
    out = _attend_tiles(q, tiles, pool, attn, scoring, layer, config, interpret)  # [K,X,M,D]
    out = out.reshape(pool.spec.num_kv_heads, num_rows, -1, head_size)[:, :, :group_size]
    return out.transpose(1, 0, 2, 3).reshape(q.shape).astype(q.dtype)


def attend_prefills(
    q: Float[Array, "C H D"],
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    *,
    layer: Int[Array, ""],
    interpret=None,
    config: TuningConfig | None = None,
) -> Float[Array, "C H D"]:
    """The queries of the rows after the one-token rows: all but the first T - C tokens."""
    num_tokens, num_heads, head_size = q.shape
    if num_tokens == 0:
        return q
    decode_rows = attn.slot_mapping.shape[0] - num_tokens
    group_size = num_heads // pool.spec.num_kv_heads
    num_chunks = attn.seq_lens.shape[0] - decode_rows
    capacity = attn.block_tables.shape[1] * pool.spec.block_size
    exact = _is_exact(q, pool, scoring)
    config = config or tune_prefills(pool.spec, num_tokens, num_chunks, group_size, capacity, exact)
    cut = (attn, decode_rows, num_tokens, group_size, config.rows)
    tiles = gpu_work.prefill_tiles(*cut)
    out = _attend_tiles(q, tiles, pool, attn, scoring, layer, config, interpret)
    place, real = gpu_work.where_tokens_went(*cut)  # [C,G], [C]
    out = out.reshape(pool.spec.num_kv_heads, -1, head_size)
    out = out.at[:, place].get(mode="promise_in_bounds")  # [K,C,G,D]
    out = jnp.where(real[None, :, None, None], out, 0)
    return out.transpose(1, 0, 2, 3).reshape(q.shape).astype(q.dtype)


def _attend_tiles(
    q: Float[Array, "C H D"],
    tiles: gpu_work.Tiles,
    pool: KVPool,
    attn: GroupMetadata,
    scoring: Scoring,
    layer: Int[Array, ""],
    config: TuningConfig,
    interpret,
) -> Float[Array, "K X M D"]:
    head_size = pool.spec.head_size
    spec = pool.spec._replace(head_size=stored_head_size(pool.spec))
    padding = ((0, 0),) * 2 + ((0, spec.head_size - head_size),)
    queries = jnp.pad(q, padding).astype(unit_dtype(spec))
    ones = jnp.ones(spec.num_kv_heads, jnp.float32)
    key_scale = ones if scoring.k_scale is None else scoring.k_scale
    value_scale = ones if scoring.v_scale is None else scoring.v_scale
    scale = jnp.asarray(scoring.scale, jnp.float32)
    layer_exists = (layer >= 0) & (layer < spec.num_layers)
    first_block = jnp.where(layer_exists, layer, 0) * spec.num_blocks
    whole = config.splits == 1 and not _is_exact(q, pool, scoring)
    out, top, total = gpu_kernel.attend(
        gpu_work.gather_queries(queries, tiles, spec.num_kv_heads),
        pool.arrays,
        attn.block_tables,
        gpu_work.plan_work(tiles, attn, spec, scoring.window, config),
        jnp.stack([key_scale * scale, value_scale], axis=1),
        first_block.reshape(1),
        spec=spec,
        window=scoring.window,
        softcap=scoring.softcap,
        config=config,
        out_dtype=q.dtype if whole else jnp.dtype(jnp.float32),
        unit=Wgmma() if interpret is None else Interpreted(),
        interpret=interpret,
    )
    out = out[..., :head_size]
    if whole:
        out = out[:, :, 0]
    else:
        out = _combine(out, top, total, tiles, scoring)
    return jnp.where(layer_exists, out, jnp.zeros((), out.dtype))


def _is_exact(q: jax.Array, pool: KVPool, scoring: Scoring) -> bool:
    """Whether results leave the kernel in float32, however they are split."""
    return scoring.sinks is not None or q.dtype != unit_dtype(pool.spec)


def _combine(
    out: Float[Array, "K X W M D"],
    top: Float[Array, "K X W M"],
    total: Float[Array, "K X W M"],
    tiles: gpu_work.Tiles,
    scoring: Scoring,
) -> Float[Array, "K X M D"]:
    """One softmax out of the splits' (Flash-Decoding), and the sinks' share of it."""
    highest = top.max(axis=2, keepdims=True)
    if scoring.sinks is not None:
        num_kv_heads = out.shape[0]
        sinks = scoring.sinks.reshape(num_kv_heads, -1) * gpu_kernel.LOG2_E
        sinks = sinks[:, tiles.head][:, :, None]  # [K,X,1,M]
        highest = jnp.maximum(highest, sinks)
    weights = total * jnp.exp2(top - highest)
    denominator = weights.sum(axis=2)
    if scoring.sinks is not None:
        denominator = denominator + jnp.exp2(sinks - highest)[:, :, 0]
    summed = jnp.sum(out * weights[..., None], axis=2)
    return summed / jnp.where(denominator > 0, denominator, 1)[..., None]
