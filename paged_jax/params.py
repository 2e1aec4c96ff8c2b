"""Trees of parameters: what can be said and done about them without knowing the model."""

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["cast_floats"]


def cast_floats(params: Any, dtype: str) -> Any:
    """The same tree with every floating leaf in `dtype`; `auto` leaves all as they are."""
    if dtype == "auto":
        return params
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        params,
    )
