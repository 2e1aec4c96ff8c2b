"""From a model, a configuration and a device to the sizes that the engine works with."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paged_jax.attention import LayerSpec, discover_layers
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError
from paged_jax.kv_cache import BlockGroup, group_layers, group_num_blocks, kv_spec
from paged_jax.kv_memory import measure_memory, num_host_blocks, uses_host
from paged_jax.model_runner import ModelRunner
from paged_jax.models import ServedModel
from paged_jax.progress import Progress
from paged_jax.tensor_parallel import describe_mesh, layers_a_device
from pallas_kernels import Backend, KVSpec, choose_backend
from scheduler import Buckets, SchedulerConfig, make_buckets

__all__ = ["Plan", "choose_dtype", "make_plan", "size_runner"]

DEFAULT_MODEL_LEN = 8192  # of a model that does not say its own
DEFAULT_BATCHED_TOKENS = {"cpu": 256}
ACCELERATOR_BATCHED_TOKENS = 2048
MAX_NUM_CHUNKS = 8  # prompts that a step can prefill at once


@dataclass(frozen=True)
class Plan:
    """Every size but the number of blocks, which the memory decides. Layers and groups are what
    each device holds of them."""

    max_model_len: int
    max_num_batched_tokens: int
    layers: tuple[LayerSpec, ...]
    groups: tuple[BlockGroup, ...]
    layer_slots: tuple[tuple[int, int], ...]
    kv_dtype: jnp.dtype | None  # None: each group's own
    buckets: Buckets
    table_width: int

    def specs(self, config: EngineConfig, num_blocks: int) -> list[KVSpec]:
        """The pool of each group, where full attention has so many blocks."""
        counts = group_num_blocks(
            self.groups,
            num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )
        return [
            kv_spec(
                group,
                num_blocks=count,
                block_size=config.block_size,
                dtype=self.kv_dtype or group.dtype,
            )
            for group, count in zip(self.groups, counts, strict=True)
        ]

    def scheduler_config(self, config: EngineConfig, runner: ModelRunner) -> SchedulerConfig:
        num_blocks = tuple(spec.num_blocks for spec in runner.specs)
        return SchedulerConfig(
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks(config, runner),
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


def make_plan(model: ServedModel, config: EngineConfig, mesh: Mesh) -> Plan:
    """Raises ConfigError where the configuration asks for more than the model can do."""
    device = mesh.devices.flat[0]
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
    layers = layers_a_device(layers, mesh)
    groups, layer_slots = group_layers(layers, max_model_len)
    return Plan(
        max_model_len=max_model_len,
        max_num_batched_tokens=batched,
        layers=layers,
        groups=groups,
        layer_slots=layer_slots,
        kv_dtype=_kv_dtype(config, device),
        buckets=make_buckets(max_num_seqs=config.max_num_seqs, max_num_batched_tokens=batched),
        table_width=-(-max_model_len // config.block_size),
    )


def _kv_dtype(config: EngineConfig, device: jax.Device) -> jnp.dtype | None:
    if config.kv_cache_dtype != "auto":
        name = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(config.kv_cache_dtype)
        return jnp.dtype(name or config.kv_cache_dtype)
    # XLA's CPU scatters into a bfloat16 array by converting all of it.
    return jnp.dtype("float32") if device.platform == "cpu" else None


def size_runner(
    model: ServedModel,
    plan: Plan,
    config: EngineConfig,
    mesh: Mesh,
    progress: Progress,
) -> ModelRunner:
    """A runner with as many blocks as configured, or as the memory allows; says the sum."""
    for line in describe_mesh(model, plan.layers, mesh):
        progress.say(line)
    most = config.max_num_seqs * plan.table_width + 1
    specs = plan.specs(config, config.num_blocks or most)
    backend, reason = choose_backend(
        config.attention_backend, mesh.devices.flat[0].device_kind, specs
    )
    progress.say(f"attention back end {reason}")
    runner = _make_runner(model, plan, config, mesh, backend, specs)
    if config.num_blocks is not None:
        return runner
    memory = measure_memory(runner, config)
    num_blocks = memory.num_blocks(most)
    progress.say(memory.describe(num_blocks, config.block_size))
    if num_blocks == most:
        return runner
    return _make_runner(model, plan, config, mesh, backend, plan.specs(config, num_blocks))


def _make_runner(
    model: ServedModel,
    plan: Plan,
    config: EngineConfig,
    mesh: Mesh,
    backend: Backend,
    specs: Sequence[KVSpec],
) -> ModelRunner:
    return ModelRunner(
        model,
        mesh=mesh,
        backend=backend,
        layer_slots=plan.layer_slots,
        specs=specs,
        buckets=plan.buckets,
        table_width=plan.table_width,
        max_num_seqs=config.max_num_seqs,
        max_num_chunks=MAX_NUM_CHUNKS,
        swaps=uses_host(config),
        patient=config.warmup == "lazy",
        capture_layers=config.capture_layers,
        steering_layers=config.steering_layers,
    )
