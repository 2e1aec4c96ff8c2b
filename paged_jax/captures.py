"""Hidden states on their way from steps to those who asked for them."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from scheduler import SchedulerOutput

__all__ = ["Captures"]


class _Part(NamedTuple):
    """`num_tokens` of a sequence from position `start` on stand at `place` in a step."""

    start: int
    num_tokens: int
    place: int
    captured: jax.Array  # [C, T, E], still on the device


class Captures:
    """What was captured of requests, by their ids. Owned by the engine's thread."""

    def __init__(self, layers: Sequence[int]):
        self._layers = tuple(layers)
        self._parts: dict[str, list[_Part]] = {}

    def want(self, request_id: str) -> None:
        self._parts[request_id] = []

    def note(self, output: SchedulerOutput, captured: jax.Array) -> None:
        """Keep what a dispatched step computes of the requests that are wanted."""
        placed = list(enumerate(output.decodes))
        place = len(placed)
        for chunk in output.chunks:
            placed.append((place, chunk))
            place += chunk.num_tokens
        for at, scheduled in placed:
            parts = self._parts.get(scheduled.sequence.request.request_id)
            if parts is not None:
                parts.append(_Part(scheduled.start, scheduled.num_tokens, at, captured))

    def take(self, request_id: str, num_tokens: int) -> dict[int, np.ndarray]:
        """float32[num_tokens, E] of each layer; nothing is kept."""
        parts = self._parts.pop(request_id)
        size = parts[0].captured.shape[2]
        out = np.full((len(self._layers), num_tokens, size), np.nan, np.float32)
        for start, count, place, captured in parts:
            states = np.asarray(captured)[:, place : place + count].astype(np.float32)
            out[:, start : start + count] = states
        return dict(zip(self._layers, out, strict=True))
