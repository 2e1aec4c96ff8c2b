"""Mosaic GPU's interpreter for the tests: the back end that runs through it, and how to run it in
bearable time.

The interpreter runs each warpgroup of each thread block as a JAX program of its own, and compiles
that anew each time, though it is the same one. `interpreted_gpu` compiles it once.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
import pytest
from jax._src import core
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

from pallas_kernels import GpuBackend, registry

NAME = "gpu_interpreted"
# Copies that have a clock of their own. Those that share one hide each other's races.
COPIES = 256


@contextlib.contextmanager
def interpreted_gpu() -> Iterator[None]:
    """Within, the back end `gpu_interpreted` exists, which notes races."""
    params = InterpretGPUParams(detect_races=True, num_tma_threads_per_device=COPIES)
    backend = GpuBackend(NAME, interpret=params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._backends, backend.name, backend)
        patch.setattr(thread_map, "_run_jaxpr", _Programs())
        jax.config.update("jax_disable_most_optimizations", True)  # it mostly compiles
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", False)


def forget_races() -> None:
    interpreter.reset_gpu_interpret_mode_state()


def found_races() -> bool:
    return interpreter.get_races().races_found


class _Programs:
    """Stands for the interpreter's own function, which keeps nothing that it compiled."""

    def __init__(self) -> None:
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self._lock = threading.Lock()

    def __call__(self, jaxpr, consts, *args) -> None:
        shapes = jax.tree.map(jax.typeof, (consts, args))
        key = (jaxpr, *jax.tree.leaves(shapes))
        with self._lock:
            if key not in self._compiled:
                run = jax.jit(lambda consts, *args: core.eval_jaxpr(jaxpr, consts, *args))
                self._compiled[key] = run.lower(consts, *args).compile()
        self._compiled[key](consts, *args)
