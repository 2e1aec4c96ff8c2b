"""Tiny models on disk: Hugging Face style directories with random weights, the same every time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_llama(directory: Path, *, seed: int = 0, **overrides: Any) -> dict[str, Any]:
    """Write config.json and model.safetensors of a small random Llama; returns the config.

    `overrides` replace keys of the config. The same arguments give the same bytes. The head is
    wide, so that the best logit leads clearly and greedy tokens do not hang on rounding.
    """
    config = {**TINY_LLAMA, **overrides}
    write_model(directory, config, llama_tensors(config, seed=seed))
    return config


def write_model(directory: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Write a model directory from its two parts."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def llama_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under their Hugging Face names, each drawn from the seed and its name."""
    return {name: _draw(name, shape, seed) for name, shape in llama_shapes(config).items()}


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a Llama, under its Hugging Face name."""
    E, F = config["hidden_size"], config["intermediate_size"]
    H, K, D = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    tensors = {"model.embed_tokens.weight": (config["vocab_size"], E), "model.norm.weight": (E,)}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = (config["vocab_size"], E)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors[f"{layer}.input_layernorm.weight"] = (E,)
        tensors[f"{layer}.post_attention_layernorm.weight"] = (E,)
        projections = {"q_proj": (H * D, E), "k_proj": (K * D, E), "v_proj": (K * D, E)}
        for name, shape in {**projections, "o_proj": (E, H * D)}.items():
            tensors[f"{layer}.self_attn.{name}.weight"] = shape
            if config["attention_bias"]:
                tensors[f"{layer}.self_attn.{name}.bias"] = shape[:1]
        for name, shape in {"gate_proj": (F, E), "up_proj": (F, E), "down_proj": (E, F)}.items():
            tensors[f"{layer}.mlp.{name}.weight"] = shape
            if config["mlp_bias"]:
                tensors[f"{layer}.mlp.{name}.bias"] = shape[:1]
    return tensors


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *name.encode()])
    noise = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith(".bias"):
        return 0.2 * noise
    if name.startswith(("model.embed_tokens", "lm_head")):
        return np.float32(0.4) * noise  # logits of about 3 standard deviations
    return noise * np.float32(1.5 / np.sqrt(shape[1]))  # so that every layer has its say
