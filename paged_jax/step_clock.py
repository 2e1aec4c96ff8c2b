"""How long the running step takes: shows whoever watches that the engine hangs."""

import contextlib
import time
from collections.abc import Callable, Iterator

__all__ = ["StepClock"]


class StepClock:
    """Set by the engine's thread, read by any. A step that compiles is as old as what follows."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._began: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since the step began, or since it last compiled; 0 while none runs."""
        began = self._began  # once: another thread changes it
        return 0.0 if began is None else self._now() - began

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """For the length of a step."""
        self._began = self._now()
        try:
            yield
        finally:
            self._began = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """For the length of a compilation, within a step or not: that may take minutes."""
        runs = self._began is not None
        self._began = None
        try:
            yield
        finally:
            self._began = self._now() if runs else None
