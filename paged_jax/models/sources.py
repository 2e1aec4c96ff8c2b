"""Where a parameter's values lie in a model's files: one tensor, a part of one, or several."""

import dataclasses
import math
from collections.abc import Callable, Set
from typing import Protocol

import numpy as np

__all__ = ["MXFP4", "Index", "Path", "Source", "Stack", "Tensor", "TensorFile", "tensor_name"]

Path = tuple[str | int, ...]
Index = tuple[slice, ...]
FLOATS = ("float32", "bfloat16", "float16", "float64")


class TensorFile(Protocol):
    """The part of a checkpoint that sources read."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> np.dtype: ...
    def tensor(self, name: str) -> np.ndarray: ...


class Source(Protocol):
    """The values of one parameter, read only as far as they are asked for."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it needs."""

    @property
    def file_dtypes(self) -> tuple[str, ...]:
        """What those tensors may hold."""

    @property
    def is_verbatim(self) -> bool:
        """Is the parameter one tensor as it is?"""

    def num_bytes(self, file: TensorFile) -> int:
        """How much of the file it reads."""

    def resolve(self, present: Set[str]) -> "Source":
        """The source to use of those that stand in for each other, by the tensors there are."""

    def shape(self, file: TensorFile) -> tuple[int, ...]:
        """What the file's tensors give; the parameter may ask for another shape."""

    def read(self, file: TensorFile, index: Index) -> np.ndarray:
        """The values at `index`, one slice for each axis: a view of the file or a new array."""


def _whole(tensor: np.ndarray) -> np.ndarray:
    return tensor


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor, or what `take` sees of it: a part, or other order of axes. `take` copies none."""

    name: str
    take: Callable[[np.ndarray], np.ndarray] = _whole

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def file_dtypes(self) -> tuple[str, ...]:
        return FLOATS

    @property
    def is_verbatim(self) -> bool:
        return self.take is _whole

    def num_bytes(self, file: TensorFile) -> int:
        return math.prod(self.shape(file)) * file.dtype(self.name).itemsize

    def resolve(self, present: Set[str]) -> "Tensor":
        return self

    def shape(self, file: TensorFile) -> tuple[int, ...]:
        return self.take(np.broadcast_to(np.int8(0), file.shape(self.name))).shape

    def read(self, file: TensorFile, index: Index) -> np.ndarray:
        return self.take(file.tensor(self.name))[index]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tensors of one shape, one after the other along a new first axis."""

    names: tuple[str, ...]

    @property
    def file_dtypes(self) -> tuple[str, ...]:
        return FLOATS

    @property
    def is_verbatim(self) -> bool:
        return False

    def num_bytes(self, file: TensorFile) -> int:
        return math.prod(self.shape(file)) * file.dtype(self.names[0]).itemsize

    def resolve(self, present: Set[str]) -> "Stack":
        return self

    def shape(self, file: TensorFile) -> tuple[int, ...]:
        shapes = {file.shape(name) for name in self.names}
        # Where one differs from the others, the shape that no parameter has.
        return (len(self.names), *shapes.pop()) if len(shapes) == 1 else ()

    def read(self, file: TensorFile, index: Index) -> np.ndarray:
        first, *rest = index
        return np.stack([file.tensor(name)[tuple(rest)] for name in self.names[first]])


# Microscaling FP4 (OCP MX specification 1.0): sign, two bits of exponent, one of mantissa.
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FP4_VALUES = np.concatenate([FP4_VALUES, -FP4_VALUES])
SCALE_BIAS = 127  # of the exponents of two that scale 32 values each


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """A stack of matrices `[X, out, in]` that a file keeps plain or as `_blocks` and `_scales`.

    Packed, a row is blocks of 16 bytes, two values a byte, the lower half first, and an exponent
    for each block. `take` chooses rows of blocks and scales.
    """

    plain: Tensor
    take: Callable[[np.ndarray], np.ndarray]

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.plain.name}_blocks", f"{self.plain.name}_scales")

    @property
    def file_dtypes(self) -> tuple[str, ...]:
        return ("uint8",)

    @property
    def is_verbatim(self) -> bool:
        return False

    def num_bytes(self, file: TensorFile) -> int:
        return math.prod(self.shape(file)) * 17 // 32

    def resolve(self, present: Set[str]) -> Source:
        return self.plain if self.plain.name in present else self

    def shape(self, file: TensorFile) -> tuple[int, ...]:
        blocks, scales = (
            self.take(np.broadcast_to(np.int8(0), file.shape(name))).shape for name in self.names
        )
        fits = len(blocks) == 4 and blocks[:3] == scales and blocks[3] == 16
        return (*blocks[:2], 32 * blocks[2]) if fits else ()

    def read(self, file: TensorFile, index: Index) -> np.ndarray:
        outer, last = index[:2], index[2]
        blocks, scales = (self.take(file.tensor(name))[outer] for name in self.names)
        values = np.empty((*blocks.shape, 2), np.float32)
        values[..., 0] = FP4_VALUES[blocks & 0xF]
        values[..., 1] = FP4_VALUES[blocks >> 4]
        exponents = scales.astype(np.int32) - SCALE_BIAS
        values = np.ldexp(values, exponents[..., None, None])
        return values.reshape(*blocks.shape[:2], -1)[..., last]


def tensor_name(path: Path) -> str:
    """The name that Hugging Face's checkpoints of most families have for a parameter at `path`."""
    name = ".".join(map(str, path))
    return name if path[0] == "lm_head" else f"model.{name}"
