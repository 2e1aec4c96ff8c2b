"""The Llama family: grouped queries, rotary positions, RMS norms and gated MLPs."""

from paged_jax.models.config_fields import Config, flag
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
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        mlps=read_mlp(config, biased=True),
    )
