"""What the TPU kernels do differently when they are interpreted: how a head's rows are read out of
the slabs of many tokens, and how two tiles are multiplied. Nothing else depends on it."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

Loads = Literal["strided", "plain"]


def load_rows(
    slabs,  # Ref [J, C, p, 128] in vector memory
    rows: range,
    stored: jnp.dtype,
    dtype: jnp.dtype,
    loads: Loads,
) -> Float[Array, "J lanes"]:
    """These rows of the slab of each of J tokens, which hold `stored`, side by side, as `dtype`.

    `strided` reads whole 32-bit words, one token after the other, and takes a row's bits out of
    them: three times fewer instructions than indexing, on a TPU. JAX's TPU interpreter knows no
    reinterpreted reference: `plain` is for it. Both give the same bits.
    """
    parts = [_load_row(slabs, row, stored, loads).astype(dtype) for row in rows]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _load_row(slabs, row: int, stored: jnp.dtype, loads: Loads) -> Float[Array, "J 128"]:
    num_tokens, num_words, packing, lanes = slabs.shape
    if loads == "plain":
        values = slabs[:, row // packing, row % packing, :]
        return _widen(values.astype(jnp.int32) << jnp.int32(24), stored) if packing == 4 else values
    if packing == 1:
        return slabs.reshape(num_tokens * num_words, lanes)[row::num_words, :]
    flat = slabs.bitcast(jnp.int32).reshape(num_tokens * num_words, lanes)
    words = flat[row // packing :: num_words, :]
    shift = 32 - 32 // packing * (row % packing + 1)
    top = words << jnp.int32(shift) if shift else words
    if packing == 4:
        return _widen(top, stored)
    # A bfloat16 is the upper half of a float32.
    return _float_of(top if shift else top & jnp.int32(-65536))


def _widen(top: Int[Array, "J 128"], stored: jnp.dtype) -> Float[Array, "J 128"]:
    """The values in the highest bytes of these words, in float32."""
    if stored.name == "int8":
        return (top >> jnp.int32(24)).astype(jnp.float32)
    return _widen_float8(top, jnp.finfo(stored))


def _widen_float8(top: Int[Array, "J 128"], kind: jnp.finfo) -> Float[Array, "J 128"]:
    """In integers, since the older chips know no float8. Exact for what is stored: 0, and numbers
    with a leading one."""
    # Sign, exponent and mantissa to their places, and a product for the exponent's other bias.
    magnitude_bits = 0x7F000000 >> (8 - kind.nexp)
    bits = (top >> jnp.int32(8 - kind.nexp)) & jnp.int32(magnitude_bits - 2**31)
    return _float_of(bits) * jnp.float32(2.0 ** (127 + kind.minexp - 1))


def _float_of(bits: Int[Array, "J 128"]) -> Float[Array, "J 128"]:
    return pltpu.bitcast(bits, jnp.float32)


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
