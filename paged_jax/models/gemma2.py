"""Gemma 2: capped scores, norms on both sides, windows in every other layer."""

from typing import Any

from paged_jax.layers import ACTIVATIONS
from paged_jax.models.config_fields import (
    Config,
    flag,
    layer_windows,
    only,
    optional_float,
    optional_int,
    positive_float,
    positive_int,
    text,
)
from paged_jax.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    MLPConfig,
    read_decoder,
    read_heads,
)
from paged_jax.rope import Rope

__all__ = ["parse", "read_attention", "read_gemma"]

DEFAULTS = {  # published files leave out what equals these
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    config = {**DEFAULTS, **config}
    attention = read_attention(config, softcap=optional_float(config, "attn_logit_softcapping", 50))
    count = positive_int(config, "num_hidden_layers")
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    return read_gemma(
        config,
        attention=attention,
        ropes=Rope.from_hf(config, head_size=attention.head_size),
        windows=layer_windows(config, optional_int(config, "sliding_window", 4096), kinds),
        max_position=8192,
        logits_softcap=optional_float(config, "final_logit_softcapping", 30),
    )


def read_gemma(config: Config, **parts: Any) -> DecoderConfig:
    """`read_decoder` with what every Gemma has: norms on both sides with weights that begin at
    zero, embeddings that are scaled and are the head as well, and its MLP."""
    return read_decoder(
        config,
        mlps=_read_mlp(config),
        tied=True,
        norms="both",
        norm_offset=1.0,
        embedding_scale=positive_int(config, "hidden_size") ** 0.5,
        **parts,
    )


def read_attention(config: Config, *, softcap: float | None, norm: str = "none") -> AttentionConfig:
    """Scores are scaled by a number of the config's own, not by the head's size."""
    only(config, "use_bidirectional_attention", None, False)
    bias = flag(config, "attention_bias", False)
    return AttentionConfig(
        *read_heads(config, kv_heads=4, head_size=256),
        bias=bias,
        out_bias=bias,
        norm=norm,
        scale=positive_float(config, "query_pre_attn_scalar", 256) ** -0.5,
        softcap=softcap,
    )


def _read_mlp(config: Config) -> MLPConfig:
    """`hidden_act` of early files is not what the models were trained with, and is not read."""
    activation = text(config, "hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
    return MLPConfig(positive_int(config, "intermediate_size"), activation)
