"""Mistral: Llama whose every layer looks back a window only, in the releases that have one."""

from paged_jax.models.config_fields import Config, optional_int
from paged_jax.models.decoder_config import AttentionConfig, DecoderConfig, read_decoder, read_heads
from paged_jax.rope import Rope

__all__ = ["parse"]


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config, kv_heads=8)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        windows=optional_int(config, "sliding_window", 4096),
        max_position=131072,
    )
