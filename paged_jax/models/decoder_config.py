"""What the decoders of the Llama lineage are made of, as frozen values."""

import dataclasses
from collections.abc import Sequence

from paged_jax.errors import ModelLoadError
from paged_jax.layers import ACTIVATIONS
from paged_jax.models.config_fields import (
    Config,
    flag,
    only,
    positive_float,
    positive_int,
    text,
)
from paged_jax.rope import Rope

__all__ = [
    "AttentionConfig",
    "DecoderConfig",
    "ExpertsConfig",
    "LayerConfig",
    "MLPConfig",
    "read_decoder",
    "read_head_size",
    "read_heads",
]


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """The attention that all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    bias: bool = False  # of q, k and v
    out_bias: bool = False
    norm: str = "none"  # of q and k: "none", each "head" by itself, the whole "projection"
    scale: float | None = None  # None: head_size ** -0.5
    softcap: float | None = None
    sinks: bool = False


@dataclasses.dataclass(frozen=True)
class MLPConfig:
    """A gated MLP."""

    inner_size: int
    activation: str = "silu"
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of gated MLPs, of which the router chooses some for each token."""

    num_experts: int
    num_chosen: int
    inner_size: int
    activation: str = "silu"
    router: str = "gate"  # the name of the router in the layer
    softmax: str = "all"  # over "all" experts, "chosen" ones, or "all, normed" over the chosen
    bias: bool = False  # of the router and of every expert
    clamp: tuple[float, float] | None = None  # (limit, alpha): gpt-oss's clipped SwiGLU


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: Rope | None  # None: no positions (NoPE)
    window: int | None
    mlp: MLPConfig | ExpertsConfig


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The sizes and switches of one model."""

    vocab_size: int
    hidden_size: int
    max_position: int
    rms_norm_eps: float
    attention: AttentionConfig
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = False
    norms: str = "pre"  # around attention and MLP: "pre", "post", or "both"
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logits_divisor: float | None = None
    logits_softcap: float | None = None

    def for_context(self, context_len: int) -> "DecoderConfig":
        """The model where no sequence is longer than `context_len` tokens."""
        layers = tuple(
            dataclasses.replace(layer, rope=layer.rope and layer.rope.for_context(context_len))
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers)


def read_decoder(
    config: Config,
    *,
    attention: AttentionConfig,
    ropes: Rope | Sequence[Rope | None],
    windows: int | Sequence[int | None] | None = None,
    mlps: MLPConfig | ExpertsConfig | Sequence[MLPConfig | ExpertsConfig] | None = None,
    tied: bool = False,
    eps: float = 1e-6,
    max_position: int = 2048,
    **fields: object,
) -> DecoderConfig:
    """What a config.json says about a decoder of which the family knows the rest.

    `ropes`, `windows` and `mlps` are one for all layers or one for each; `tied`, `eps` and
    `max_position` are what the family takes where the config is silent; `fields` are more of
    DecoderConfig's. Raises ModelLoadError, naming the key, for what is not supported.
    """
    only(config, "quantization_config", None)
    count = positive_int(config, "num_hidden_layers")
    mlps = read_mlp(config) if mlps is None else mlps
    each = [
        [part] * count if part is None or not isinstance(part, Sequence) else list(part)
        for part in (ropes, windows, mlps)
    ]
    return DecoderConfig(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=positive_int(config, "hidden_size"),
        max_position=positive_int(config, "max_position_embeddings", max_position),
        rms_norm_eps=positive_float(config, "rms_norm_eps", eps),
        attention=attention,
        layers=tuple(LayerConfig(*parts) for parts in zip(*each, strict=True)),
        tie_word_embeddings=flag(config, "tie_word_embeddings", tied),
        **fields,  # type: ignore[arg-type]
    )


def read_mlp(config: Config, *, biased: bool = False, key: str = "intermediate_size") -> MLPConfig:
    """The gated MLP of a layer; with `biased` the config may give it biases."""
    return MLPConfig(
        positive_int(config, key),
        text(config, "hidden_act", "silu", ACTIVATIONS),
        biased and flag(config, "mlp_bias", False),
    )


def read_heads(
    config: Config, *, kv_heads: int | None = None, head_size: int | None = None
) -> tuple[int, int, int]:
    """(query heads, KV heads, head size); the arguments are used where the config lacks a key.

    A null `num_key_value_heads` means one for each query head.
    """
    num_heads = positive_int(config, "num_attention_heads")
    silent = kv_heads or num_heads if "num_key_value_heads" not in config else num_heads
    num_kv_heads = positive_int(config, "num_key_value_heads", silent)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads={num_heads} must be a multiple of "
            f"num_key_value_heads={num_kv_heads}"
        )
    return num_heads, num_kv_heads, read_head_size(config, num_heads, head_size)


def read_head_size(config: Config, num_heads: int, default: int | None = None) -> int:
    """`head_dim`, or the family's default where it is absent, or a head's share of the width."""
    hidden_size = positive_int(config, "hidden_size")
    if "head_dim" not in config and default is not None:
        return default
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ModelLoadError(
            f"config.json: {hidden_size=} must be a multiple of "
            f"num_attention_heads={num_heads}, or head_dim be given"
        )
    return positive_int(config, "head_dim", hidden_size // num_heads)
