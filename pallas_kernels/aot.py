"""Compiling for accelerators that are not there, with the compilers that will be used on them.

A development tool: it needs `libtpu` (the `dev` extra on Linux x86-64), which is loaded when the
first target is made. Nothing runs; what a compiled program says of its memory is real.
"""

import importlib.util
import os
import platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

# Read by libtpu when it is loaded: no look-ups on the network, no lock on the one TPU, no log.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TPU_TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}


class Compiled(NamedTuple):
    """A program for a device that is not there."""

    program: jax.stages.Compiled
    lower_s: float
    compile_s: float

    @property
    def temporary_bytes(self) -> int:
        return self.program.memory_analysis().temp_size_in_bytes

    @property
    def alias_bytes(self) -> int:
        """Of arguments whose memory the results take over."""
        return self.program.memory_analysis().alias_size_in_bytes


def why_no_tpu_compiler() -> str | None:
    """What is missing to compile for TPUs here, or None."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"libtpu exists for Linux x86-64 only, this is {platform.system()}"
    if importlib.util.find_spec("libtpu") is None:
        return 'libtpu is not installed: pip install "jax[tpu]"'
    return None


def tpu_devices(chip: str) -> tuple[jax.Device, ...]:
    """The four of a host of that kind, to compile for; `chip` is a key of `TPU_TOPOLOGIES`."""
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TPU_TOPOLOGIES[chip])
    return tuple(topology.devices)


def tpu_device(chip: str) -> jax.Device:
    """One of them."""
    return tpu_devices(chip)[0]


def compile_for(device: jax.Device, function: Callable, *args: Any, **jit_options) -> Compiled:
    """Compiles a function of arrays, given their shapes (`jax.ShapeDtypeStruct`), for a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), args)
    started = time.perf_counter()
    with jax.default_device(device):  # lowering asks it what it compiles for
        lowered = jax.jit(function, **jit_options).lower(*args)
        lowered_at = time.perf_counter()
        program = lowered.compile()
    return Compiled(program, lowered_at - started, time.perf_counter() - lowered_at)
