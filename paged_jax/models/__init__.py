"""Models behind one contract, and how they are loaded."""

from paged_jax.models.loading import load_model
from paged_jax.models.registry import FAMILIES, Family, find_family
from paged_jax.models.served import ServedModel, from_linen, from_nnx

__all__ = [
    "FAMILIES",
    "Family",
    "ServedModel",
    "find_family",
    "from_linen",
    "from_nnx",
    "load_model",
]
