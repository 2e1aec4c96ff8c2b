"""The TPU's attention kernel: for one item after another, a few queries against a row's keys.

The keys and values of a fetch (a few blocks) are copied from the pool while those of the one
before are attended to. The copies run on across items: there is no wait between two rows.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.tpu_loads import Loads, dot, load_rows
from pallas_kernels.tpu_slab import LANES, Slab

MASKED = -1e30  # the score of a key that is not seen: finite, or nothing minus itself is NaN
NO_SCORE = -5e29  # below every score, above MASKED: exp(MASKED - NO_SCORE) is 0
BLOCKS_AT_ONCE = 4  # of which copies are started together


class KernelShape(NamedTuple):
    """What a kernel is compiled for."""

    slab: Slab
    block_size: int
    table_width: int
    group_size: int  # query heads of a KV head
    query_tile: int  # queries of an item, a power of two
    fetch_blocks: int  # copied together
    tile_len: int  # keys attended to together; divides a fetch
    num_cores: int
    num_items: int  # a multiple of num_cores
    window: int | None
    softcap: float | None
    has_sinks: bool
    dtype: jnp.dtype  # of what is multiplied
    loads: Loads
    vmem_bytes: int

    @property
    def fetch_len(self) -> int:
        return self.fetch_blocks * self.block_size

    @property
    def rows(self) -> int:
        """M, the queries of an item that share a KV head."""
        return self.group_size * self.query_tile


class Scalars(NamedTuple):
    """In scalar memory."""

    row: Int[Array, " W"]
    position: Int[Array, " W"]
    first_key: Int[Array, " W"]
    end_key: Int[Array, " W"]
    next_item: Int[Array, " W"]
    first_item: Int[Array, " cores"]
    layer_start: Int[Array, " 1"]
    """Index of the layer's block 0 in the pool."""
    block_limit: Int[Array, " 1"]
    """Blocks that the layer has."""
    tables: Int[Array, " R_times_B"]
    score_scale: Float[Array, " K"]
    value_scale: Float[Array, " K"]


def attention_kernel(
    shape: KernelShape,
    scalars: Scalars,
    q: Float[Array, "W K M lanes"],
    sinks: Float[Array, "K M 1"],
    pool: tuple[jax.Array, ...],
    *,
    out_dtype: jnp.dtype,
    interpret,
) -> Float[Array, "W K M lanes"]:
    """Query m of an item is query `m % query_tile` of head `m // query_tile` of its KV head.

    `pool` holds the slabs `[N, b, C, p, 128]` and, where they are bytes, the scales
    `[N, S, R, 128]`.
    """
    slab = shape.slab
    heads, rows, lanes = slab.num_kv_heads, shape.rows, slab.lanes
    per_core = shape.num_items // shape.num_cores
    own = pl.BlockSpec((1, heads, rows, lanes), lambda c, i, *_: (c * per_core + i, 0, 0, 0))
    return pl.pallas_call(
        partial(_kernel, shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(shape.num_cores, per_core),
            in_specs=[
                own,
                pl.BlockSpec((heads, rows, 1), lambda *_: (0, 0, 0)),
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in pool),
            ],
            out_specs=own,
            scratch_shapes=[
                *_fetched(shape),
                pltpu.SemaphoreType.DMA((len(pool), 2)),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, lanes), jnp.float32),
                pltpu.SMEM((5,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=shape.vmem_bytes
        ),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, q, sinks, *pool)


class Fetched(NamedTuple):
    """Two buffers for what is copied from the pool: one is filled while the other is used."""

    slabs: Any  # [2, fetch_len, C, p, 128]
    scales: Any = None  # [2, fetch_blocks, S, R, 128], where slabs are bytes
    by_token: Any = None  # [R, lanes]: the scales of the fetch in use, 0 for tokens unseen


def _fetched(shape: KernelShape) -> list:
    slab = shape.slab
    slabs = pltpu.VMEM((2, shape.fetch_len, *slab.shape), slab.stored)
    if not slab.is_quantized:
        return [slabs]
    scales = (2, shape.fetch_blocks, *slab.scales_shape(shape.block_size))
    by_token = (slab.num_scales, pl.cdiv(shape.fetch_len, LANES) * LANES)
    return [slabs, pltpu.VMEM(scales, jnp.float32), pltpu.VMEM(by_token, jnp.float32)]


# Of each of the two buffers: blocks on their way, and bit j set if block j does not exist. Then
# which buffer is next.
COUNT, ABSENT, TURN = 0, 2, 4


