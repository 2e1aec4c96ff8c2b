"""Every compilation of this process, as JAX's own monitoring reports it."""

from collections.abc import Callable

import jax

__all__ = ["CompileCounter"]

BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts compilations, helper computations included, and those that the disk cache answered.

    JAX has no way to take a single listener back: `close` makes this one deaf.
    """

    def __init__(self):
        self.num_compiles = 0
        self.compile_s = 0.0
        self.num_cache_hits = 0
        self.on_compile: Callable[[float], None] = lambda seconds: None
        self._open = True
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def close(self) -> None:
        self._open = False

    def _on_duration(self, event: str, seconds: float, **_: object) -> None:
        if self._open and event == BACKEND_COMPILE:
            self.num_compiles += 1
            self.compile_s += seconds
            self.on_compile(seconds)

    def _on_event(self, event: str, **_: object) -> None:
        if self._open and event == CACHE_HIT:
            self.num_cache_hits += 1
