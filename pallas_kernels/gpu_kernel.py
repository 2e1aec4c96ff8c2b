"""Paged attention for Hopper in Mosaic GPU.

A thread block computes one tile of queries against a span of its row's keys. One warpgroup copies
(`gpu_copies`), a few tiles ahead, into a ring of shared memory. The others compute: scores on the
matrix unit (wgmma), a softmax that goes on from tile to tile in float32 (FlashAttention-2/3: arXiv
2307.08691, 2407.08608), then the values.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_copies import Landing, Place, Ring, copy_and_widen_tiles, copy_tiles
from pallas_kernels.gpu_matrix_unit import MatrixUnit
from pallas_kernels.gpu_tuning import ROW_TILE_LEN, TuningConfig, scale_box_len, swizzle_bytes
from pallas_kernels.gpu_work import END, FAST, FIRST, HIGHEST, LOWEST, ROW, SLOW, Work
from pallas_kernels.pool import KVSpec

MASKED = -1e30  # finite, so that a row that sees nothing gives no NaN
LOG2_E = math.log2(math.e)


def attend(
    q: jax.Array,  # [K, X, M, D]
    pool: tuple[jax.Array, ...],  # [L*N, K, 2, b, D], and scales [L*N, K, 2, b] if it holds bytes
    block_tables: jax.Array,  # [S, B]
    work: Work,
    scales: jax.Array,  # [K, 2] of scores and of values, float32
    first_block: jax.Array,  # [1] of the layer in the pool
    *,
    spec: KVSpec,
    window: int | None,
    softcap: float | None,
    config: TuningConfig,
    out_dtype: jnp.dtype,
    unit: MatrixUnit,
    interpret,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over each split's keys: the result `[K, X, W, M, D]`, normalised by that split's
    own sum, with the softmax's running maximum (of scores in powers of two) and sum `[K, X, W, M]`.
    `spec.head_size` is that of the queries and of the pool's rows.

    Rows that see no key have 0, -1e30 and 0.
    """
    num_kv_heads, num_tiles, rows, head_size = q.shape
    tile_len, ring_len, splits = config.tile_len, config.ring_len, config.splits
    box_len = min(spec.block_size, tile_len)  # tokens that one copy fetches
    boxes = tile_len // box_len
    numbers, *scales_of_tokens = pool
    flat_pool = [numbers.reshape(-1, box_len, head_size)]
    flat_pool += [a.reshape(-1, scale_box_len(spec, tile_len)) for a in scales_of_tokens]
    if flat_pool[0].shape[0] >= 2**31:
        raise ValueError(
            f"the pool has {flat_pool[0].shape[0]} pieces of a block, past the int32 range:"
            " use fewer or larger blocks"
        )
    copies = 1 if config.wide_slots else boxes  # until a slot is ready
    padded_rows = ROW_TILE_LEN * config.warpgroups
    body = partial(
        _body, spec=spec, window=window, softcap=softcap, config=config, unit=unit, rows=rows
    )
    smem = partial(_tiled_smem, head_size=head_size)
    stat = jax.ShapeDtypeStruct((num_kv_heads, num_tiles, splits, rows), jnp.float32)
    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((*stat.shape, head_size), out_dtype), stat, stat),
        grid=(num_kv_heads, splits, num_tiles),
        grid_names=("head", "split", "tile"),
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=dict(
            q_smem=smem((padded_rows,), q.dtype),
            k_smem=smem((ring_len, tile_len), q.dtype),
            v_smem=smem((ring_len, tile_len), q.dtype),
            o_smem=smem((padded_rows,), out_dtype),
            position_smem=plgpu.SMEM((padded_rows,), jnp.int32),
            stat_smem=plgpu.SMEM((2, padded_rows), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=2),
            k_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=ring_len),
            v_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=ring_len),
            used=plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=ring_len),
            cleaned=plgpu.Barrier(num_arrivals=config.warpgroups),
            **(_landing_smem(numbers.dtype, spec, config) if config.wide_slots else {}),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # a row lies within one warp
        ),
        interpret=interpret,
    )(q, block_tables, *work, scales, first_block, *flat_pool)


