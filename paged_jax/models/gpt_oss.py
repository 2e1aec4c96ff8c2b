"""gpt-oss: experts with clipped SwiGLU, attention sinks, every other layer a window."""

import numpy as np

from paged_jax.models.config_fields import (
    Config,
    flag,
    layer_windows,
    only,
    optional_int,
    positive_float,
    positive_int,
)
from paged_jax.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    read_decoder,
    read_heads,
)
from paged_jax.models.sources import MXFP4, Path, Source, Tensor, tensor_name
from paged_jax.rope import Rope

__all__ = ["parse", "source"]

YARN = {  # where config.json says nothing about positions
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse(config: Config) -> DecoderConfig:
    """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
    only(config, "hidden_act", "silu", "swish")
    _check_quantisation(config)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {**config, "rope_parameters": YARN}
    heads = read_heads(config, kv_heads=8, head_size=64)
    bias = flag(config, "attention_bias", True)
    count = positive_int(config, "num_hidden_layers")
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]
    return read_decoder(
        {key: value for key, value in config.items() if key != "quantization_config"},
        attention=AttentionConfig(*heads, bias=bias, out_bias=bias, sinks=True),
        ropes=Rope.from_hf(config, head_size=heads[2], theta=150000.0),
        windows=layer_windows(config, optional_int(config, "sliding_window", 128), kinds),
        mlps=ExpertsConfig(
            num_experts=_num_experts(config),
            num_chosen=positive_int(config, "num_experts_per_tok", 4),
            inner_size=positive_int(config, "intermediate_size"),
            router="router",
            softmax="chosen",
            bias=True,
            clamp=(
                positive_float(config, "swiglu_limit", 7.0),
                positive_float(config, "swiglu_alpha", 1.702),
            ),
        ),
        eps=1e-5,
        max_position=131072,
    )


def _num_experts(config: Config) -> int:
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return positive_int(config, key, 128)


def _check_quantisation(config: Config) -> None:
    """MXFP4 is read; its values are the same wherever they are kept."""
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        only(quantisation, "quant_method", "mxfp4")


def source(config: DecoderConfig, path: Path) -> Source:
    """The file keeps gate and up in one tensor, column by column, `[experts, in, out]`."""
    name = tensor_name(path)
    if path[-2:-1] != ("experts",):
        return Tensor(name)
    prefix, _, part = name.rpartition(".")
    projection, _, kind = part.rpartition("_")
    fused = "down_proj" if projection == "down" else "gate_up_proj"
    pick = {"gate": slice(None, None, 2), "up": slice(1, None, 2), "down": slice(None)}[projection]
    if kind == "bias":
        return Tensor(f"{prefix}.{fused}_bias", lambda t: t[..., pick])
    plain = Tensor(f"{prefix}.{fused}", lambda t: np.swapaxes(t[..., pick], -1, -2))
    return MXFP4(plain, lambda t: t[:, pick])
