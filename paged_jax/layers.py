"""The layers that model families share. Weights of linear layers are stored `[out, in]`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.quantization import QuantizedWeight
from paged_jax.sharding import Split
from paged_jax.weights import Path, Weight

__all__ = [
    "ACTIVATIONS",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "linear",
    "linear_paths",
    "param_splits",
]

FEW_ROWS = 64  # up to here the CPU multiplies faster from the left
INIT_STDDEV = 0.02

# What of a linear layer is cut over devices, and how that cuts its weight [out, in] and its bias
# [out]. A layer whose inputs are cut gives a part of a sum on each device.
LinearSplit = Literal["outputs", "kv_outputs", "inputs"]
LINEAR_SPLITS: Mapping[LinearSplit | None, tuple[Split | None, Split | None]] = {
    "outputs": (Split(0), Split(0)),
    "kv_outputs": (Split(0, by_kv_head=True), Split(0, by_kv_head=True)),
    "inputs": (Split(1), None),
    None: (None, None),
}

Activation = Callable[[Array], Array]
_tanh_gelu = partial(jax.nn.gelu, approximate=True)
ACTIVATIONS: Mapping[str, Activation] = {  # as config.json names them
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": jax.nn.relu,
}


def linear(
    x: Float[Array, "T E"],
    w: Float[Array, "F E"] | Weight,
    b: Float[Array, " F"] | None = None,
    *,
    dtype: DTypeLike | None = None,
) -> Float[Array, "T F"]:
    """`x @ w.T + b`, accumulated and returned in `dtype` (default: the dtype of `x`).

    `w` may be quantized or have adapters: a `Weight`.

    Chosen when the program is lowered, by the platform it is lowered for.
    """
    dtype = x.dtype if dtype is None else dtype
    y = w.multiply(x, dtype) if isinstance(w, Weight) else _product(x, w, jnp.dtype(dtype))
    return y if b is None else y + b.astype(dtype)[None, :]


@partial(jax.jit, static_argnames="dtype")  # traced once for all layers of a size
def _product(x: Array, w: Array, dtype: jnp.dtype) -> Array:
    return lax.platform_dependent(
        x,
        w,
        cpu=lambda x, w: on_cpu(x, w, dtype),
        default=lambda x, w: rows_first(x, w, dtype),
    )


def on_cpu(x: Array, w: Array, dtype: DTypeLike) -> Array:
    """The form that XLA's CPU is fastest in (docs/performance.md).

    A few rows of float32 go as `(w @ x.T).T`, which reads the weights in the order in which they
    lie. Shorter floats are fast only as they are written, into float32, and not a row alone.
    """
    if x.dtype.itemsize == 2:
        rows = jnp.concatenate([x, x]) if x.shape[0] == 1 else x
        return rows_first(rows, w, jnp.float32)[: x.shape[0]].astype(dtype)
    return weights_first(x, w, dtype) if x.shape[0] <= FEW_ROWS else rows_first(x, w, dtype)


def rows_first(x: Array, w: Array, dtype: DTypeLike) -> Array:
    """`x @ w.T`, as it is written."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def weights_first(x: Array, w: Array, dtype: DTypeLike) -> Array:
    """`(w @ x.T).T`. Without the barriers XLA folds the transposes back into `rows_first`."""
    columns = lax.optimization_barrier(x.T)
    y = lax.dot_general(w, columns, (((1,), (0,)), ((), ())), preferred_element_type=dtype)
    return lax.optimization_barrier(y).T


class Linear(nnx.Module):
    """`x[T, in] -> [T, out]` with a weight `[out, in]` and, where `bias` is set, a bias `[out]`.

    `split` says what of it is cut where a model runs over several devices: its outputs (those of
    keys and values go with their KV heads), its inputs, or nothing.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        split: LinearSplit | None = None,
    ) -> None:
        init = nnx.initializers.normal(INIT_STDDEV)
        of_weight, of_bias = LINEAR_SPLITS[split]
        weight = init(rngs.params(), (out_size, in_size), dtype)
        self.weight = nnx.Param(weight, split=of_weight)
        self.bias = nnx.Param(jnp.zeros(out_size, dtype), split=of_bias) if bias else None

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T F"]:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class Embedding(nnx.Module):
    """A vector of `size` for each of `num` tokens; `split` cuts it over devices by token.

    `is_head` says that `linear` makes the logits of the same vectors, and that nothing else uses
    them: then they may be quantized.
    """

    def __init__(
        self,
        num: int,
        size: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        split: bool = True,
        is_head: bool = False,
    ) -> None:
        init = nnx.initializers.normal(INIT_STDDEV)
        weight = init(rngs.params(), (num, size), dtype)
        self.weight = nnx.Param(weight, split=Split(0) if split else None)
        self.is_head = is_head

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T E"]:
        weight = self.weight[...]
        if isinstance(weight, QuantizedWeight):
            return weight.rows(token_ids)
        return jnp.take(weight, token_ids, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """Root mean square normalisation over the last axis, in float32; keeps the dtype of `x`.

    The result is multiplied by `weight + offset`: Gemma stores weights that begin at zero.
    """

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike, offset: float = 0.0) -> None:
        self.weight = nnx.Param(jnp.full(size, 1.0 - offset, dtype))
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        return _rms_norm(x, self.weight[...], self.eps, self.offset)


@partial(jax.jit, static_argnames=("eps", "offset"))
def _rms_norm(x: Array, weight: Array, eps: float, offset: float) -> Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * lax.rsqrt(mean_square + eps)
    by_entry = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return (normed * (by_entry + offset)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean and variance normalised over the last axis, in float32; keeps the dtype of `x`."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        weight, bias = (p[...].astype(jnp.float32)[None, :] for p in (self.weight, self.bias))
        return (centred * lax.rsqrt(variance + self.eps) * weight + bias).astype(x.dtype)


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, SwiGLU with its kin (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self,
        size: int,
        inner_size: int,
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        activation: Activation = jax.nn.silu,
    ) -> None:
        self.activation = activation
        self.gate_proj, self.up_proj = (
            Linear(size, inner_size, bias=bias, dtype=dtype, rngs=rngs, split="outputs")
            for _ in range(2)
        )
        self.down_proj = Linear(inner_size, size, bias=bias, dtype=dtype, rngs=rngs, split="inputs")

    def __call__(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def linear_paths(module: nnx.Module) -> tuple[Path, ...]:
    """Paths of the matrices in a module that are multiplied by `linear`, and by nothing else: those
    of `Linear`, and of an `Embedding` that is the head as well."""
    layers = (
        path
        for path, found in nnx.iter_modules(module)
        if isinstance(found, Linear) or (isinstance(found, Embedding) and found.is_head)
    )
    return tuple((*path, "weight") for path in layers)


def param_splits(params: nnx.State) -> dict[Path, Split]:
    """How a module's `nnx.Param`s are cut over devices: those made with `split=Split(...)`."""
    flat = nnx.to_flat_state(params)
    splits = {path: variable.get_metadata().get("split") for path, variable in flat}
    return {path: split for path, split in splits.items() if split is not None}