def _kernel(shape: KernelShape, *refs):
    scalars = Scalars(*refs[: len(Scalars._fields)])
    q_ref, sinks_ref, *others = refs[len(Scalars._fields) :]
    num_arrays = 2 if shape.slab.is_quantized else 1
    pool, (out_ref, *scratch) = others[:num_arrays], others[num_arrays:]
    *buffers, semaphores, top_ref, total_ref, acc_ref, state = scratch
    fetched = Fetched(*buffers)
    core, step = pl.program_id(0), pl.program_id(1)
    per_core = shape.num_items // shape.num_cores
    item = core * per_core + step
    copies = partial(_copies, shape, pool, fetched, semaphores)
    fetch = partial(_start_fetch, shape, scalars, copies, state)

    @pl.when(step == 0)
    def _():
        state[TURN] = jnp.int32(0)
        first = scalars.first_item[core]

        @pl.when(first < shape.num_items)
        def _():
            fetch(first, scalars.first_key[first] // shape.fetch_len, jnp.int32(0))

    top_ref[...] = jnp.full_like(top_ref, NO_SCORE)
    total_ref[...] = jnp.zeros_like(total_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)
    first_key, end_key = scalars.first_key[item], scalars.end_key[item]
    first_fetch = first_key // shape.fetch_len
    end_fetch = (end_key + (shape.fetch_len - 1)) // shape.fetch_len

    def one_fetch(number, turn):
        is_last = number + 1 == end_fetch
        following = jnp.where(is_last, scalars.next_item[item], item)

        @pl.when(following < shape.num_items)
        def _():
            start = scalars.first_key[following] // shape.fetch_len
            fetch(following, jnp.where(is_last, start, number + 1), 1 - turn)

        _await_fetch(copies, state, turn)
        start = number * shape.fetch_len
        first = jnp.maximum(first_key - start, 0)
        end = jnp.minimum(end_key - start, shape.fetch_len)
        _clear_unseen(shape, fetched.slabs, turn, first, end, state[ABSENT + turn])
        if shape.slab.is_quantized:
            _scales_by_token(shape, fetched, turn, first, end, state[ABSENT + turn])

        def one_tile(tile, _):
            _attend(
                shape,
                scalars,
                q_ref,
                _tokens(fetched.slabs, turn, tile * shape.tile_len, shape.tile_len),
                _tile_of(shape, fetched.by_token, tile),
                (top_ref, total_ref, acc_ref),
                seen=_seen(shape, scalars, item, start, tile, state[ABSENT + turn]),
            )
            return jnp.int32(0)

        end_tile = (end + (shape.tile_len - 1)) // shape.tile_len
        lax.fori_loop(first // shape.tile_len, end_tile, one_tile, jnp.int32(0))
        return 1 - turn

    @pl.when(end_key > 0)
    def _():
        state[TURN] = lax.fori_loop(first_fetch, end_fetch, one_fetch, state[TURN])

    _finish(shape, scalars, sinks_ref, (top_ref, total_ref, acc_ref), out_ref)


def _tokens(buffers, turn, start, count):
    """The slabs of some tokens of a fetch."""
    return buffers.at[turn, pl.ds(start, count)]


def _copies(shape, pool, fetched, semaphores, index, turn, place) -> list:
    """Of everything that the pool has of a block, to the block's place in a buffer."""
    b = shape.block_size
    targets = [_tokens(fetched.slabs, turn, place * b, b)]
    if shape.slab.is_quantized:
        targets.append(fetched.scales.at[turn, place])
    return [
        pltpu.make_async_copy(array.at[index], target, semaphores.at[kind, turn])
        for kind, (array, target) in enumerate(zip(pool, targets, strict=True))
    ]


def _start_fetch(shape, scalars, copies, state, item, number, turn):
    """Starts copying the blocks of a fetch that the item sees and that exist."""
    b = shape.block_size
    start = number * shape.fetch_blocks
    first = jnp.maximum(scalars.first_key[item] // b, start)
    end = jnp.minimum((scalars.end_key[item] + (b - 1)) // b, start + shape.fetch_blocks)
    table = scalars.row[item] * shape.table_width

    def some_blocks(i, carry):
        # Several at once, so that the scalar unit's waits overlap.
        count, absent = carry
        for column in [first + i * BLOCKS_AT_ONCE + j for j in range(BLOCKS_AT_ONCE)]:
            here = column < end
            block = scalars.tables[table + jnp.minimum(column, end - 1)]
            exists = here & (block > 0) & (block < scalars.block_limit[0])
            place = column - start

            @pl.when(exists)
            def _(block=block, place=place):
                for copy in copies(scalars.layer_start[0] + block, turn, place):
                    copy.start()

            count += exists.astype(jnp.int32)
            absent |= jnp.where(here & ~exists, jnp.int32(1) << place, 0)
        return count, absent

    zero = jnp.int32(0)
    groups = (end - first + (BLOCKS_AT_ONCE - 1)) // BLOCKS_AT_ONCE
    count, absent = lax.fori_loop(zero, groups, some_blocks, (zero, zero))
    state[COUNT + turn] = count
    state[ABSENT + turn] = absent


def _await_fetch(copies, state, turn):
    def one_block(_, carry):
        for copy in copies(0, turn, 0):  # any of a block's size: a wait counts bytes
            copy.wait()
        return carry

    lax.fori_loop(jnp.int32(0), state[COUNT + turn], one_block, jnp.int32(0))


def _clear_unseen(shape, slabs, turn, first, end, absent):
    """Zeroes what the tiles in use hold besides seen keys. It may be NaN, and its weight of zero
    would not stop that."""

    def clear(start, stop):
        def one_token(token, carry):
            slab = _tokens(slabs, turn, token, 1)
            slab[...] = jnp.zeros(slab.shape, slab.dtype)
            return carry

        lax.fori_loop(start, stop, one_token, jnp.int32(0))

    tile_len, b = shape.tile_len, shape.block_size
    clear(first // tile_len * tile_len, first)
    clear(end, (end + (tile_len - 1)) // tile_len * tile_len)

    @pl.when(absent != 0)
    def _():
        def one_block(block, carry):
            start = block * b
            clear(start, start + b * ((absent >> block) & 1))
            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(shape.fetch_blocks), one_block, jnp.int32(0))


def _scales_by_token(shape, fetched, turn, first, end, absent):
    """Lays the scales of a fetch side by side in the order of its tokens."""
    b = shape.block_size
    blocks_a_line = max(LANES // b, 1)
    lane = lax.broadcasted_iota(jnp.int32, (shape.slab.num_scales, LANES), 1)
    for i in range(fetched.by_token.shape[1] // LANES):
        if b >= LANES:
            block, part = divmod(i, b // LANES)
            line = fetched.scales[turn, block, part]
        else:
            start = i * blocks_a_line
            line = fetched.scales[turn, start, 0]
            for j in range(1, min(blocks_a_line, shape.fetch_blocks - start)):
                moved = pltpu.roll(fetched.scales[turn, start + j, 0], jnp.int32(j * b), 1)
                line = jnp.where(lane >= j * b, moved, line)
        place = i * LANES + lane
        seen = (place >= first) & (place < end) & (((absent >> (place // b)) & 1) == 0)
        fetched.by_token[:, i * LANES : (i + 1) * LANES] = jnp.where(seen, line, jnp.float32(0))


def _tile_of(shape: KernelShape, by_token, tile) -> Float[Array, "R J"] | None:
    """The scales of a tile of keys."""
    if by_token is None:
        return None
    if shape.tile_len == shape.fetch_len:
        return by_token[:, : shape.tile_len]
    start = tile * shape.tile_len
    if shape.tile_len % LANES == 0:
        start = pl.multiple_of(start, LANES)
    return by_token[:, pl.ds(start, shape.tile_len)]


def _seen(shape: KernelShape, scalars: Scalars, item, start, tile, absent):
    """Which query sees which key of a tile: `[M, J]`, or `[1, J]` where all see the same."""
    one_query = shape.query_tile == 1
    size = (1 if one_query else shape.rows, shape.tile_len)
    place = tile * shape.tile_len + lax.broadcasted_iota(jnp.int32, size, 1)
    key = start + place
    if one_query:
        seen = (key >= scalars.first_key[item]) & (key < scalars.end_key[item])
    else:
        query = lax.broadcasted_iota(jnp.int32, size, 0) & (shape.query_tile - 1)
        position = scalars.position[item] + query
        seen = (key <= position) & (key < scalars.end_key[item])
        if shape.window is not None:
            seen &= key > position - shape.window
    block = place // shape.block_size
    return seen & (((absent >> block) & 1) == 0)


def _attend(shape: KernelShape, scalars: Scalars, q_ref, slabs, scales, state, *, seen):
    """One tile of keys, head after head: the online softmax."""
    slab = shape.slab
    top_ref, total_ref, acc_ref = state
    load = partial(load_rows, slabs, stored=slab.dtype, dtype=shape.dtype, loads=shape.loads)
    for head in range(slab.num_kv_heads):
        keys = load(slab.key_rows(head))
        values = keys if slab.shares_rows else load(slab.value_rows(head))
        scores = dot(q_ref[0, head], keys, transpose_b=True) * scalars.score_scale[head]
        if scales is not None:
            scores = scores * scales[2 * head : 2 * head + 1]
        if shape.softcap is not None:
            cap = jnp.float32(shape.softcap)
            scores = cap * jnp.tanh(scores / cap)
        scores = jnp.where(seen, scores, jnp.float32(MASKED))  # [M, J]
        top = top_ref[head]  # [M, lanes], every lane the same
        new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - new_top[:, :1])
        shrink = jnp.exp(top - new_top)
        top_ref[head] = new_top
        total_ref[head] = shrink * total_ref[head] + jnp.sum(weights, axis=1, keepdims=True)
        if scales is not None:
            weights = weights * scales[2 * head + 1 : 2 * head + 2]
        part = dot(weights.astype(shape.dtype), values, transpose_b=False)
        acc_ref[head] = acc_ref[head] * shrink[:, :1] + part


def _finish(shape: KernelShape, scalars: Scalars, sinks_ref, state, out_ref):
    top_ref, total_ref, acc_ref = state
    for head in range(shape.slab.num_kv_heads):
        top, total, acc = top_ref[head][:, :1], total_ref[head][:, :1], acc_ref[head]
        if shape.has_sinks:
            sinks = sinks_ref[head]
            new_top = jnp.maximum(top, sinks)
            total = total * jnp.exp(top - new_top) + jnp.exp(sinks - new_top)
            acc = acc * jnp.exp(top - new_top)
        acc = acc * scalars.value_scale[head]
        out_ref[0, head] = (acc / jnp.where(total > 0, total, jnp.float32(1))).astype(out_ref.dtype)
