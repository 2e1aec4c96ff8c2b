"""Compiling for GPUs that are not there, with XLA's own compiler and NVIDIA's assembler (ptxas).

A development tool. It needs the CUDA plug-in of JAX and NVIDIA's assembler from the package index
(`jax[cuda13-local]`, `nvidia-cuda-nvcc`; the `dev` extra has both), but neither a GPU nor a driver.
`JAX_PLATFORMS` must be `cpu` before JAX is imported: the plug-in is loaded by name, not started.
"""

import contextlib
import importlib.util
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from pallas_kernels.aot import Compiled, compile_for
from pallas_kernels.roofline import CHIPS

KIB, MIB = 2**10, 2**20


class GpuTarget(NamedTuple):
    """What the compiler asks of a GPU: NVIDIA's CUDA C++ programming guide, compute capabilities,
    and the chips' data sheets."""

    capability: tuple[int, int]
    name: str
    num_sms: int
    smem_per_sm_kib: int  # of which a block may take all but 1 KiB
    l2_mib: int


TARGETS = {
    "a100": GpuTarget((8, 0), "NVIDIA A100-SXM4-80GB", 108, 164, 40),
    "l4": GpuTarget((8, 9), "NVIDIA L4", 58, 100, 48),
    "h100": GpuTarget((9, 0), "NVIDIA H100 80GB HBM3", 132, 228, 50),
    "h200": GpuTarget((9, 0), "NVIDIA H200", 132, 228, 50),
    "b200": GpuTarget((10, 0), "NVIDIA B200", 148, 228, 126),
}


class Assembled(NamedTuple):
    """One Mosaic kernel: what was given to the assembler, and what it says."""

    architecture: str
    registers: int  # a thread
    spill_bytes: int  # stores and loads
    stack_bytes: int
    # Its matrix instructions, as `m64n64k16.f32.bf16.bf16 1, 1, 0, 0`: shape and types, and behind
    # them the signs of the operands, and whether each that lies in shared memory is transposed.
    wgmmas: tuple[str, ...]


def why_no_gpu_compiler() -> str | None:
    """What is missing to compile for GPUs here, or None."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"the CUDA plug-in is locked for Linux x86-64 only, this is {platform.system()}"
    for module, package in (
        ("jax_cuda13_plugin", "jax[cuda13-local]"),
        ("nvidia.cu13", "nvidia-cuda-nvcc"),
    ):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f'{package} is not installed: pip install "{package}"'
    if jax.config.jax_platforms != "cpu":
        return "JAX_PLATFORMS must be cpu before JAX is imported"
    return None


def gpu_device(chip: str) -> jax.Device:
    """A device of that kind to compile for; `chip` is a key of `TARGETS`."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=chip, target_config=_config(chip), topology="1x1x1"
    )
    return topology.devices[0]


def compile_for_gpu(
    chip: str, function: Callable, *args: Any, **jit_options
) -> tuple[Compiled, tuple[Assembled, ...]]:
    """`aot.compile_for` a GPU, and what ptxas said of each of our kernels in the program."""
    with _assembler_log() as folder:
        compiled = compile_for(gpu_device(chip), function, *args, **jit_options)
        kernels = tuple(_read(path) for path in sorted(folder.glob("*.ptxas")))
    return compiled, kernels


@contextlib.contextmanager
def _assembler_log() -> Iterator[Path]:
    """Lets Mosaic GPU, which reads these when it compiles, write down what ptxas gets and says."""
    with tempfile.TemporaryDirectory(prefix="aot-gpu-") as folder:
        ours = {
            "MOSAIC_GPU_DUMP_PTX": "1",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_TO": folder,
        }
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _read(path: Path) -> Assembled:
    text = path.read_text()

    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, text))

    return Assembled(
        architecture=re.findall(r"for '(sm_\w+)'", text)[0],
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        wgmmas=tuple(
            f"{kind} {flags}"
            for kind, flags in _WGMMA.findall(path.with_suffix(".ptx").read_text())
        ),
    )


# Inline assembly: `p` is the predicate that says to add, set to 1 (true) before it.
_WGMMA = re.compile(
    r"setp\.ne\.b32 p, 1, 0; wgmma\.mma_async\.sync\.aligned\.(\S+) .*, p, ([-01, ]+);"
)


def _config(chip: str) -> str:
    """XLA's `GpuTargetConfigProto` in text."""
    target, speed = TARGETS[chip], CHIPS[chip]
    major, minor = target.capability
    smem = target.smem_per_sm_kib * KIB
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": smem,
        "shared_memory_per_block_optin": smem - KIB,
        "threads_per_core_limit": 1536 if target.capability == (8, 9) else 2048,
        "core_count": target.num_sms,
        "fpus_per_core": 64 if target.capability == (8, 0) else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(speed.bytes_per_s),
        "l2_cache_size": target.l2_mib * MIB,
        "clock_rate_ghz": 1.7,
        "device_memory_size": speed.memory_gib * 2**30,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    return (
        f"gpu_device_info {{ {info}"
        f" cuda_compute_capability {{ major: {major} minor: {minor} }} }}\n"
        f'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: 9 minor: 12 }}\n"
        f'device_description_str: "{target.name}"\n'
    )
