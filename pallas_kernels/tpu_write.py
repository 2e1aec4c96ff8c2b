"""Writes new keys and values into the TPU's pool, and their scales, in place."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.tpu_slab import LANES


def write_tokens(
    pool: Shaped[Array, "N b C p 128"],
    new: Shaped[Array, "T C p 128"],
    index: Int[Array, " T"],
    offset: Int[Array, " T"],
    *,
    interpret,
) -> Shaped[Array, "N b C p 128"]:
    """Token t's slab goes to `pool[index[t], offset[t]]` in a copy of its own, and nowhere if there
    is no such block. Two tokens must not go to the same place."""
    return pl.pallas_call(
        _slabs_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={3: 0},
        interpret=interpret,
        name="write_kv",
    )(index, offset, new, pool)


def write_scales(
    pool: Float[Array, "N S R 128"],
    new: Float[Array, "T R"],
    index: Int[Array, " T"],
    offset: Int[Array, " T"],
    *,
    interpret,
) -> Float[Array, "N S R 128"]:
    """The same for the scales of each token, which lie in a single lane. No copy can go there: the
    128 lanes around it are read, changed and written back, those of 128 tokens at a time."""
    num_blocks, _, num_scales, _ = pool.shape
    more = -new.shape[0] % LANES
    index = jnp.pad(index, (0, more), constant_values=num_blocks)
    line, lane = jnp.divmod(jnp.pad(offset, (0, more)), LANES)
    return pl.pallas_call(
        _scales_kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(index.shape[0] // LANES,),
            in_specs=[
                pl.BlockSpec((num_scales, LANES), lambda i, *_: (0, i)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM((LANES, num_scales, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={5: 0},
        interpret=interpret,
        name="write_scales",
    )(index, line, lane, _first_of_line(index, line), jnp.pad(new, ((0, more), (0, 0))).T, pool)


def _first_of_line(index: Int[Array, " T"], line: Int[Array, " T"]) -> Int[Array, " T"]:
    """Of each 128 tokens, for each of them the first that goes to the same line."""
    index, line = index.reshape(-1, LANES), line.reshape(-1, LANES)
    same = (index[:, :, None] == index[:, None]) & (line[:, :, None] == line[:, None])
    return jnp.argmax(same, axis=2).astype(jnp.int32).reshape(-1)


def _scales_kernel(index, line, lane, first, new, _, pool, lines, semaphore):
    """`lines[t]` holds the line that token t is the first to go to."""
    start = pl.program_id(0) * LANES

    def exists(token):
        return index[start + token] < pool.shape[0]

    def each_line(action):
        def one_token(token, carry):
            @pl.when(exists(token) & (first[start + token] == token))
            def _():
                action(pool.at[index[start + token], line[start + token]], lines.at[token])

            return carry

        lax.fori_loop(jnp.int32(0), jnp.int32(LANES), one_token, jnp.int32(0))

    def change(token, carry):
        @pl.when(exists(token))
        def _():
            place, own = lane[start + token], first[start + token]
            moved = pltpu.roll(new[...], (place - token + LANES) % LANES, 1)
            lanes = lax.broadcasted_iota(jnp.int32, moved.shape, 1)
            lines[own] = jnp.where(lanes == place, moved, lines[own])

        return carry

    each_line(lambda there, here: pltpu.make_async_copy(there, here, semaphore).start())
    each_line(lambda there, here: pltpu.make_async_copy(there, here, semaphore).wait())
    lax.fori_loop(jnp.int32(0), jnp.int32(LANES), change, jnp.int32(0))
    each_line(lambda there, here: pltpu.make_async_copy(here, there, semaphore).start())
    each_line(lambda there, here: pltpu.make_async_copy(here, there, semaphore).wait())


def _slabs_kernel(index, offset, new, _, pool, semaphore):
    num_tokens = new.shape[0]

    def start(token, count):
        exists = index[token] < pool.shape[0]

        @pl.when(exists)
        def _():
            pltpu.make_async_copy(
                new.at[token], pool.at[index[token], offset[token]], semaphore
            ).start()

        return count + exists.astype(jnp.int32)

    def wait(_, carry):
        pltpu.make_async_copy(new.at[0], pool.at[0, 0], semaphore).wait()
        return carry

    zero = jnp.int32(0)
    count = lax.fori_loop(zero, jnp.int32(num_tokens), start, zero)
    lax.fori_loop(zero, count, wait, zero)
