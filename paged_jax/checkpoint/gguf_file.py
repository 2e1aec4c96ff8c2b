"""One GGUF file: its metadata read in full, its tensors mapped into memory and dequantised.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library's reader
makes several Python objects for every element, takes seconds on a vocabulary, and does not end on
some damaged files; this one reads the same values in a fraction of a second and checks every
length against the file. The arithmetic of the quantised types is the library's.
"""

import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from paged_jax.errors import ModelLoadError

__all__ = ["GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
NUMBERS: Mapping[int, np.dtype] = {  # value type -> little-endian NumPy type
    0: np.dtype("u1"),
    1: np.dtype("i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
MAX_DIMS = 4
MAX_PIECE_BYTES = 32 << 20  # of float32 values, at a time


class GGUFTensor(NamedTuple):
    shape: tuple[int, ...]  # outermost first, as NumPy and Hugging Face have it
    type: int  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """An open file: `metadata` by key, `tensors` by name.

    Arrays of numbers in the metadata are NumPy arrays, arrays of strings are lists.
    Raises ModelLoadError if the file is cut off, damaged, or of a kind that is not read.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._num_bytes = os.fstat(file.fileno()).st_size
                if file.read(4) != MAGIC:
                    raise self.error("it does not begin with GGUF")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
        self._at = 4
        version = self._number(4)
        if version not in VERSIONS:
            raise self.error(f"GGUF version {version} is not one of {VERSIONS}")
        num_tensors, num_keys = self._count(24), self._count(12)
        self.metadata: Mapping[str, Any] = self._metadata(num_keys)
        self.tensors: Mapping[str, GGUFTensor] = self._tensors(num_tensors)

    def error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {what}")

    def pieces(self, name: str, rows: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """The tensor's values as float32, a few rows of its last axis at a time.

        `rows` chooses rows in their order, or values of a tensor with one axis.
        """
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        kind = GGMLQuantizationType(tensor.type)
        num_values = math.prod(tensor.shape)
        single = rows is not None and len(tensor.shape) == 1
        num_rows = num_values if single else math.prod(tensor.shape[:-1])
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        raw = raw.reshape(num_rows, -1)
        step = max(1, MAX_PIECE_BYTES * num_rows // (4 * num_values))
        for begin in range(0, num_rows if rows is None else len(rows), step):
            piece = slice(begin, begin + step)
            values = raw[piece] if rows is None else raw[rows[piece]]
            try:
                yield dequantize(values, kind)
            except NotImplementedError as error:
                raise self.error(f"tensor {name!r}: {kind.name} cannot be dequantised") from error

    def values(self, name: str) -> np.ndarray:
        """The whole tensor as float32."""
        return np.concatenate(list(self.pieces(name))).reshape(self.tensors[name].shape)

    def _take(self, num_bytes: int) -> int:
        """Step over the next bytes and return where they begin."""
        begin = self._at
        if num_bytes > self._num_bytes - begin:
            raise self.error(
                f"{num_bytes} bytes are announced at byte {begin}, the file ends at "
                f"{self._num_bytes}; it is cut off or damaged, copy or download it again"
            )
        self._at = begin + num_bytes
        return begin

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = NUMBERS[kind]
        return np.frombuffer(self._map, dtype, count, self._take(count * dtype.itemsize))

    def _number(self, kind: int) -> Any:
        return self._numbers(kind, 1)[0].item()

    def _count(self, least_bytes: int) -> int:
        """A count of things that take at least so many bytes each, so that no loop runs away."""
        count = self._number(10)
        if count * least_bytes > self._num_bytes - self._at:
            raise self.error(
                f"{count} entries are announced at byte {self._at - 8}, more than fit in the "
                "file; it is cut off or damaged, copy or download it again"
            )
        return count

    def _string(self) -> str:
        (length,) = struct.unpack_from("<Q", self._map, self._take(8))
        begin = self._take(length)
        try:
            return self._map[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the text at byte {begin} is not UTF-8: {error.reason}") from error

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            item_kind = self._number(4)
            if item_kind == STRING:
                return [self._string() for _ in range(self._count(8))]
            if item_kind in NUMBERS:
                return self._numbers(item_kind, self._count(NUMBERS[item_kind].itemsize))
            raise self.error(f"arrays of value type {item_kind} are not read")
        if kind in NUMBERS:
            return self._number(kind)
        raise self.error(f"value type {kind} at byte {self._at - 4} is unknown; is it damaged?")

    def _metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(count):
            key = self._string()
            if key in metadata:
                raise self.error(f"key {key!r} appears twice")
            metadata[key] = self._value(self._number(4))
        return metadata

    def _tensors(self, count: int) -> dict[str, GGUFTensor]:
        infos = [
            (self._string(), self._shape(), self._number(4), self._number(10)) for _ in range(count)
        ]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"general.alignment {alignment!r} is no power of two")
        data_begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self.error(f"tensor {name!r} appears twice")
            tensors[name] = self._tensor(name, shape, kind, data_begin + offset)
        return tensors

    def _shape(self) -> tuple[int, ...]:
        num_dims = self._number(4)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(f"a tensor of {num_dims} dimensions at byte {self._at - 4}")
        shape = tuple(self._numbers(10, num_dims)[::-1].tolist())
        if not math.prod(shape):
            raise self.error(f"a tensor of the shape {shape} at byte {self._at}")
        return shape

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        if kind not in (known.value for known in GGMLQuantizationType):
            raise self.error(f"tensor {name!r} is of the unknown type {kind}")
        block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if shape[-1] % block_size:
            raise self.error(f"tensor {name!r} {shape}: rows must divide into {block_size} values")
        num_bytes = math.prod(shape) // block_size * block_bytes
        if offset + num_bytes > self._num_bytes:
            raise self.error(
                f"tensor {name!r} ends at byte {offset + num_bytes}, the file has "
                f"{self._num_bytes}; it is cut off, copy or download it again"
            )
        return GGUFTensor(shape, kind, offset, num_bytes)