def _landing_smem(dtype, spec: KVSpec, config: TuningConfig) -> dict:
    """What tiles of one byte a value need besides."""
    stages, tile_len = config.stages, config.tile_len
    boxes = max(tile_len // spec.block_size, 1)
    numbers = _tiled_smem((stages, tile_len), dtype, head_size=spec.head_size)
    scales = plgpu.SMEM((stages, boxes * scale_box_len(spec, tile_len)), jnp.float32)
    return {
        "narrow_k_smem": numbers,
        "narrow_v_smem": numbers,
        "k_scales": scales,
        "v_scales": scales,
        "tight_scales": plgpu.SMEM((2, tile_len), jnp.float32),
        "landed": plgpu.Barrier(num_arrivals=4 * boxes, num_barriers=stages),
    }


def _tiled_smem(leading: tuple[int, ...], dtype, *, head_size: int):
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle_bytes(head_size, itemsize)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(
        (*leading, head_size), dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


def _body(
    q_ref, tables_ref, spans_ref, positions_ref, existing_ref, scales_ref, first_block_ref,
    *pool_and_result_refs,
    q_smem, k_smem, v_smem, o_smem, position_smem, stat_smem,
    q_ready, k_ready, v_ready, used, cleaned,
    narrow_k_smem=None, narrow_v_smem=None, k_scales=None, v_scales=None, tight_scales=None,
    landed=None,
    spec, window, softcap, config, unit, rows,
):  # fmt: skip
    *pool_refs, o_ref, top_ref, total_ref = pool_and_result_refs
    ring = Ring(k_smem, v_smem, k_ready, v_ready, used)
    head, split, tile = (lax.axis_index(name) for name in ("head", "split", "tile"))
    warpgroup = lax.axis_index("warpgroup")
    span = partial(_scalar, spans_ref, tile, split)
    first, end = span(FIRST), span(END)
    place = Place(span(ROW), head, first, end)

    @pl.when(warpgroup == config.warpgroups)
    def _copy():
        if config.warpgroups == 2:  # its share of the 64 K registers goes to the others
            plgpu.set_max_registers(104 if config.wide_slots else 40, action="decrease")
        plgpu.copy_gmem_to_smem(positions_ref.at[tile], position_smem, q_ready)
        plgpu.copy_gmem_to_smem(q_ref.at[head, tile], q_smem.at[pl.ds(0, rows)], q_ready)
        of_pool = (pool_refs, tables_ref, first_block_ref, ring)
        if config.wide_slots:
            of_scales = (k_scales, v_scales, tight_scales)
            landing = Landing(narrow_k_smem, narrow_v_smem, *of_scales, landed)
            copy_and_widen_tiles(*of_pool, landing, place, spec, config, unit)
        else:
            copy_tiles(*of_pool, place, spec, config)

    @pl.when(warpgroup < config.warpgroups)
    def _compute():
        if config.warpgroups == 2:
            plgpu.set_max_registers(200 if config.wide_slots else 232, action="increase")
        mine = pl.ds(warpgroup * ROW_TILE_LEN, ROW_TILE_LEN)
        plgpu.barrier_wait(q_ready)
        position = unit.row_vector(position_smem.at[mine])
        attend_tile = partial(
            _attend_tile, q_smem.at[mine], ring, existing_ref, position,
            cleaned=cleaned, place=place, lowest=span(LOWEST), highest=span(HIGHEST),
            score_scale=scales_ref[head, 0], warpgroup=warpgroup,
            spec=spec, window=window, softcap=softcap, config=config, unit=unit,
        )  # fmt: skip
        top = unit.fill_rows(MASKED, ROW_TILE_LEN)
        total = unit.fill_rows(0.0, ROW_TILE_LEN)
        acc = unit.zeros((ROW_TILE_LEN, spec.head_size))
        carry = (acc, top, total)
        masked = partial(attend_tile, masked=True)
        if config.fast_tiles:
            fast, slow = span(FAST), span(SLOW)
            carry = lax.fori_loop(first, fast, masked, carry)
            carry = lax.fori_loop(fast, slow, partial(attend_tile, masked=False), carry)
            carry = lax.fori_loop(slow, end, masked, carry)
        else:
            carry = lax.fori_loop(first, end, masked, carry)
        acc, top, total = carry
        _store(
            acc, top, total, o_ref, top_ref, total_ref, o_smem.at[mine], stat_smem,
            value_scale=scales_ref[head, 1], at=(head, tile, split), mine=mine,
            warpgroup=warpgroup, rows=rows, config=config,
        )  # fmt: skip


def _scalar(ref, tile, split, column):
    return ref[tile, split, column]


def _attend_tile(
    q_smem, ring, existing_ref, position, i, carry,
    *, cleaned, place, lowest, highest, score_scale, warpgroup,
    spec, window, softcap, config, unit, masked,
):  # fmt: skip
    acc, top, total = carry
    tile_len = config.tile_len
    slot = lax.rem(i - place.first, jnp.int32(config.ring_len))
    plgpu.barrier_wait(ring.keys_ready.at[slot])
    bits = existing_ref[place.row, i] if masked else None
    if masked:
        plgpu.barrier_wait(ring.values_ready.at[slot])
        _clean_values(
            ring.values.at[slot], cleaned, i * tile_len, bits, lowest, highest, warpgroup,
            spec=spec, config=config, unit=unit,
        )  # fmt: skip
    scores = unit.scores(q_smem, ring.keys.at[slot])  # [M, J]
    if softcap is None:
        scores = scores * (score_scale * LOG2_E)
    else:
        scores = jnp.tanh(scores * (score_scale * (1 / softcap))) * (softcap * LOG2_E)
    if masked:
        key = unit.iota(scores.shape, 1)
        seen = _seen(key, i * tile_len, position, bits, spec, window, config)
        scores = jnp.where(seen, scores, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=1))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
    total = total * shrink + weights.sum(axis=1)
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
    if not masked:
        plgpu.barrier_wait(ring.values_ready.at[slot])
    acc = unit.add_values(acc, weights, ring.values.at[slot])
    plgpu.barrier_arrive(ring.used.at[slot])
    return acc, new_top, total


def _exists(key, bits, spec: KVSpec, config: TuningConfig):
    """Whether the block that holds the tile's key number `key` exists; scalar or array."""
    if spec.block_size >= config.tile_len:
        return lax.broadcast_in_dim(bits, key.shape, ()) != 0
    shift = int(math.log2(spec.block_size))
    return ((lax.broadcast_in_dim(bits, key.shape, ()) >> (key >> shift)) & 1) != 0


def _seen(key, first_key, position, bits, spec, window, config):
    position = lax.broadcast_in_dim(position, key.shape, [0])
    seen = _exists(key, bits, spec, config) & (key + first_key <= position)
    if window is not None:
        seen &= key + first_key > position - window
    return seen


def _clean_values(
    v_smem, cleaned, first_key, bits, lowest, highest, warpgroup, *, spec, config, unit
):  # fmt: skip
    """Zeroes the values that no query of the tile sees: zero times NaN is NaN, and an unused slot
    may hold one. The first warpgroup does it for all."""
    tile_len = config.tile_len
    all_bits = (1 << max(tile_len // spec.block_size, 1)) - 1
    dirty = (first_key < lowest) | (first_key + (tile_len - 1) > highest) | (bits != all_bits)

    @pl.when(dirty)
    def _():
        @pl.when(warpgroup == 0)
        def _():
            itemsize = jnp.dtype(v_smem.dtype).itemsize
            width = swizzle_bytes(spec.head_size, itemsize) // itemsize
            for rows_from in range(0, tile_len, ROW_TILE_LEN):
                rows = pl.ds(rows_from, ROW_TILE_LEN)
                key = unit.iota((ROW_TILE_LEN, width), 0) + rows_from
                seen = _exists(key, bits, spec, config)
                seen &= (key + first_key >= lowest) & (key + first_key <= highest)
                for column in range(0, spec.head_size, width):
                    part = v_smem.at[rows, pl.ds(column, width)]
                    part[...] = jnp.where(seen, part[...], jnp.zeros((), part.dtype))
            plgpu.commit_smem()

        if config.warpgroups > 1:
            plgpu.barrier_arrive(cleaned)
            plgpu.barrier_wait(cleaned)


def _store(
    acc, top, total, o_ref, top_ref, total_ref, o_smem, stat_smem,
    *, value_scale, at, mine, warpgroup, rows, config,
):  # fmt: skip
    # A row that saw only masked keys has weights all the same: 2 ** (masked - masked).
    total = jnp.where(top > MASKED / 2, total, 0.0)
    factor = jnp.where(total > 0.0, value_scale / jnp.where(total > 0.0, total, 1.0), 0.0)
    o_smem[...] = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(o_smem.dtype)
    stat_smem[0, mine] = top
    stat_smem[1, mine] = total
    plgpu.commit_smem()
    stored = pl.ds(0, min(rows, ROW_TILE_LEN))
    target = pl.ds(warpgroup * ROW_TILE_LEN, ROW_TILE_LEN) if config.warpgroups > 1 else stored
    first = pl.ds(warpgroup * ROW_TILE_LEN, min(rows, ROW_TILE_LEN))
    plgpu.copy_smem_to_gmem(o_smem.at[stored], o_ref.at[(*at, target)])
    plgpu.copy_smem_to_gmem(stat_smem.at[0, first], top_ref.at[(*at, target)])
    plgpu.copy_smem_to_gmem(stat_smem.at[1, first], total_ref.at[(*at, target)])
    plgpu.wait_smem_to_gmem(0)
