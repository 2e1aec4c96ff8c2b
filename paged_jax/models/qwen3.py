"""Qwen 3: every head of q and k is normed before it is turned."""

from paged_jax.models.config_fields import Config, flag
from paged_jax.models.decoder_config import AttentionConfig, DecoderConfig, read_decoder, read_heads
from paged_jax.models.qwen2 import windows
from paged_jax.rope import Rope

__all__ = ["parse"]


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config, kv_heads=32, head_size=128)
    bias = flag(config, "attention_bias", False)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias, norm="head"),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        windows=windows(config),
        max_position=32768,
    )
