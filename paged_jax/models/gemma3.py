"""Gemma 3's text model: one full layer after every five with a window, each kind with its rotation.

The releases that also see images keep the text model in `text_config`; of them the text is served.
"""

from collections.abc import Mapping
from typing import Any

from paged_jax.errors import ModelLoadError
from paged_jax.models.config_fields import (
    Config,
    layer_windows,
    optional_float,
    optional_int,
    positive_int,
)
from paged_jax.models.decoder_config import AttentionConfig, DecoderConfig
from paged_jax.models.gemma2 import DEFAULTS, read_attention, read_gemma
from paged_jax.rope import Rope, declared_rope

__all__ = ["canonical", "is_not_text", "parse", "parse_nested"]

NOT_TEXT = ("vision_tower.", "multi_modal_projector.")
FULL, SLIDING = "full_attention", "sliding_attention"
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported.

    `attn_logit_softcapping`, a relic of Gemma 2, is in files of this family and has no meaning.
    """
    config = {**DEFAULTS, "vocab_size": 262208, **config}
    attention = read_attention(config, softcap=None, norm="head")
    window = optional_int(config, "sliding_window", 4096)
    windows = layer_windows(config, window, _kinds(config))
    ropes = {kind: _rope(config, kind, attention) for kind in (FULL, SLIDING)}
    return read_gemma(
        config,
        attention=attention,
        ropes=[ropes[FULL if window is None else SLIDING] for window in windows],
        windows=windows,
        max_position=131072,
        logits_softcap=optional_float(config, "final_logit_softcapping"),
    )


def parse_nested(config: Config) -> DecoderConfig:
    """Read a config.json that has the text model in `text_config`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"config.json: text_config={text!r} must be an object")
    tied = config.get("tie_word_embeddings", True)
    return parse({"tie_word_embeddings": tied, **text})


def _kinds(config: Config) -> list[str]:
    pattern = positive_int(config, "sliding_window_pattern", 6)
    count = positive_int(config, "num_hidden_layers")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(count)]


def _rope(config: Config, kind: str, attention: AttentionConfig) -> Rope:
    """The rotation of one kind of layer. In older files `rope_scaling` is of the full ones."""
    nested: Any = config.get("rope_parameters") or {}
    if nested and not all(isinstance(nested.get(k, {}), Mapping) for k in nested):
        raise ModelLoadError(
            f"config.json: rope_parameters must name {FULL} and {SLIDING}: {sorted(nested)}"
        )
    key, theta = BASES[kind]
    base = config.get(key) or theta
    declared = dict(nested.get(kind) or {})
    if kind == FULL and config.get("rope_scaling"):
        declared |= declared_rope(config)
    silent = {key: config[key] for key in ("max_position_embeddings",) if key in config}
    silent.setdefault("max_position_embeddings", 131072)
    return Rope.from_declared(declared, silent, head_size=attention.head_size, theta=base)


def canonical(name: str) -> str:
    """A tensor's name as the files of the text model alone have it."""
    for prefix, text in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(prefix):
            return text + name.removeprefix(prefix)
    return name


def is_not_text(name: str) -> bool:
    """Is this a tensor of the part that sees images?"""
    return name.removeprefix("model.").startswith(NOT_TEXT)
