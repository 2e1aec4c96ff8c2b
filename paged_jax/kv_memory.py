"""How much memory is left for the KV cache, and how many blocks that is."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError
from paged_jax.model_runner import ModelRunner

__all__ = ["KVMemory", "measure_memory", "num_host_blocks", "uses_host"]

GIB = 1024**3
CPU_KV_CACHE_GIB = 2.0


@dataclass(frozen=True)
class KVMemory:
    """What each device's memory is divided into, in bytes; `block_bytes` are of every group."""

    kv_bytes: int
    block_bytes: int
    weight_bytes: int
    temporary_bytes: int
    num_devices: int

    def num_blocks(self, most: int) -> int:
        """Blocks that there is room for, but no more than `most`. ConfigError if there is none."""
        num_blocks = min(most, self.kv_bytes // self.block_bytes)
        if num_blocks < 2:
            raise ConfigError(
                f"no room for a KV cache: {self.kv_bytes / GIB:.2f} GiB are left for it and one "
                f"block takes {self.block_bytes / GIB:.4f}. Raise kv_cache_memory or "
                "memory_utilization, or choose a smaller dtype or max_num_batched_tokens"
            )
        return num_blocks

    def describe(self, num_blocks: int, block_size: int) -> str:
        temporaries = f", temporaries {self.temporary_bytes / GIB:.2f} GiB"
        devices = f", on each of {self.num_devices} devices"
        return (
            f"memory: weights {self.weight_bytes / GIB:.2f} GiB, KV cache "
            f"{num_blocks * self.block_bytes / GIB:.2f} GiB ({num_blocks - 1} blocks of "
            f"{block_size} tokens)"
            + (temporaries if self.temporary_bytes else "")
            + (devices if self.num_devices > 1 else "")
        )


def measure_memory(runner: ModelRunner, config: EngineConfig) -> KVMemory:
    """On an accelerator the largest programs are compiled for it: their temporaries, as the
    compiler gives them, are not available to the pool."""
    temporary_bytes = 0
    if config.kv_cache_memory is None and runner.devices[0].memory_stats() is not None:
        temporary_bytes = max(map(runner.num_temporary_bytes, runner.largest_programs()))
    return KVMemory(
        kv_bytes=_usable_bytes(config, runner.devices) - temporary_bytes,
        block_bytes=runner.num_block_bytes,
        weight_bytes=runner.num_weight_bytes,
        temporary_bytes=temporary_bytes,
        num_devices=len(runner.devices),
    )


def _usable_bytes(config: EngineConfig, devices: Sequence[jax.Device]) -> int:
    """Bytes that pool and temporaries may take together, on each device."""
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    memories = [device.memory_stats() for device in devices]
    if memories[0] is None:  # a CPU's devices share what there is
        return int(min(CPU_KV_CACHE_GIB * GIB, _available_bytes() // 2)) // len(devices)
    return min(
        int(memory["bytes_limit"] * config.memory_utilization) - memory["bytes_in_use"]
        for memory in memories
    )


def _available_bytes() -> int:
    """Memory that this machine could give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return int(CPU_KV_CACHE_GIB * GIB)


def uses_host(config: EngineConfig) -> bool:
    """Whether blocks go to host memory."""
    return config.kv_offload or config.preemption_mode == "swap"


def num_host_blocks(config: EngineConfig, runner: ModelRunner) -> tuple[int, ...]:
    """Blocks of each group in host memory, the null block included; none if nothing goes there."""
    if not uses_host(config):
        return ()
    block_bytes = runner.num_block_bytes * len(runner.devices)  # each has its part there
    num_blocks = int(config.swap_space * GIB) // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space={config.swap_space} GiB holds no block: one takes "
            f"{block_bytes / GIB:.4f} GiB"
        )
    return (num_blocks + 1,) * len(runner.specs)
