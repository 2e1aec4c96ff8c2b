"""Two layouts of a step's tokens, and the way from one to the other.

    by row   D one-token rows, padding included, then C tokens of chunks: what attention works on
    packed   C tokens, without what is padded between decodes and chunks: what a model works on

All that a model does to a token costs as much for padding as for others; attention skips it. With
n decodes, token n of the packed layout is token D of the one by row.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

__all__ = ["pack", "unpack"]


def pack(
    x: Shaped[Array, "D_plus_C ..."], num_decodes: Int[Array, ""], *, decode_rows: int
) -> Shaped[Array, "C ..."]:
    """The tokens side by side. `decode_rows` is D, of which `num_decodes` are real; the real tokens
    of rows and chunks together must be C at most."""
    size = x.shape[0] - decode_rows
    behind = lax.dynamic_slice_in_dim(x, decode_rows - num_decodes, size)
    is_decode = jnp.arange(size, dtype=jnp.int32) < num_decodes
    return jnp.where(is_decode.reshape(-1, *[1] * (x.ndim - 1)), x[:size], behind)


def unpack(
    x: Shaped[Array, "C ..."], num_decodes: Int[Array, ""], *, decode_rows: int
) -> Shaped[Array, "D_plus_C ..."]:
    """The tokens as attention wants them; what padding holds is some other token's."""
    size = x.shape[0]
    padded = jnp.pad(x, ((0, decode_rows), *[(0, 0)] * (x.ndim - 1)))
    chunks = lax.dynamic_slice_in_dim(padded, num_decodes, size)
    return jnp.concatenate([padded[:decode_rows], chunks])
