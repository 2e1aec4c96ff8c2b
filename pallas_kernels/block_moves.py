"""Whole blocks, in every layer at once: copy, read, write. The same for every layout, since axis 0
is the block in all of them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.pool import KVPool, KVSpec, block_in_range


def copy_blocks(pool: KVPool, src: Int[Array, " M"], dst: Int[Array, " M"]) -> KVPool:
    """Reads every source before it writes any target; a pair with an absent block does nothing."""
    src_index = _every_layer(pool.spec, src)
    past_the_end = pool.spec.num_layers * pool.spec.num_blocks
    dst_index = jnp.where(src_index < past_the_end, _every_layer(pool.spec, dst), past_the_end)
    return KVPool(
        tuple(_put(array, dst_index, _take(array, src_index)) for array in pool.arrays), pool.spec
    )


def read_blocks(pool: KVPool, ids: Int[Array, " M"]) -> tuple[jax.Array, ...]:
    """One array `[M, L, ...]` for each of the pool's; NaN where the block does not exist (where
    the values are bytes, in their scales)."""
    index = _every_layer(pool.spec, ids)
    return tuple(_take(array, index) for array in pool.arrays)


def write_blocks(pool: KVPool, ids: Int[Array, " M"], values: tuple[jax.Array, ...]) -> KVPool:
    """Puts back what `read_blocks` gave; a block that does not exist is dropped."""
    index = _every_layer(pool.spec, ids)
    return KVPool(
        tuple(_put(a, index, v) for a, v in zip(pool.arrays, values, strict=True)), pool.spec
    )


def _every_layer(spec: KVSpec, ids: Int[Array, " M"]) -> Int[Array, "M L"]:
    layers = jnp.arange(spec.num_layers, dtype=jnp.int32)
    return jax.vmap(lambda layer: block_in_range(spec, layer, ids), out_axes=1)(layers)


def _take(array: jax.Array, index: Int[Array, "M L"]) -> jax.Array:
    fill = jnp.nan if jnp.issubdtype(array.dtype, jnp.floating) else 0
    return array.at[index].get(mode="fill", fill_value=fill)


def _put(array: jax.Array, index: Int[Array, "M L"], values: jax.Array) -> jax.Array:
    return array.at[index].set(values, mode="drop")
