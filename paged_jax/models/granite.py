"""Granite: Llama with four multipliers of its own."""

from paged_jax.models.config_fields import Config, flag, positive_float
from paged_jax.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    read_decoder,
    read_heads,
    read_mlp,
)
from paged_jax.rope import Rope

__all__ = ["parse"]


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config)
    bias = flag(config, "attention_bias", False)
    scale = positive_float(config, "attention_multiplier", 1.0)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias, scale=scale),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        mlps=read_mlp(config, biased=True),
        embedding_scale=positive_float(config, "embedding_multiplier", 1.0),
        residual_scale=positive_float(config, "residual_multiplier", 1.0),
        logits_divisor=positive_float(config, "logits_scaling", 1.0),
    )
