"""config.json in its newer and older dialects: what says the same is read as the same."""

import json
from pathlib import Path

import numpy as np
import pytest

from paged_jax.errors import ModelLoadError
from paged_jax.models import find_family
from paged_jax.models.decoder_config import ExpertsConfig
from paged_jax.rope import Rope

GOLDENS = Path(__file__).parent / "data" / "families"
LONG = {"short_factor": [1.0, 1.01, 1.02, 1.03], "long_factor": [1.0, 1.3, 1.6, 1.9]}


def read(name: str, **changes):
    """The golden's config.json with keys replaced, or (...) left out, as its family reads it."""
    config = json.loads((GOLDENS / name / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not ...}
    return find_family(config).parse(config)


OLD = {"rope_parameters": ..., "dtype": ..., "torch_dtype": "float32", "layer_types": ...}
SAME = {
    "llama": ("llama", {**OLD, "rope_theta": 10000.0, "rope_scaling": None}),
    "linear-by-type": (
        "llama-linear",
        {**OLD, "rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "yarn-by-type": (
        "llama-yarn",
        {
            **OLD,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "yarn-by-its-defaults": (
        "llama-yarn",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "truncate": True,
                "attention_factor": None,
            },
        },
    ),
    "llama3": (
        "llama-llama3rope",
        {
            **OLD,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "longrope-called-su": (
        "phi3-longrope",
        {**OLD, "rope_theta": 10000.0, "rope_scaling": {"type": "su", **LONG}},
    ),
    "gemma2-by-position": ("gemma2", {**OLD, "rope_theta": 10000.0, "hidden_act": "gelu"}),
    "gemma3-by-pattern": (
        "gemma3",
        {
            **OLD,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": None,
        },
    ),
    "qwen2-without-kinds": ("qwen2", OLD),
    "qwen3-by-its-own-base": ("qwen3", {**OLD, "rope_theta": 10000.0}),
    "qwen3-moe-by-num_experts": ("qwen3-moe", {"num_local_experts": ..., "num_experts": 6}),
    "mixtral-base": ("mixtral", {**OLD, "rope_theta": ...}),
    "smollm3-by-interval": ("smollm3", {**OLD, "no_rope_layers": ...}),
    "smollm3-by-a-longer-list": ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0]}),
    "gpt2-by-the-names-of-others": (
        "gpt2",
        {
            **dict.fromkeys(("n_embd", "n_head", "n_layer", "n_positions"), ...),
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "max_position_embeddings": 512,
        },
    ),
    "gpt-oss-by-itself": ("gpt-oss", {**OLD, "rope_scaling": None}),
    "gpt-oss-scaling": (
        "gpt-oss",
        {
            **OLD,
            "rope_theta": 150000,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "truncate": False,
            },
        },
    ),
}


@pytest.mark.parametrize(("name", "changes"), SAME.values(), ids=SAME)
def test_older_dialects_are_read_as_the_newest(name, changes):
    assert read(name, **changes) == read(name)


# What a family takes where config.json is silent, from transformers' own classes.
SILENT = {
    "llama": {"rms_norm_eps": 1e-6, "max_position": 2048, "tied": False, "theta": 1e4},
    "mistral-window": {"rms_norm_eps": 1e-6, "max_position": 131072, "tied": False, "theta": 1e4},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position": 32768, "tied": False, "theta": 1e4},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position": 32768, "tied": False, "theta": 1e4},
    "qwen3-moe": {"rms_norm_eps": 1e-6, "max_position": 32768, "tied": False, "theta": 1e4},
    "mixtral": {"rms_norm_eps": 1e-5, "max_position": 131072, "tied": False, "theta": 1e6},
    "gemma2": {"rms_norm_eps": 1e-6, "max_position": 8192, "tied": True, "theta": 1e4},
    "phi3": {"rms_norm_eps": 1e-5, "max_position": 4096, "tied": False, "theta": 1e4},
    "olmo2": {"rms_norm_eps": 1e-5, "max_position": 2048, "tied": False, "theta": 1e4},
    "granite": {"rms_norm_eps": 1e-6, "max_position": 2048, "tied": False, "theta": 1e4},
    "smollm3": {"rms_norm_eps": 1e-6, "max_position": 32768, "tied": True, "theta": 2e6},
    "gpt-oss": {"rms_norm_eps": 1e-5, "max_position": 131072, "tied": False, "theta": 150000.0},
}


@pytest.mark.parametrize("name", SILENT)
def test_silence_means_what_the_family_means_by_it(name):
    keys = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_parameters")
    config = read(name, **dict.fromkeys(keys, ...))
    assert config.layers[0].rope is not None
    assert SILENT[name] == {
        "rms_norm_eps": config.rms_norm_eps,
        "max_position": config.max_position,
        "tied": config.tie_word_embeddings,
        "theta": config.layers[0].rope.theta,
    }


