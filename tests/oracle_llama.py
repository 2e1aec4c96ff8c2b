"""A Llama in plain NumPy and float64, straight from config.json and the tensors on disk."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


def llama_logits(config: Mapping[str, Any], tensors: Tensors, token_ids: list[int]) -> np.ndarray:
    """float64[T, V]: the logits after each token of one sequence."""
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    hidden = weights["model.embed_tokens.weight"][token_ids]
    for i in range(config["num_hidden_layers"]):
        hidden = _layer(config, _below(weights, f"model.layers.{i}."), hidden)
    hidden = _rms_norm(hidden, weights["model.norm.weight"], config["rms_norm_eps"])
    tied = config["tie_word_embeddings"]
    return hidden @ weights["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def rope_frequencies(config: Mapping[str, Any], head_size: int) -> np.ndarray:
    """float64[D/2], plane by plane, as the papers and the Llama 3.1 release spell them."""
    declared = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = declared.get("rope_theta") or config.get("rope_theta", 10000.0)
    kind = declared.get("rope_type") or declared.get("type") or "default"
    plain = [1.0 / theta ** (2 * i / head_size) for i in range(head_size // 2)]
    if kind == "default":
        return np.array(plain)
    if kind == "linear":
        return np.array([f / declared["factor"] for f in plain])
    if kind == "yarn":
        return np.array([_yarn(i, f, plain, theta, declared) for i, f in enumerate(plain)])
    assert kind == "llama3"
    return np.array([_llama3(f, declared) for f in plain])


def _yarn(
    plane: int, frequency: float, plain: list[float], theta: float, declared: Mapping[str, Any]
) -> float:
    """Equation 23 of the paper, the ends of its ramp put on whole planes."""
    size, trained = 2 * len(plain), declared["original_max_position_embeddings"]
    ends = [size * math.log(trained / (2 * math.pi * b)) / 2 / math.log(theta) for b in (32, 1)]
    begin, end = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), size - 1)
    stretched = min(max((plane - begin) / (end - begin), 0.0), 1.0)
    return frequency * ((1 - stretched) + stretched / declared["factor"])


def _llama3(frequency: float, declared: Mapping[str, Any]) -> float:
    low, high = declared["low_freq_factor"], declared["high_freq_factor"]
    trained, factor = declared["original_max_position_embeddings"], declared["factor"]
    wavelength = 2 * math.pi / frequency
    if wavelength < trained / high:
        return frequency
    if wavelength > trained / low:
        return frequency / factor
    smooth = (trained / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _layer(config: Mapping[str, Any], weights: Tensors, hidden: np.ndarray) -> np.ndarray:
    eps = config["rms_norm_eps"]
    x = _rms_norm(hidden, weights["input_layernorm.weight"], eps)
    hidden = hidden + _attention(config, _below(weights, "self_attn."), x)
    x = _rms_norm(hidden, weights["post_attention_layernorm.weight"], eps)
    return hidden + _mlp(_below(weights, "mlp."), x)


def _attention(config: Mapping[str, Any], weights: Tensors, x: np.ndarray) -> np.ndarray:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // num_heads
    frequencies = rope_frequencies(config, head_size)
    q, k, v = (_project(weights, name, x) for name in ("q_proj", "k_proj", "v_proj"))
    heads = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        own = slice(head * head_size, (head + 1) * head_size)
        shared = slice(kv_head * head_size, (kv_head + 1) * head_size)
        keys, queries = _rotate(k[:, shared], frequencies), _rotate(q[:, own], frequencies)
        scores = queries @ keys.T / math.sqrt(head_size)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        weight = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(weight / weight.sum(axis=1, keepdims=True) @ v[:, shared])
    return _project(weights, "o_proj", np.concatenate(heads, axis=1))


def _rotate(x: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Turn entries i and i + D/2 of row t by the angle `t * frequencies[i]`, as complex numbers."""
    half = len(frequencies)
    turns = np.exp(1j * np.arange(len(x))[:, None] * frequencies)
    turned = (x[:, :half] + 1j * x[:, half:]) * turns
    return np.concatenate([turned.real, turned.imag], axis=1)


def _mlp(weights: Tensors, x: np.ndarray) -> np.ndarray:
    gate, up = _project(weights, "gate_proj", x), _project(weights, "up_proj", x)
    return _project(weights, "down_proj", gate / (1 + np.exp(-gate)) * up)


def _project(weights: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


def _below(weights: Tensors, prefix: str) -> dict[str, np.ndarray]:
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
