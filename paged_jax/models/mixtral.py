"""Mixtral: Mistral with experts in every layer."""

from paged_jax.layers import ACTIVATIONS
from paged_jax.models.config_fields import Config, optional_int, positive_int, text
from paged_jax.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    read_decoder,
    read_heads,
)
from paged_jax.models.sources import Path, Source, Stack, Tensor, tensor_name
from paged_jax.rope import Rope

__all__ = ["parse", "source"]

NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config, kv_heads=8)
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return read_decoder(
        config,
        attention=AttentionConfig(*heads),
        ropes=Rope.from_hf(config, head_size=heads[2], theta=1e6),
        windows=optional_int(config, "sliding_window"),
        mlps=ExpertsConfig(
            num_experts=positive_int(config, key, 8),
            num_chosen=positive_int(config, "num_experts_per_tok", 2),
            inner_size=positive_int(config, "intermediate_size"),
            activation=text(config, "hidden_act", "silu", ACTIVATIONS),
            softmax="all, normed",
        ),
        eps=1e-5,
        max_position=131072,
    )


def source(config: DecoderConfig, path: Path) -> Source:
    """The file calls the MLP `block_sparse_moe` and has a tensor for each expert's matrix."""
    name = tensor_name(path).replace(".mlp.", ".block_sparse_moe.")
    if "experts" not in path:
        return Tensor(name)
    experts = config.layers[int(path[1])].mlp
    assert isinstance(experts, ExpertsConfig)
    prefix, _, projection = name.rpartition(".")
    each = range(experts.num_experts)
    return Stack(tuple(f"{prefix}.{i}.{NAMES[projection]}.weight" for i in each))
