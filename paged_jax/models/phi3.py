"""Phi 3 and 4: Llama in fewer tensors, a part of each head turned, tables for long contexts."""

import numpy as np

from paged_jax.errors import ModelLoadError
from paged_jax.models.config_fields import Config, optional_int
from paged_jax.models.decoder_config import AttentionConfig, DecoderConfig, read_decoder, read_heads
from paged_jax.models.sources import Path, Source, Tensor, tensor_name
from paged_jax.rope import Rope, declared_rope

__all__ = ["parse", "source"]

TRAINED_LEN = 4096
OLD_NAMES = ("su", "yarn")  # of longrope, before it had its own


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads),
        ropes=_rope(config, heads[2]),
        windows=optional_int(config, "sliding_window"),
        eps=1e-5,
        max_position=TRAINED_LEN,
    )


def _rope(config: Config, head_size: int) -> Rope:
    declared = dict(declared_rope(config))
    kind = declared.get("rope_type") or declared.get("type") or "default"
    if kind in OLD_NAMES:
        kind = "longrope"
    if kind not in ("default", "longrope"):
        raise ModelLoadError(
            f"rope scaling of type {kind!r} is not supported in this family, only default, longrope"
        )
    silent = {
        **config,
        "original_max_position_embeddings": config.get("original_max_position_embeddings")
        or TRAINED_LEN,
        "max_position_embeddings": config.get("max_position_embeddings") or TRAINED_LEN,
    }
    return Rope.from_declared(
        {**declared, "rope_type": kind}, silent, head_size=head_size, theta=10000.0, partial=True
    )


def source(config: DecoderConfig, path: Path) -> Source:
    """The file has q, k and v in one tensor, one after the other, and gate and up in another."""
    *layer, projection, kind = path
    attention = config.attention
    queries = attention.num_heads * attention.head_size
    keys = queries + attention.num_kv_heads * attention.head_size
    inner = config.layers[int(path[1])].mlp.inner_size if "mlp" in path else 0
    parts = {
        "q_proj": ("qkv_proj", slice(None, queries)),
        "k_proj": ("qkv_proj", slice(queries, keys)),
        "v_proj": ("qkv_proj", slice(keys, None)),
        "gate_proj": ("gate_up_proj", slice(None, inner)),
        "up_proj": ("gate_up_proj", slice(inner, None)),
    }
    if projection not in parts:
        return Tensor(tensor_name(path))
    fused, rows = parts[str(projection)]

    def take(tensor: np.ndarray) -> np.ndarray:
        return tensor[rows]

    return Tensor(tensor_name((*layer, fused, kind)), take)