def test_windows_and_heads_where_the_config_is_silent():
    def window(name: str, layer: int = 0) -> int | None:
        return read(name, sliding_window=...).layers[layer].window

    assert window("mistral-window") == 4096
    assert window("mixtral") is None
    assert (window("gemma2", 0), window("gemma2", 1)) == (4096, None)
    assert window("gpt-oss") == 128
    assert read("mistral-window", sliding_window=None).layers[0].window is None
    heads = {"num_attention_heads": 32, "num_key_value_heads": ..., "head_dim": 8}
    silent = {"qwen2": 32, "mistral-window": 8, "qwen3-moe": 4, "gemma2": 4, "gpt-oss": 8}
    for name, count in silent.items():
        assert read(name, **heads).attention.num_kv_heads == count, name
    assert read("llama", num_key_value_heads=...).attention.num_kv_heads == 4
    assert read("qwen3", head_dim=...).attention.head_size == 128
    assert read("qwen3-moe", head_dim=...).attention.head_size == 8
    assert read("gemma3", head_dim=...).attention.head_size == 256


def test_windows_of_qwen_begin_at_a_layer_and_only_if_switched_on():
    on = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ...}
    windows = [layer.window for layer in read("qwen2", **on, max_window_layers=1).layers]
    assert windows == [None, 9, 9]
    assert {layer.window for layer in read("qwen2", **on, max_window_layers=28).layers} == {None}
    off = read("qwen2", sliding_window=9, max_window_layers=0, layer_types=...)
    assert {layer.window for layer in off.layers} == {None}


def test_gemma3_has_two_rotations_and_scales_only_the_full_layers():
    config = read(
        "gemma3",
        rope_parameters=...,
        layer_types=...,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=3,
    )
    kinds = [(layer.window, layer.rope) for layer in config.layers[:3]]
    (window, local), (_, same), (full, stretched) = kinds
    assert (window, full, local) == (16, None, same)
    assert local == Rope(16, 10000.0)
    assert (stretched.theta, stretched.scaling.factor) == (1e6, 8.0)


def test_gemma3_reads_the_text_model_of_one_that_sees_images():
    text = json.loads((GOLDENS / "gemma3" / "config.json").read_text())
    nested = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    assert find_family(nested).parse(nested) == read("gemma3")


def test_gemma3_names_of_every_dialect_lead_to_the_same_tensors():
    family = find_family({"architectures": ["Gemma3ForConditionalGeneration"]})
    names = ("model.language_model.norm.weight", "language_model.model.norm.weight")
    assert {family.canonical(name) for name in names} == {"model.norm.weight"}
    assert family.canonical("lm_head.weight") == "lm_head.weight"
    assert family.is_ignored("model.vision_tower.encoder.weight")
    assert family.is_ignored("multi_modal_projector.mm_input_projection_weight")
    assert not family.is_ignored("model.language_model.norm.weight")


def test_longrope_takes_the_table_of_the_longest_sequence_that_is_served():
    config = read("phi3-longrope")
    rope = config.layers[0].rope
    short, long = (config.for_context(n).layers[0].rope for n in (32, 33))
    assert long.frequencies().tolist() == rope.frequencies().tolist()
    plain = Rope(8, 10000.0).frequencies()
    assert plain / short.frequencies() == pytest.approx(np.array(LONG["short_factor"]))
    assert plain / long.frequencies() == pytest.approx(np.array(LONG["long_factor"]))
    assert short.scaling.length == long.scaling.length > 1


def test_phi_turns_a_part_of_each_head():
    config = read("phi3", rope_parameters=..., partial_rotary_factor=0.5)
    assert config.layers[0].rope == Rope(4, 10000.0)


def test_experts_stand_where_the_config_says():
    config = read("qwen3-moe", decoder_sparse_step=2, mlp_only_layers=[1])
    assert not any(isinstance(layer.mlp, ExpertsConfig) for layer in config.layers)
    config = read("qwen3-moe", mlp_only_layers=[1])
    kinds = [isinstance(layer.mlp, ExpertsConfig) for layer in config.layers]
    assert kinds == [True, False, True]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"sliding_window": None}, "there is no sliding_window"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 7}, "'chunked_attention'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "one kind for each of 7 layers"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "must name full_attention and"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("gpt2", {"activation_function": "swiglu"}, "activation_function='swiglu'"),
        ("gpt2", {"n_head": 5}, "n_embd=32 must divide by num_heads=5"),
        ("gpt-oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
        ("gpt-oss", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ("qwen3-moe", {"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list"),
        ("smollm3", {"no_rope_layers": [1]}, "a 0 or 1 for each of 5 layers"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ("llama", {"hidden_act": "xielu"}, "hidden_act='xielu' is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_key(name, changes, message):
    with pytest.raises(ModelLoadError, match=message):
        read(name, **changes)
