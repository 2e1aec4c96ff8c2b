"""Writes new keys and values into the TPU's pool: one copy for each token, in place."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped


def write_tokens(
    pool: Shaped[Array, "N b C p 128"],
    new: Shaped[Array, "T C p 128"],
    index: Int[Array, " T"],
    offset: Int[Array, " T"],
    *,
    interpret,
) -> Shaped[Array, "N b C p 128"]:
    """Token t goes to `pool[index[t], offset[t]]`, and nowhere if there is no such block. Two
    tokens must not go to the same place."""
    return pl.pallas_call(
        _kernel,
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


def _kernel(index, offset, new, _, pool, semaphore):
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
