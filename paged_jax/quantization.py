"""Weights in few bits: rounded to nearest, with scales. No data is looked at to choose them.

    int8   a scale for each output row
    fp8    float8 e4m3, a scale for each output row
    int4   a scale for each output row and group of inputs, two values in a byte

What is kept is a matrix of small numbers and float32 scales; it is multiplied in the dtype of the
activations, so that nothing but the weights is rounded. Experts' matrices lie in a stack
[X, F, E], each rounded by itself. Norms, biases and routers stay as they are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.errors import ConfigError
from paged_jax.weights import Path, Weight

__all__ = [
    "HEAD_SCHEME",
    "QuantizedWeight",
    "Scheme",
    "check_scheme",
    "quantize",
    "quantize_params",
]

Scheme = Literal["int8", "int4", "fp8"]

INT4_GROUP_LEN = 64  # inputs that share a scale; less where the matrix is not divided by it
LEAST_GROUP_LEN = 8
FP8_MAX = 448.0  # of float8_e4m3fn
LARGEST = {"int8": 127.0, "int4": 7.0, "fp8": FP8_MAX}
# The most exact: the head's errors are those of the logits. Also of embeddings that are the head.
HEAD_SCHEME: Scheme = "int8"


def check_scheme(name: str) -> Scheme:
    """ConfigError if there is no scheme of that name."""
    if name not in get_args(Scheme):
        raise ConfigError(
            f"quantization must be one of {', '.join(get_args(Scheme))}; got {name!r}"
        )
    return cast(Scheme, name)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales"],
    meta_fields=["scheme", "float_dtype"],
)
@dataclass(frozen=True)
class QuantizedWeight(Weight):
    """`w[f, e] = values[f, e] * scales[f, e // group_len]`; or a stack of such matrices."""

    values: jax.Array  # int8 or float8 [(X,) F, E]; of int4 uint8 [(X,) F, E/2], lower half first
    scales: jax.Array  # f32 [(X,) F, G]
    scheme: Scheme
    float_dtype: str  # of the matrix that it was

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, columns = self.values.shape
        return (*outer, columns * (2 if self.scheme == "int4" else 1))

    @property
    def dtype(self) -> Any:
        return jnp.dtype(self.float_dtype)

    def multiply(self, x: Float[Array, "T E"], dtype: DTypeLike) -> Float[Array, "T F"]:
        matrix, scales = self.factors(x.dtype)
        contract = (((1,), (1,)), ((), ()))
        y = lax.dot_general(x, matrix, contract, preferred_element_type=jnp.float32)
        return (y if scales is None else y * scales[None, :]).astype(dtype)

    def factors(
        self, dtype: DTypeLike
    ) -> tuple[Float[Array, "*X F E"], Float[Array, "*X F"] | None]:
        """What to multiply with, and by what each output of that is scaled: scales of whole rows
        come after the product, those of groups (None) before it."""
        if self.scales.shape[-1] == 1:
            return self._numbers().astype(dtype), self.scales[..., 0]
        return self.dequantized(dtype), None

    def dequantized(self, dtype: DTypeLike) -> Float[Array, "*X F E"]:
        grouped = self._numbers().astype(jnp.float32).reshape(*self.scales.shape, -1)
        scales = jnp.expand_dims(self.scales, -1)
        return (grouped * scales).reshape(self.shape).astype(dtype)

    def rows(self, ids: Int[Array, " T"]) -> Float[Array, "T E"]:
        """Rows of one matrix, in the dtype that it had."""
        values, scales = (jnp.take(x, ids, axis=0, mode="clip") for x in (self.values, self.scales))
        return replace(self, values=values, scales=scales).dequantized(self.dtype)

    def replaced(self, leaf: Any) -> Self:
        other = quantize(jnp.asarray(leaf, self.dtype), self.scheme)
        return type(self)(other.values, other.scales, self.scheme, self.float_dtype)

    def placed(self, axis: int | None, put: Callable[[Any, int | None], Any]) -> Self:
        is_inner = axis == self.values.ndim - 1
        of_scales = None if is_inner and self.scales.shape[-1] == 1 else axis
        return replace(self, values=put(self.values, axis), scales=put(self.scales, of_scales))

    def _numbers(self) -> jax.Array:
        """int8 or float8 [(X,) F, E]"""
        if self.scheme != "int4":
            return self.values
        low = (self.values & 15).astype(jnp.int8) - jnp.int8(8)
        high = (self.values >> 4).astype(jnp.int8) - jnp.int8(8)
        return jnp.stack([low, high], axis=-1).reshape(self.shape)


@partial(jax.jit, static_argnames="scheme")
def quantize(weight: Float[Array, "*X F E"], scheme: Scheme) -> QuantizedWeight:
    """Round each value to the nearest that its scale allows; the largest of a group is exact."""
    if weight.ndim == 3:  # one after the other: they are wide meanwhile
        return lax.map(partial(quantize, scheme=scheme), weight)
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


def quantize_params(params: Any, schemes: Mapping[Path, Scheme]) -> None:
    """Replace the matrices at these paths of nested dicts, one after the other, in place."""
    for (*parents, last), scheme in schemes.items():
        place = params
        for key in parents:
            place = place[key]
        place[last] = jax.block_until_ready(quantize(place[last], scheme))
