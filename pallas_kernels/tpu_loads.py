"""What the TPU kernels do differently when they are interpreted: how a head's rows are read out of
the slabs of many tokens, and how two tiles are multiplied. Nothing else depends on it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

Loads = Literal["strided", "plain"]


def load_rows(
    slabs,  # Ref [J, C, p, 128] in vector memory
    rows: range,
    dtype: jnp.dtype,
    loads: Loads,
) -> Float[Array, "J lanes"]:
    """These rows of the slab of each of J tokens, side by side, as `dtype`.

    `strided` reads whole 32-bit words, one token after the other, and takes a row's bits out of
    them: three times fewer instructions than indexing, on a TPU. JAX's TPU interpreter knows no
    reinterpreted reference: `plain` is for it. Both give the same bits.
    """
    parts = [_load_row(slabs, row, dtype, loads) for row in rows]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _load_row(slabs, row: int, dtype: jnp.dtype, loads: Loads) -> Float[Array, "J 128"]:
    num_tokens, num_words, packing, lanes = slabs.shape
    if loads == "plain":
        return slabs[:, row // packing, row % packing, :].astype(dtype)
    if packing == 1:
        flat = slabs.reshape(num_tokens * num_words, lanes)
        return flat[row::num_words, :].astype(dtype)
    flat = slabs.bitcast(jnp.uint32).reshape(num_tokens * num_words, lanes)
    words = flat[row // packing :: num_words, :]
    # A bfloat16 is the upper half of a float32.
    bits = words & jnp.uint32(0xFFFF0000) if row % packing else words << jnp.uint32(16)
    return pltpu.bitcast(bits, jnp.float32).astype(dtype)


def dot(a: jax.Array, b: jax.Array, *, transpose_b: bool) -> jax.Array:
    """The product of two tiles in float32; exact products of float32 unless both are shorter."""
    contract = ((1,), (1 if transpose_b else 0,))
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (contract, ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
