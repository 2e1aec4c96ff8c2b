"""Which architectures of GGUF files are read, and how each differs from Hugging Face's files."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from paged_jax.checkpoint.gguf_file import GGUFFile
from paged_jax.errors import ModelLoadError

__all__ = ["FAMILIES", "MIXTRAL", "TOP_NAMES", "Family", "Keys"]


class Keys:
    """The metadata of one architecture, each value checked to be what it must be."""

    def __init__(self, file: GGUFFile):
        self._file = file
        self._prefix = file.metadata["general.architecture"]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one for each layer, all alike
        if type(value) is not int or not 0 < value < 2**31:
            raise self._error(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(key, value, "a positive number")
        return float(str(np.float32(value)))  # 1e-05 was stored as 9.99999974e-06

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._error(key, value, "a text")
        return value

    def optional(self, key: str) -> float | None:
        return None if self._get(key, None) is None else self.number(key)

    def window(self) -> int | None:
        """Tokens that a layer with a window sees; Phi 4 writes 0 for none."""
        found = self._get("attention.sliding_window", 0)
        is_none = type(found) is int and found == 0
        return None if is_none else self.integer("attention.sliding_window")

    def refuse(self, key: str, why: str) -> ModelLoadError:
        """The error of a value that another model has."""
        return self._file.error(f"{self._prefix}.{key}: {why}")

    def _get(self, key: str, default: Any) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def _error(self, key: str, value: object, expected: str) -> ModelLoadError:
        shown = "missing" if value is None else repr(value)
        return self._file.error(f"{self._prefix}.{key} is {shown}, it must be {expected}")


# Names in a GGUF file and what Hugging Face calls them, without ".weight" or ".bias".
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS_BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SANDWICH = {
    **NORMS_AFTER,
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
}
ATTENTION = {part: name for part, name in PROJECTIONS.items() if part.startswith("attn")}
ATTENTION_NORMS = {  # of which the second is in front of the MLP, as the file's name does not say
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
GPT2_TOP_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
GPT2_MATRICES = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
FUSED = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


class Family(NamedTuple):
    """What a GGUF architecture is called by Hugging Face, and how its files differ."""

    model_type: str
    architecture: str
    interleaved: bool
    """q and k rows lie in the order of rotary pairs (0, 1), (2, 3), …, not of two halves."""

    names: Mapping[str, str] = {**PROJECTIONS, **NORMS_BEFORE}
    settings: Callable[[Keys], Mapping[str, Any]] = lambda keys: {}
    """More of config.json, from the file's metadata."""

    norm_offset: float = 0.0
    """What the file adds to the weights of norms."""

    partial_rotary: bool = False
    yarn: Mapping[str, Any] = {}
    """What every published model says of its YaRN scaling, and no key."""

    experts: Mapping[str, str] = {}
    """Tensors of all experts together, and what Hugging Face calls that of expert {}."""

    stacks: Mapping[str, tuple[str, ...]] = {}
    """Hugging Face's tensors of all experts together, `[experts, in, out]`, and the file's, of
    which several take turns along the last axis."""

    top_names: Mapping[str, str] = TOP_NAMES
    layer: str = "model.layers.{}."
    transposed: frozenset[str] = frozenset()
    """Parts of a layer whose matrices Hugging Face keeps `[in, out]`."""

    is_rotary: bool = True
    """Of the Llama lineage: rotary positions, RMS norms, gated MLPs."""


def _gemma(keys: Keys, *, largest: int) -> dict[str, Any]:
    """The scale of the scores is in no key: only the largest model scales by the width's share."""
    num_heads = keys.integer("attention.head_count")
    width = keys.integer("embedding_length") // num_heads
    by_width = keys.integer("block_count") == largest
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "query_pre_attn_scalar": width if by_width else keys.integer("attention.key_length", width),
    }


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys, largest=46),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    return {
        **_gemma(keys, largest=62),
        "sliding_window_pattern": keys.integer("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.optional("final_logit_softcapping"),
    }


def _granite(keys: Keys) -> dict[str, Any]:
    scale = keys.optional("attention.scale")
    head_size = keys.integer("embedding_length") // keys.integer("attention.head_count")
    return {
        "attention_multiplier": head_size**-0.5 if scale is None else scale,
        "embedding_multiplier": keys.optional("embedding_scale") or 1.0,
        "residual_multiplier": keys.optional("residual_scale") or 1.0,
        "logits_scaling": keys.optional("logit_scale") or 1.0,
    }


def _phi3(keys: Keys) -> dict[str, Any]:
    original = keys.optional("rope.scaling.original_context_length")
    return {
        "original_max_position_embeddings": int(original or keys.integer("context_length")),
        "sliding_window": keys.window(),
    }


def _olmo2(keys: Keys) -> dict[str, Any]:
    if keys.window() is not None:
        raise keys.refuse("attention.sliding_window", "OLMo 3, which has windows, is not read")
    return {}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # of every published model, and in no key
    }


def _mixtral(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    return {
        **_mixtral(keys),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "sliding_window": keys.integer("attention.sliding_window"),
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    return {
        "n_embd": keys.integer("embedding_length"),
        "n_head": keys.integer("attention.head_count"),
        "n_layer": keys.integer("block_count"),
        "n_positions": keys.integer("context_length"),
        "n_inner": keys.integer("feed_forward_length"),
        "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


MIXTRAL = Family(  # calls itself llama, and has experts
    "mixtral",
    "MixtralForCausalLM",
    True,
    {**ATTENTION, **NORMS_BEFORE, "ffn_gate_inp": "block_sparse_moe.gate"},
    _mixtral,
    experts={
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    },
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", interleaved=True),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", interleaved=False),
    "qwen3": Family(
        "qwen3", "Qwen3ForCausalLM", False, {**PROJECTIONS, **NORMS_BEFORE, **QK_NORMS}
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        False,
        {**ATTENTION, **NORMS_BEFORE, **QK_NORMS, "ffn_gate_inp": "mlp.gate"},
        _qwen3_moe,
        experts={
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
    ),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", False, {**PROJECTIONS, **SANDWICH}, _gemma2, norm_offset=1.0
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        False,
        {**PROJECTIONS, **SANDWICH, **QK_NORMS},
        _gemma3,
        norm_offset=1.0,
    ),
    "phi3": Family(
        "phi3", "Phi3ForCausalLM", False, {**FUSED, **NORMS_BEFORE}, _phi3, partial_rotary=True
    ),
    "olmo2": Family(
        "olmo2", "Olmo2ForCausalLM", False, {**PROJECTIONS, **NORMS_AFTER, **QK_NORMS}, _olmo2
    ),
    "granite": Family("granite", "GraniteForCausalLM", interleaved=True, settings=_granite),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", interleaved=True),
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        False,
        {
            **ATTENTION,
            **ATTENTION_NORMS,
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        _gpt_oss,
        stacks={
            "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
            "mlp.experts.down_proj": ("ffn_down_exps",),
        },
        yarn={"truncate": False},
    ),
    "gpt2": Family(
        "gpt2",
        "GPT2LMHeadModel",
        False,
        {**GPT2_MATRICES, "attn_norm": "ln_1", "ffn_norm": "ln_2"},
        _gpt2,
        top_names=GPT2_TOP_NAMES,
        layer="transformer.h.{}.",
        transposed=frozenset(GPT2_MATRICES.values()),
        is_rotary=False,
    ),
}
