"""Weights in few bits: rounded to nearest, with scales. No data is looked at to choose them.

    int8   a scale for each output row
    fp8    float8 e4m3, a scale for each output row
    int4   a scale for each output row and group of inputs, two values in a byte

What is kept is a matrix of small numbers and float32 scales; it is multiplied in the dtype of the
activations, so that nothing but the weights is rounded. Embeddings, norms, biases and the head stay
as they are.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from paged_jax.errors import ConfigError
from paged_jax.weights import Path, Weight

__all__ = ["QuantizedWeight", "Scheme", "quantize", "quantize_params"]

Scheme = Literal["int8", "int4", "fp8"]

INT4_GROUP_LEN = 64  # inputs that share a scale; less where the matrix is not divided by it
LEAST_GROUP_LEN = 8
FP8_MAX = 448.0  # of float8_e4m3fn
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": FP8_MAX}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["scheme", "float_dtype"],
)
@dataclass(frozen=True)
class QuantizedWeight(Weight):
    """`w[f, e] = values[f, e] * scales[f, e // group_len]`."""

    values: jax.Array  # int8 or float8 [F, E]; of int4 uint8 [F, E/2], the lower half first
    scales: jax.Array  # f32 [F, G]
    scheme: Scheme
    float_dtype: str  # of the matrix that it was

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns * (2 if self.scheme == "int4" else 1)

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.float_dtype)

    def multiply(self, x: Float[Array, "T E"], dtype: DTypeLike) -> Float[Array, "T F"]:
        """Scales of whole rows come after the product, those of groups before it."""
        one_scale = self.scales.shape[1] == 1
        matrix = self._integers(x.dtype) if one_scale else self.dequantized(x.dtype)
        contract = (((1,), (1,)), ((), ()))
        y = lax.dot_general(x, matrix, contract, preferred_element_type=jnp.float32)
        return (y * self.scales[:, 0][None, :] if one_scale else y).astype(dtype)

    def dequantized(self, dtype: DTypeLike) -> Float[Array, "F E"]:
        rows, columns = self.shape
        grouped = self._integers(jnp.float32).reshape(rows, self.scales.shape[1], -1)
        return (grouped * self.scales[:, :, None]).reshape(rows, columns).astype(dtype)

    def replaced(self, leaf: Any) -> Self:
        other = quantize(jnp.asarray(leaf, self.dtype), self.scheme)
        return type(self)(other.values, other.scales, self.scheme, self.float_dtype)

    def placed(self, axis: int | None, put: Callable[[Any, int | None], Any]) -> Self:
        has_groups = self.scales.shape[1] > 1
        of_scales = axis if axis == 0 or has_groups else None
        return replace(self, values=put(self.values, axis), scales=put(self.scales, of_scales))

    def _integers(self, dtype: DTypeLike) -> Float[Array, "F E"]:
        if self.scheme != "int4":
            return self.values.astype(dtype)
        low = (self.values & 15).astype(jnp.int8) - jnp.int8(8)
        high = (self.values >> 4).astype(jnp.int8) - jnp.int8(8)
        return jnp.stack([low, high], axis=-1).reshape(self.shape).astype(dtype)


@partial(jax.jit, static_argnames="scheme")
def quantize(weight: Float[Array, "F E"], scheme: Scheme) -> QuantizedWeight:
    """Round each value to the nearest that its scale allows; the largest of a group is exact."""
    rows, columns = weight.shape
    group_len = _group_len(columns, scheme)
    grouped = weight.astype(jnp.float32).reshape(rows, columns // group_len, group_len)
    scales = jnp.max(jnp.abs(grouped), axis=2) / LARGEST[scheme]
    scales = jnp.where(scales > 0, scales, 1.0)
    values = (grouped / scales[:, :, None]).reshape(rows, columns)
    if scheme == "fp8":
        stored = values.astype(jnp.float8_e4m3fn)
    else:
        stored = jnp.round(values).astype(jnp.int8)
    if scheme == "int4":
        nibbles = (stored + jnp.int8(8)).astype(jnp.uint8).reshape(rows, columns // 2, 2)
        stored = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    return QuantizedWeight(stored, scales, scheme, weight.dtype.name)


def _group_len(columns: int, scheme: Scheme) -> int:
    if scheme != "int4":
        return columns
    group_len = math.gcd(columns, INT4_GROUP_LEN)
    if group_len < LEAST_GROUP_LEN:
        raise ConfigError(
            f"quantization=int4 needs matrices whose inputs are a multiple of {LEAST_GROUP_LEN}, "
            f"one has {columns}"
        )
    return group_len


def quantize_params(params: Any, linears: Iterable[Path], scheme: str) -> None:
    """Replace these matrices in a tree of nested dicts, one after the other, in place.

    Raises ConfigError for an unknown scheme, or where there is nothing to quantize.
    """
    if scheme not in get_args(Scheme):
        raise ConfigError(
            f"quantization must be one of {', '.join(get_args(Scheme))}; got {scheme!r}"
        )
    paths = list(linears)
    if not paths:
        raise ConfigError(
            f"quantization={scheme} finds nothing to quantize: it takes the matrices of "
            "paged_jax.layers.Linear, and this model multiplies with none"
        )
    for *parents, last in paths:
        place = params
        for key in parents:
            place = place[key]
        place[last] = jax.block_until_ready(quantize(place[last], scheme))
