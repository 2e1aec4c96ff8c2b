"""Keys and values in one byte each, with a scale for every token and head.

A scale of its own for each slot means that writing a token never touches what a block holds
already, and that a token's bytes do not depend on its neighbours. Of D bytes it takes four more.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
# XLA's CPU scatters into a float8 array by converting all of it; into bytes it does not.
STORED_AS = {"int8": jnp.int8, "float8_e4m3fn": jnp.uint8, "float8_e5m2": jnp.uint8}


def is_quantized(dtype: jnp.dtype) -> bool:
    return dtype.name in LARGEST


def stored_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Of a pool's array of keys or values whose spec has this dtype."""
    return jnp.dtype(STORED_AS.get(dtype.name, dtype))


def stored(k: jax.Array, v: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, ...]:
    """What a pool of this dtype holds of new keys and values: themselves, or bytes and scales."""
    if not is_quantized(dtype):
        return k, v
    (keys, key_scales), (values, value_scales) = encode(k, dtype), encode(v, dtype)
    return keys, values, key_scales, value_scales


def decoded(
    keys: jax.Array, values: jax.Array, *scales: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """What a pool of this dtype was given: undoes `stored`."""
    if not scales:
        return keys, values
    return decode(keys, scales[0], dtype), decode(values, scales[1], dtype)


def encode(x: Float[Array, "T K D"], dtype: jnp.dtype) -> tuple[jax.Array, Float[Array, "T K"]]:
    """Bytes `[T, K, D]` and scales: the largest of a head becomes the largest that there is."""
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=2) / LARGEST[dtype.name]
    scaled = wide / jnp.where(scales > 0, scales, 1.0)[:, :, None]
    if dtype.name == "int8":
        return jnp.round(scaled).astype(jnp.int8), scales
    # None without a leading one: a kernel then widens the bits with a shift and a product.
    least = float(jnp.finfo(dtype).smallest_normal)
    scaled = jnp.where(jnp.abs(scaled) < least, 0, scaled)
    return lax.bitcast_convert_type(scaled.astype(dtype), jnp.uint8), scales


def decode(
    stored: jax.Array, scales: Float[Array, "..."], dtype: jnp.dtype
) -> Float[Array, "... D"]:
    """What was encoded, in float32; `scales` has every axis but the last."""
    if dtype.name != "int8":
        stored = lax.bitcast_convert_type(stored, dtype)
    return stored.astype(jnp.float32) * jnp.expand_dims(scales, -1)
