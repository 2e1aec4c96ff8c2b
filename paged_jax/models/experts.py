"""Mixtures of experts: a router sends each token through a few of many gated MLPs."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.layers import ACTIVATIONS, INIT_STDDEV, linear
from paged_jax.models.decoder_config import ExpertsConfig
from paged_jax.quantization import QuantizedWeight
from paged_jax.sharding import Split
from paged_jax.weights import Path

__all__ = ["SparseMLP", "expert_paths"]

# x[T, I] times, for the tokens of each expert X, w[X, O, I]
PER_EXPERT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


class SparseMLP(nnx.Module):
    """The MLP of a layer with experts. The router bears the name that the family gives it."""

    def __init__(
        self, size: int, config: ExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        setattr(self, config.router, Router(size, config, dtype=dtype, rngs=rngs))
        self.experts = Experts(size, config, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        scores = getattr(self, self.config.router)(x)
        return self.experts(x, *choose(scores, self.config))


class Router(nnx.Module):
    """A score for each expert, in float32. No `Linear`: nothing may round what decides."""

    def __init__(
        self, size: int, config: ExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        init = nnx.initializers.normal(INIT_STDDEV)
        self.weight = nnx.Param(init(rngs.params(), (config.num_experts, size), dtype))
        self.bias = nnx.Param(jnp.zeros(config.num_experts, dtype)) if config.bias else None

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T X"]:
        bias = None if self.bias is None else self.bias[...]
        return linear(x, self.weight[...], bias, dtype=jnp.float32)


def choose(
    scores: Float[Array, "T X"], config: ExpertsConfig
) -> tuple[Int[Array, "T C"], Float[Array, "T C"]]:
    """The experts of each token, best first, and the weight of each."""
    if config.softmax == "chosen":
        best, experts = lax.top_k(scores, config.num_chosen)
        return experts, jax.nn.softmax(best, axis=-1)
    weights, experts = lax.top_k(jax.nn.softmax(scores, axis=-1), config.num_chosen)
    if config.softmax == "all, normed":
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return experts, weights


def multiply(
    x: Float[Array, "P I"],
    weight: Float[Array, "X O I"] | QuantizedWeight,
    expert: Int[Array, " P"],
    sizes: Int[Array, " X"],
) -> Float[Array, "P O"]:
    """Each row by the matrix of its expert, `expert[p]`; expert i has the next `sizes[i]` rows."""
    if not isinstance(weight, QuantizedWeight):
        return lax.ragged_dot_general(x, weight, sizes, PER_EXPERT)
    matrices, scales = weight.factors(x.dtype)
    y = lax.ragged_dot_general(x, matrices, sizes, PER_EXPERT, preferred_element_type=jnp.float32)
    return (y if scales is None else y * scales[expert]).astype(x.dtype)


class Experts(nnx.Module):
    """Gated MLPs of one size, their weights stacked `[experts, out, in]`.

    Over several devices each of them is cut by its inner size, so that every device has an equal
    part of whichever expert a token takes.
    """

    def __init__(
        self, size: int, config: ExpertsConfig, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        X, E, F = config.num_experts, size, config.inner_size
        init = nnx.initializers.normal(INIT_STDDEV)
        self.gate_proj = nnx.Param(init(rngs.params(), (X, F, E), dtype), split=Split(1))
        self.up_proj = nnx.Param(init(rngs.params(), (X, F, E), dtype), split=Split(1))
        self.down_proj = nnx.Param(init(rngs.params(), (X, E, F), dtype), split=Split(2))
        biased = config.bias
        self.gate_bias = nnx.Param(jnp.zeros((X, F), dtype), split=Split(1)) if biased else None
        self.up_bias = nnx.Param(jnp.zeros((X, F), dtype), split=Split(1)) if biased else None
        self.down_bias = nnx.Param(jnp.zeros((X, E), dtype)) if biased else None

    def __call__(
        self,
        x: Float[Array, "T E"],
        experts: Int[Array, "T C"],
        weights: Float[Array, "T C"],
    ) -> Float[Array, "T E"]:
        """Each token through its experts, the results added by their weights.

        The (token, expert) pairs are sorted by expert, so that each expert's weights are
        multiplied once with all of its tokens.
        """
        T, C = experts.shape
        order = jnp.argsort(experts.reshape(-1), stable=True)
        expert = experts.reshape(-1)[order]
        sizes = jnp.bincount(expert, length=self.config.num_experts).astype(jnp.int32)

        def apply(x: Array, weight: nnx.Param, bias: nnx.Param | None) -> Array:
            y = multiply(x, weight[...], expert, sizes)
            return y if bias is None else y + bias[...][expert]

        rows = x[order // C]
        gate = apply(rows, self.gate_proj, self.gate_bias)
        up = apply(rows, self.up_proj, self.up_bias)
        out = apply(self._gated(gate, up), self.down_proj, self.down_bias)
        back = jnp.zeros((T * C, x.shape[1]), out.dtype).at[order].set(out)
        wide = back.reshape(T, C, -1).astype(jnp.float32)
        return (wide * weights[:, :, None]).sum(axis=1).astype(x.dtype)

    def _gated(self, gate: Float[Array, "P F"], up: Float[Array, "P F"]) -> Float[Array, "P F"]:
        if self.config.clamp is None:
            return ACTIVATIONS[self.config.activation](gate) * up
        limit, alpha = self.config.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


def expert_paths(module: nnx.Module) -> tuple[Path, ...]:
    """Paths of the stacked matrices in a module."""
    stacks = (path for path, found in nnx.iter_modules(module) if isinstance(found, Experts))
    return tuple((*path, name) for path in stacks for name in ("gate_proj", "up_proj", "down_proj"))
