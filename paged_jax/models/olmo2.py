"""OLMo 2: norms after attention and MLP instead of before, and over all of q and of k."""

from paged_jax.models.config_fields import Config, flag
from paged_jax.models.decoder_config import AttentionConfig, DecoderConfig, read_decoder, read_heads
from paged_jax.rope import Rope

__all__ = ["parse"]


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config)
    bias = flag(config, "attention_bias", False)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias, norm="projection"),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        eps=1e-5,
        norms="post",
    )
