"""Qwen 3 with experts: in every layer, or in some, with plain MLPs between."""

from paged_jax.errors import ModelLoadError
from paged_jax.layers import ACTIVATIONS
from paged_jax.models.config_fields import Config, flag, optional_int, positive_int, text
from paged_jax.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    MLPConfig,
    read_decoder,
    read_heads,
    read_mlp,
)
from paged_jax.models.sources import Path, Source, Stack, Tensor, tensor_name
from paged_jax.rope import Rope

__all__ = ["parse", "source"]


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    heads = read_heads(config, kv_heads=4)
    bias = flag(config, "attention_bias", False)
    used = flag(config, "use_sliding_window", False)
    return read_decoder(
        config,
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias, norm="head"),
        ropes=Rope.from_hf(config, head_size=heads[2]),
        windows=optional_int(config, "sliding_window", 4096) if used else None,
        mlps=_mlps(config),
        max_position=32768,
    )


def _mlps(config: Config) -> list[MLPConfig | ExpertsConfig]:
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list):
        raise ModelLoadError(f"config.json: mlp_only_layers={plain!r} must be a list")
    step = positive_int(config, "decoder_sparse_step", 1)
    experts = _experts(config)
    return [
        experts if i not in plain and (i + 1) % step == 0 else read_mlp(config)
        for i in range(positive_int(config, "num_hidden_layers"))
    ]


def _experts(config: Config) -> ExpertsConfig:
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    return ExpertsConfig(
        num_experts=positive_int(config, key, 128),
        num_chosen=positive_int(config, "num_experts_per_tok", 8),
        inner_size=positive_int(config, "moe_intermediate_size", 768),
        activation=text(config, "hidden_act", "silu", ACTIVATIONS),
        softmax="all, normed" if flag(config, "norm_topk_prob", False) else "all",
    )


def source(config: DecoderConfig, path: Path) -> Source:
    """The file has a tensor for each expert's matrix."""
    if "experts" not in path:
        return Tensor(tensor_name(path))
    *layer, projection = path
    experts = config.layers[int(path[1])].mlp
    assert isinstance(experts, ExpertsConfig)
    prefix = tensor_name(tuple(layer))
    return Stack(tuple(f"{prefix}.{i}.{projection}.weight" for i in range(experts.num_experts)))
