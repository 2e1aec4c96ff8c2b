"""How much memory is left for the KV cache, and how many blocks that is."""

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
    """What the device's memory is divided into, in bytes; `block_bytes` are of every group."""

    kv_bytes: int
    block_bytes: int
    weight_bytes: int
    temporary_bytes: int

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
        return (
            f"memory: weights {self.weight_bytes / GIB:.2f} GiB, KV cache "
            f"{num_blocks * self.block_bytes / GIB:.2f} GiB ({num_blocks - 1} blocks of "
            f"{block_size} tokens)" + (temporaries if self.temporary_bytes else "")
        )


def measure_memory(runner: ModelRunner, config: EngineConfig, device: jax.Device) -> KVMemory:
    """On an accelerator the largest programs are compiled for it: their temporaries, as the
    compiler gives them, are not available to the pool."""
    temporary_bytes = 0
    if config.kv_cache_memory is None and device.memory_stats() is not None:
        temporary_bytes = max(map(runner.num_temporary_bytes, runner.largest_programs()))
    return KVMemory(
        kv_bytes=_usable_bytes(config, device) - temporary_bytes,
        block_bytes=runner.num_block_bytes,
        weight_bytes=runner.num_weight_bytes,
        temporary_bytes=temporary_bytes,
    )


def _usable_bytes(config: EngineConfig, device: jax.Device) -> int:
    """Bytes that pool and temporaries may take together."""
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB)
    memory = device.memory_stats()
    if memory is None:
        return int(min(CPU_KV_CACHE_GIB * GIB, _available_bytes() // 2))
    return int(memory["bytes_limit"] * config.memory_utilization) - memory["bytes_in_use"]


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
    num_blocks = int(config.swap_space * GIB) // runner.num_block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space={config.swap_space} GiB holds no block: one takes "
            f"{runner.num_block_bytes / GIB:.4f} GiB"
        )
    return (num_blocks + 1,) * len(runner.specs)
