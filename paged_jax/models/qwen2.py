"""Qwen 2 and 2.5: Llama with biases on q, k and v, and windows in upper layers if switched on."""

from paged_jax.models.config_fields import Config, flag, layer_windows, optional_int, positive_int
from paged_jax.models.decoder_config import AttentionConfig, DecoderConfig, read_decoder, read_heads
from paged_jax.rope import Rope

__all__ = ["parse", "windows"]


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config, kv_heads=32)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=True),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        windows=windows(config),
        max_position=32768,
    )


def windows(config: Config) -> tuple[int | None, ...]:
    """`sliding_window` from layer `max_window_layers` on, where `use_sliding_window` is set."""
    count = positive_int(config, "num_hidden_layers")
    used = flag(config, "use_sliding_window", False)
    window = optional_int(config, "sliding_window", 4096) if used else None
    first = config.get("max_window_layers", 28) if window is not None else count
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
    return layer_windows(config, window, kinds)
