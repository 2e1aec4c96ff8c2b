"""Models behind one contract, and how they are loaded."""

from paged_jax.models.attention_fn import AttentionFn, from_attention_fn
from paged_jax.models.cached import from_cached
from paged_jax.models.loading import describe_model, load_model, named_params
from paged_jax.models.registry import FAMILIES, Family, find_family
from paged_jax.models.served import (
    Apply,
    Logits,
    ServedModel,
    from_function,
    from_linen,
    from_nnx,
    layer_matrices,
    quantized,
)

__all__ = [
    "FAMILIES",
    "Apply",
    "AttentionFn",
    "Family",
    "Logits",
    "ServedModel",
    "describe_model",
    "find_family",
    "from_attention_fn",
    "from_cached",
    "from_function",
    "from_linen",
    "from_nnx",
    "layer_matrices",
    "load_model",
    "named_params",
    "quantized",
]
