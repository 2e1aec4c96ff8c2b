"""One safetensors file: its header checked in full, its tensors mapped into memory.

The format (https://huggingface.co/docs/safetensors): eight bytes, the header's length as a
little-endian integer; the header, a JSON object; then the tensors' bytes without holes or overlaps.
The `safetensors` library copies every tensor and its NumPy side knows no float8, hence this reader.
"""

import json
import math
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from paged_jax.errors import ModelLoadError

__all__ = ["SafetensorsFile", "TensorEntry", "write_float32"]

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
MAX_HEADER_BYTES = 100_000_000  # the library's own limit


class TensorEntry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the tensors' part
    end: int


class SafetensorsFile:
    """An open file. Every array taken from it keeps its memory map alive; nothing needs closing.

    Raises ModelLoadError, naming the file and the tensor, if the header is not exactly what the
    format asks for; a cut-off file is found here and not when its last tensor is used.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with open(path, "rb") as file:
                self._num_bytes = os.fstat(file.fileno()).st_size
                if self._num_bytes < 8:
                    raise self._error(f"{self._num_bytes} bytes are no safetensors file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
        (header_bytes,) = struct.unpack_from("<Q", self._map)
        if header_bytes > min(self._num_bytes - 8, MAX_HEADER_BYTES):
            raise self._error(
                f"its header claims {header_bytes} bytes, the file has {self._num_bytes}; "
                "it is cut off or no safetensors file"
            )
        self._data_begin = 8 + header_bytes
        self.entries: Mapping[str, TensorEntry] = self._checked_layout(
            self._checked_header(self._map[8 : self._data_begin])
        )

    def tensor(self, name: str) -> np.ndarray:
        """The tensor, read-only, without a copy (one that lies unaligned in the file is copied)."""
        entry = self.entries[name]
        array = np.ndarray(
            entry.shape, entry.dtype, buffer=self._map, offset=self._data_begin + entry.begin
        )
        return np.require(array, requirements="A")

    def forget_pages(self) -> None:
        """Drop what the map takes of this process's memory; it is read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _error(self, what: str, tensor: str | None = None) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {f'tensor {tensor!r}: ' if tensor else ''}{what}")

    def _checked_header(self, raw: bytes) -> dict[str, TensorEntry]:
        def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
            names = dict(pairs)
            if len(names) != len(pairs):
                raise ValueError("a name appears twice")
            return names

        try:
            header = json.loads(raw, object_pairs_hook=no_duplicates)
        except (ValueError, RecursionError) as error:
            raise self._error(f"its header is not valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._error("its header is not a JSON object")
        header.pop("__metadata__", None)
        return {name: self._checked_entry(name, entry) for name, entry in header.items()}

    def _checked_entry(self, name: str, entry: object) -> TensorEntry:
        match entry:
            case {"dtype": str(dtype_name), "shape": [*shape], "data_offsets": [begin, end]}:
                pass
            case _:
                raise self._error("dtype, shape and data_offsets are expected", name)
        if dtype_name not in DTYPES:
            raise self._error(f"dtype {dtype_name} is not one of {', '.join(DTYPES)}", name)
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise self._error(f"{shape=} and data_offsets=[{begin}, {end}] must be counts", name)
        dtype = DTYPES[dtype_name]
        num_bytes = math.prod(shape) * dtype.itemsize
        if end - begin != num_bytes:
            raise self._error(
                f"{dtype_name}{shape} takes {num_bytes} bytes, its data_offsets "
                f"[{begin}, {end}] hold {end - begin}",
                name,
            )
        if self._data_begin + end > self._num_bytes:
            raise self._error(
                f"ends at byte {self._data_begin + end}, the file has {self._num_bytes}; "
                "it is cut off, copy or download it again",
                name,
            )
        return TensorEntry(dtype, tuple(shape), begin, end)

    def _checked_layout(self, entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != end:
                kind = "overlaps the one before it" if entry.begin < end else "follows a hole"
                raise self._error(f"{kind}: it begins at {entry.begin}, not at {end}", name)
            end = entry.end
        if self._data_begin + end != self._num_bytes:
            rest = self._num_bytes - self._data_begin - end
            raise self._error(f"{rest} bytes after the last tensor belong to none")
        return entries


def write_float32(
    file: BinaryIO,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterable[tuple[str, Iterator[np.ndarray]]],
) -> None:
    """Write a safetensors file of float32 tensors piece by piece.

    `tensors` gives the names in the order of `shapes`, each with its values in row-major pieces,
    so that never more than one piece is in memory.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in shapes.items():
        end = begin + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 64)  # so that the tensors begin aligned
    file.write(struct.pack("<Q", len(raw)) + raw)
    for (name, pieces), (expected, shape) in zip(tensors, shapes.items(), strict=True):
        assert name == expected, f"{name=} comes where {expected=} was announced"
        written = 0
        for piece in pieces:
            values = np.ascontiguousarray(piece, "<f4").reshape(-1)
            file.write(values.view(np.uint8).data)
            written += values.nbytes
        assert written == 4 * math.prod(shape), f"{name}: {written=} bytes for {shape=}"
