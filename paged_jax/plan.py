"""From a model, a configuration and a device to the sizes that the engine works with."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from paged_jax.attention import discover_layers
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError
from paged_jax.kv_cache import BlockGroup, group_layers, group_num_blocks, kv_spec
from paged_jax.model_runner import ModelRunner
from paged_jax.models import ServedModel
from paged_jax.progress import Progress
from paged_jax.sharding import make_mesh
from pallas_kernels import KVSpec, choose_backend
from scheduler import Buckets, SchedulerConfig, make_buckets

__all__ = ["Plan", "choose_dtype", "make_plan", "size_runner"]

GIB = 1024**3
DEFAULT_MODEL_LEN = 8192  # of a model that does not say its own
DEFAULT_BATCHED_TOKENS = {"cpu": 256}
ACCELERATOR_BATCHED_TOKENS = 2048
CPU_KV_CACHE_GIB = 2.0
MAX_NUM_CHUNKS = 8  # prompts that a step can prefill at once


@dataclass(frozen=True)
class Plan:
    """Every size but the number of blocks, which the memory decides."""

    max_model_len: int
    max_num_batched_tokens: int
    groups: tuple[BlockGroup, ...]
    layer_slots: tuple[tuple[int, int], ...]
    kv_dtype: jnp.dtype | None  # None: each group's own
    buckets: Buckets
    table_width: int

    def scheduler_config(self, config: EngineConfig, runner: ModelRunner) -> SchedulerConfig:
        num_blocks = tuple(spec.num_blocks for spec in runner.specs)
        return SchedulerConfig(
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_host_blocks=_num_host_blocks(config, runner),
            preemption=config.preemption_mode,
            kv_offload=config.kv_offload,
            prefill=config.prefill,
            batching=config.batching,
            allocation=config.allocation,
            max_model_len=self.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_chunks=MAX_NUM_CHUNKS,
            windows=tuple(group.window for group in self.groups),
            enable_prefix_caching=config.enable_prefix_caching,
        )


def choose_dtype(config: EngineConfig, device: jax.Device) -> str:
    """dtype of the parameters: as configured, else float32 on a CPU and bfloat16 elsewhere."""
    if config.dtype != "auto":
        return config.dtype
    return "float32" if device.platform == "cpu" else "bfloat16"


def make_plan(model: ServedModel, config: EngineConfig, device: jax.Device) -> Plan:
    """Raises ConfigError where the configuration asks for more than the model can do."""
    max_model_len = config.max_model_len or model.max_position or DEFAULT_MODEL_LEN
    if model.max_position is not None and max_model_len > model.max_position:
        raise ConfigError(
            f"{max_model_len=} is more than the model's own limit of {model.max_position} tokens"
        )
    batched = config.max_num_batched_tokens or max(
        config.max_num_seqs,
        DEFAULT_BATCHED_TOKENS.get(device.platform, ACCELERATOR_BATCHED_TOKENS),
    )
    layers = discover_layers(model.apply, model.params, model.num_layers)
    groups, layer_slots = group_layers(layers, max_model_len)
    return Plan(
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
        groups=groups,
        layer_slots=layer_slots,
        kv_dtype=_kv_dtype(config, device),
        buckets=make_buckets(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=batched),
        table_width=-(-max_model_len // config.block_size),
    )


def _kv_dtype(config: EngineConfig, device: jax.Device) -> jnp.dtype | None:
    if config.kv_cache_dtype != "auto":
        return jnp.dtype({"fp8": "float8_e4m3fn"}.get(config.kv_cache_dtype, config.kv_cache_dtype))
    # XLA's CPU scatters into a bfloat16 array by converting all of it.
    return jnp.dtype("float32") if device.platform == "cpu" else None


def size_runner(
    model: ServedModel,
    plan: Plan,
    config: EngineConfig,
    device: jax.Device,
    progress: Progress,
) -> ModelRunner:
    """A runner with as many blocks as configured, or as the memory allows; says the sum.

    On an accelerator the largest programs are compiled first: their temporaries, as the
    compiler gives them, are not available to the pool.
    """

    def specs_of(num_blocks: int) -> list[KVSpec]:
        counts = group_num_blocks(
            plan.groups,
            num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
        )
        return [
            kv_spec(
                group,
                num_blocks=count,
                block_size=config.block_size,
                dtype=plan.kv_dtype or group.dtype,
            )
            for group, count in zip(plan.groups, counts, strict=True)
        ]

    most = config.max_num_seqs * plan.table_width + 1
    backend, reason = choose_backend(
        config.attention_backend, device.device_kind, specs_of(config.num_blocks or most)
    )
    progress.say(f"attention back end {reason}")

    def build(num_blocks: int) -> ModelRunner:
        return ModelRunner(
            model,
            mesh=make_mesh(device),
            backend=backend,
            layer_slots=plan.layer_slots,
            specs=specs_of(num_blocks),
            buckets=plan.buckets,
            table_width=plan.table_width,
            max_num_seqs=config.max_num_seqs,
            max_num_chunks=MAX_NUM_CHUNKS,
            swaps=_uses_host(config),
            patient=config.warmup == "lazy",
            capture_layers=config.capture_layers,
            steering_layers=config.steering_layers,
        )

    if config.num_blocks is not None:
        return build(config.num_blocks)
    runner = build(most)
    block_bytes = runner.num_block_bytes
    temporary_bytes = 0
    if config.kv_cache_memory is None and device.memory_stats() is not None:
        temporary_bytes = max(map(runner.num_temporary_bytes, runner.largest_programs()))
    kv_bytes = _kv_bytes(config, device) - temporary_bytes
    num_blocks = min(most, kv_bytes // block_bytes)
    if num_blocks < 2:
        raise ConfigError(
            f"no room for a KV cache: {kv_bytes / GIB:.2f} GiB are left for it and one block "
            f"takes {block_bytes / GIB:.4f}. Raise kv_cache_memory or memory_utilization, or "
            "choose a smaller dtype or max_num_batched_tokens"
        )
    progress.say(
        f"memory: weights {runner.num_weight_bytes / GIB:.2f} GiB, KV cache "
        f"{num_blocks * block_bytes / GIB:.2f} GiB ({num_blocks - 1} blocks of "
        f"{config.block_size} tokens)"
        + (f", temporaries {temporary_bytes / GIB:.2f} GiB" if temporary_bytes else "")
    )
    return runner if num_blocks == most else build(int(num_blocks))


def _uses_host(config: EngineConfig) -> bool:
    return config.kv_offload or config.preemption_mode == "swap"


def _num_host_blocks(config: EngineConfig, runner: ModelRunner) -> tuple[int, ...]:
    """Blocks of each group in host memory, the null block included; none if nothing goes there."""
    if not _uses_host(config):
        return ()
    num_blocks = int(config.swap_space * GIB) // runner.num_block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"swap_space={config.swap_space} GiB holds no block: one takes "
            f"{runner.num_block_bytes / GIB:.4f} GiB"
        )
    return (num_blocks + 1,) * len(runner.specs)


def _kv_bytes(config: EngineConfig, device: jax.Device) -> int:
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
