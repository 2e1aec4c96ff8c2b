"""SmolLM 3: Llama in which every fourth layer knows nothing of positions (NoPE)."""

from paged_jax.errors import ModelLoadError
from paged_jax.models.config_fields import Config, flag, layer_windows, optional_int, positive_int
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
    heads = read_heads(config, kv_heads=4)
    bias = flag(config, "attention_bias", False)
    rope = Rope.from_hf(config, head_size=heads[2], theta=2e6)
    turned = _turned(config)
    window = optional_int(config, "sliding_window")
    used = flag(config, "use_sliding_window", False) and window is not None
    kinds = ["sliding_attention" if used and not t else "full_attention" for t in turned]
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias),
        ropes=[rope if t else None for t in turned],
        windows=layer_windows(config, window, kinds),
        mlps=read_mlp(config, biased=True),
        tied=True,
        max_position=32768,
    )


def _turned(config: Config) -> list[bool]:
    """Which layers rotate: what `no_rope_layers` says, against its name, with a 1."""
    count = positive_int(config, "num_hidden_layers")
    listed = config.get("no_rope_layers")
    if listed is None:
        interval = positive_int(config, "no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(count)]
    if not isinstance(listed, list) or len(listed) < count:
        raise ModelLoadError(
            f"config.json: no_rope_layers must list a 0 or 1 for each of {count} layers"
        )
    return [bool(entry) for entry in listed[:count]]
