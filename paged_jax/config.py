"""The engine's configuration: one frozen value, made at the entry point and never patched.

Its fields are the keywords of `LLM(...)` and `Engine.from_nnx(...)` and the flags of the command
line.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paged_jax.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
WARMUPS = ("none", "lazy", "full")
DEVICES = ("auto", "cpu", "gpu", "tpu")

MODEL, CACHE, BATCH, DEVICE = "Model", "KV cache", "Batching", "Device and compilation"
LORA = "LoRA adapters"


def _option(default: Any, group: str, doc: str, **extra: Any) -> Any:
    return field(default=default, metadata={"group": group, "doc": doc, **extra})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that can be chosen about an engine. A bad value raises `ConfigError`.

    `None` means: decided from the model and the device, and shown at start.
    """

    model: str = field(metadata={"group": MODEL, "doc": "alias, Hugging Face id, folder or .gguf"})
    served_model_name: str | None = _option(
        None, MODEL, "name in the API (default: the model's own)"
    )
    dtype: str = _option(
        "auto",
        MODEL,
        "of weights and activations; auto is float32 on CPU, bfloat16 elsewhere",
        choices=DTYPES,
    )
    max_model_len: int | None = _option(
        None, MODEL, "longest sequence, prompt and output together, in tokens"
    )
    generation_config: str = _option(
        "auto",
        MODEL,
        "what sampling fields mean that a request leaves out: what the model's authors recommend, "
        "shown at start, or nothing special (none)",
        choices=("auto", "none"),
    )
    skip_tokenizer_init: bool = _option(False, MODEL, "serve token ids only")
    seed: int = _option(0, MODEL, "of requests that bring no seed")
    quantization: str | None = _option(
        None,
        MODEL,
        "keep the weights of layers, experts and head in few bits, rounded to nearest",
        choices=(None, "int8", "int4", "fp8"),
    )

    enable_lora: bool = _option(False, LORA, "take requests with LoRA adapters")
    max_loras: int = _option(4, LORA, "adapters that can be loaded at the same time")
    max_lora_rank: int = _option(16, LORA, "the largest rank that an adapter may have")
    lora_dir: str | None = _option(
        None, LORA, "folder of adapters as PEFT saves them; those in it are loaded at start"
    )
    capture_layers: tuple[int, ...] = _option(
        (), MODEL, "layers whose hidden states Engine.capture gives"
    )
    steering_layers: tuple[int, ...] = _option(
        (), MODEL, "layers behind which a request may add a vector of its own"
    )

    block_size: int = _option(16, CACHE, "tokens in a KV block")
    num_blocks: int | None = _option(None, CACHE, "KV blocks in the pool, the null block included")
    kv_cache_memory: float | None = _option(
        None, CACHE, "GiB for the KV cache on each device (default: what memory allows; 2 on a CPU)"
    )
    kv_cache_dtype: str = _option(
        "auto",
        CACHE,
        "of the KV cache; int8, fp8 (e4m3) and fp8_e5m2 have a scale for each token and head; auto "
        "is float32 on CPU, the model's own elsewhere",
        choices=("auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e5m2"),
    )
    memory_utilization: float = _option(
        0.9, CACHE, "share of an accelerator's memory that may be used"
    )
    enable_prefix_caching: bool = _option(True, CACHE, "reuse the blocks of equal prefixes")
    allocation: str = _option(
        "paged",
        CACHE,
        "blocks on demand, or (to compare) reserved for max_model_len when a sequence starts",
        choices=("paged", "reserved"),
    )
    preemption_mode: str = _option(
        "recompute",
        CACHE,
        "when blocks run out, compute a sequence again later or swap it to host memory",
        choices=("recompute", "swap"),
    )
    kv_offload: bool = _option(
        False, CACHE, "keep cached blocks that are evicted in host memory, for later hits"
    )
    swap_space: float = _option(
        4.0, CACHE, "GiB of host memory for preemption_mode=swap and kv_offload"
    )

    max_num_seqs: int = _option(16, BATCH, "sequences that run at the same time")
    max_num_batched_tokens: int | None = _option(
        None, BATCH, "tokens computed in a step (default: 256 on CPU, 2048 elsewhere)"
    )
    scheduling_policy: str = _option(
        "fcfs",
        BATCH,
        "who is served first: order of arrival, the request's priority, shortest prompt, or "
        "fair shares of tenants",
        choices=("fcfs", "priority", "shortest", "fair"),
    )
    prefill: str = _option(
        "mixed",
        BATCH,
        "prefill in the same steps as decodes, or in dedicated ones",
        choices=("mixed", "dedicated"),
    )
    batching: str = _option(
        "continuous",
        BATCH,
        "change the batch at every step, or (to compare) run a static one to its longest member",
        choices=("continuous", "static"),
    )
    overlap: bool = _option(True, BATCH, "schedule the next step while the device runs this one")

    step_log: str | None = _option(
        None, BATCH, "file that every step is written to, to be replayed; prompts are in it"
    )

    device: str = _option("auto", DEVICE, "where to run", choices=DEVICES)
    tensor_parallel_size: int = _option(
        1, DEVICE, "devices that run one model together, its weights and KV heads cut over them"
    )
    attention_backend: str = _option("auto", DEVICE, "implementation of paged attention")
    warmup: str = _option(
        "lazy",
        DEVICE,
        "compile and run every program at start (full), or compile each when a step first needs it "
        "(none); lazy makes do with a larger one until compiling pays",
        choices=WARMUPS,
    )
    late_compile: bool = _option(
        True,
        DEVICE,
        "compile in service what the warm-up left out (which it counts and logs) rather than stop "
        "with an error; --no-late-compile needs --warmup full",
    )
    compilation_cache_dir: str | None = _option(
        None, DEVICE, "where compiled programs are kept (default: in the user's cache)"
    )

    def __post_init__(self):
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model must name a model, got {self.model!r}")
        for f in dataclasses.fields(self):
            choices = f.metadata.get("choices")
            value = getattr(self, f.name)
            if choices and value not in choices:
                raise ConfigError(
                    f"{f.name} must be one of {', '.join(map(str, choices))}; got {value!r}"
                )
        counts = ("block_size", "max_num_seqs", "max_loras", "max_lora_rank")
        for name in (*counts, "tensor_parallel_size"):
            self._require_int(name, 1)
        for name, low in (("max_model_len", 2), ("num_blocks", 2), ("max_num_batched_tokens", 1)):
            if getattr(self, name) is not None:
                self._require_int(name, low)
        tokens = self.max_num_batched_tokens
        if tokens is not None and tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} must be at least max_num_seqs="
                f"{self.max_num_seqs}: every running sequence takes one token a step"
            )
        if self.kv_cache_memory is not None and self.kv_cache_memory <= 0:
            raise ConfigError(f"kv_cache_memory must be above 0 GiB, got {self.kv_cache_memory}")
        if self.swap_space <= 0:
            raise ConfigError(f"swap_space must be above 0 GiB, got {self.swap_space}")
        if self.kv_offload and not self.enable_prefix_caching:
            raise ConfigError("kv_offload keeps cached prefixes: it needs enable_prefix_caching")
        for name in ("capture_layers", "steering_layers"):
            self._require_layers(name)
        if not self.late_compile and self.warmup != "full":
            raise ConfigError(
                f"late_compile=False needs warmup='full', got {self.warmup!r}: otherwise programs "
                "are compiled when they are first needed"
            )
        if self.lora_dir is not None and not self.enable_lora:
            raise ConfigError("lora_dir holds LoRA adapters: it needs enable_lora")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"memory_utilization must be above 0 and at most 1, got {self.memory_utilization}"
            )

    def _require_int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")

    def _require_layers(self, name: str) -> None:
        value = getattr(self, name)
        layers = value if isinstance(value, tuple | list) else (None,)
        is_int = all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in layers)
        if not is_int or len(set(layers)) < len(layers):
            raise ConfigError(f"{name} must be different layer numbers, got {value!r}")
        object.__setattr__(self, name, tuple(layers))


def config_of(
    config: EngineConfig | None, options: Mapping[str, Any], *, model: str
) -> EngineConfig:
    """The configuration given whole, or made of its fields; `model` is the name it has otherwise.

    Raises ConfigError if both are given.
    """
    if config is None:
        return EngineConfig(**({"model": model} | dict(options)))
    if options:
        raise ConfigError(f"give a config or its fields, not both: {', '.join(sorted(options))}")
    return config
