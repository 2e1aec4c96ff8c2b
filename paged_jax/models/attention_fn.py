"""Modules whose attention is an `attention_fn` of their own choosing, as Flax's are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from paged_jax.attention import Attend
from paged_jax.errors import ModelLoadError
from paged_jax.models.served import ServedModel, from_function

__all__ = ["AttentionFn", "from_attention_fn"]


class AttentionFn:
    """`attend` in the form of Flax's `dot_product_attention`: heads of a batch of one.

    Numbers its layers by the order of its calls, so make a new one for each run of the model:

        Model(attention_fn=AttentionFn(attend)).apply({"params": params}, token_ids[None])

    Attention is causal within each sequence, whatever `mask` says: a step holds tokens of many
    sequences, which no mask of the model's own can know. A `bias` is refused.
    """

    def __init__(self, attend: Attend):
        self._attend = attend
        self._num_calls = 0

    def __call__(
        self,
        query: Float[Array, "1 T H D"],
        key: Float[Array, "1 T K D"],
        value: Float[Array, "1 T K D"],
        bias: Any = None,
        mask: Any = None,
        **_: Any,
    ) -> Float[Array, "1 T H D"]:
        layer, self._num_calls = self._num_calls, self._num_calls + 1
        return attend_batch_of_one(self._attend, layer, query, key, value, bias)


def attend_batch_of_one(
    attend: Attend,
    layer: int,
    query: Float[Array, "1 T H D"],
    key: Float[Array, "1 T K D"],
    value: Float[Array, "1 T K D"],
    bias: Any = None,
    mask: Any = None,
    **_: Any,
) -> Float[Array, "1 T H D"]:
    """`attend` for a batch axis of 1. Raises ModelLoadError for what it cannot take."""
    if query.ndim != 4 or query.shape[0] != 1:
        raise ModelLoadError(
            f"attention_fn takes [1, T, H, D], a batch of one, got query {query.shape}"
        )
    if bias is not None:
        raise ModelLoadError("attention_fn takes no bias: paged attention adds none to its scores")
    return attend(query[0], key[0], value[0], layer=layer)[None]


def from_attention_fn(
    module: nnx.Module,
    *,
    call: Callable[..., jax.Array] | None = None,
    max_position: int | None = None,
    uses_positions: bool = True,
) -> ServedModel:
    """Serve an NNX module whose attention layers have an `attention_fn`, without changing it.

    `call(module, token_ids[1,T], positions[1,T])` gives scores [1,T,V]; by default it is
    `module(token_ids, positions)`. Every layer below the module that has an `attention_fn` (such
    as `nnx.MultiHeadAttention`) gets the engine's in its place, in the order in which they are
    found. Masks are not looked at: attention is causal within each sequence.

    Raises ModelLoadError if there is no such layer, and what `from_function` raises.
    """
    served = nnx.clone(module)
    served.eval()
    graphdef, params, rest = nnx.split(served, nnx.Param, ...)
    run = call or (lambda module, token_ids, positions: module(token_ids, positions))

    def apply(params, token_ids, positions, attend):
        model = nnx.merge(graphdef, params, rest)
        layers = [m for _, m in nnx.iter_modules(model) if "attention_fn" in vars(m)]
        if not layers:
            raise ModelLoadError(
                f"{type(module).__name__} has no layer with an attention_fn: its attention must "
                "call `attend`, see paged_jax.models.from_nnx"
            )
        for index, layer in enumerate(layers):
            layer.attention_fn = partial(attend_batch_of_one, attend, index)
        return run(model, token_ids[None], positions[None])[0]

    return from_function(
        apply, nnx.to_pure_dict(params), max_position=max_position, uses_positions=uses_positions
    )
