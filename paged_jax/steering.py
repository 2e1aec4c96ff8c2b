"""Vectors that requests add to hidden states, on their way to the device's rows."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from paged_jax.errors import RequestError
from scheduler import Sequence as SampledSequence

__all__ = ["SteeringVectors", "check_steering", "digest_of"]


class SteeringVectors:
    """By request, for as long as it lives. Owned by the engine's thread."""

    def __init__(self, num_layers: int, hidden_size: int):
        self._none = np.zeros((num_layers, hidden_size), np.float32)
        self._by_request: dict[str, np.ndarray] = {}
        self._steered_rows: set[int] = set()

    def add(self, request_id: str, vectors: np.ndarray) -> None:
        self._by_request[request_id] = vectors

    def keep_only(self, live: Collection[str]) -> None:
        """Forget the requests that have ended."""
        for request_id in [r for r in self._by_request if r not in live]:
            del self._by_request[request_id]

    def forget_rows(self) -> None:
        """The device's table is new, and empty."""
        self._steered_rows.clear()

    def changes(self, started: Iterable[SampledSequence]) -> Iterator[tuple[int, np.ndarray]]:
        """Rows whose vectors change with those that they were lent to, and to what: [L, E]."""
        for sequence in started:
            vectors = self._by_request.get(sequence.request.request_id)
            if vectors is not None:
                self._steered_rows.add(sequence.row)
                yield sequence.row, vectors
            elif sequence.row in self._steered_rows:
                self._steered_rows.remove(sequence.row)
                yield sequence.row, self._none


def digest_of(vectors: np.ndarray | None) -> str:
    """What tells the blocks of one steering from those of another; empty without any."""
    return "" if vectors is None else hashlib.sha256(vectors.tobytes()).hexdigest()


def check_steering(
    steering: Mapping[int, np.ndarray], layers: Sequence[int], hidden_size: int
) -> np.ndarray:
    """The vectors as float32[L, E], zeros where there is none. RequestError names what is wrong."""
    out = np.zeros((len(layers), hidden_size), np.float32)
    for layer, vector in steering.items():
        if layer not in layers:
            raise RequestError(
                f"steering names layer {layer!r}; this engine steers behind "
                f"steering_layers={tuple(layers)}",
                param="steering",
            )
        values = np.asarray(vector)
        if values.shape != (hidden_size,) or not np.isfinite(values.astype(np.float64)).all():
            raise RequestError(
                f"steering of layer {layer} must be {hidden_size} finite numbers, got shape "
                f"{list(values.shape)}",
                param="steering",
            )
        out[layers.index(layer)] = values
    return out
