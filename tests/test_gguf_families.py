"""GGUF files of every family that is read from them: the published implementation's logits.

The files are made here of the goldens, under the names that the `gguf` library has for Hugging
Face's tensors, with what llama.cpp's converter does to them.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from paged_jax.attention import dense
from paged_jax.checkpoint import convert_gguf
from paged_jax.checkpoint.gguf_families import FAMILIES
from paged_jax.models import load_model
from tests.tiny_gguf import byte_level_metadata, interleaved, trained_byte_level, write_gguf

GOLDENS = Path(__file__).parent / "data" / "families"
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
SOFTCAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
GEMMA = {"attention.key_length": 16, "attention.value_length": 16}
MULTIPLIERS = {
    "attention.scale": 0.1,
    "embedding_scale": 6.0,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
}
# What the file is called and says beside the sizes, by golden.
FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {}),
    "llama-yarn": ("llama", {**YARN, "rope.scaling.original_context_length": 32}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention.key_length": 16, "attention.value_length": 16}),
    "gemma2": ("gemma2", {**GEMMA, **SOFTCAPS, "attention.sliding_window": 16}),
    "gemma3": ("gemma3", {**GEMMA, "attention.sliding_window": 16, "rope.freq_base": 1e6}),
    "phi3": ("phi3", {"rope.dimension_count": 8}),
    "phi3-longrope": ("phi3", {"rope.scaling.original_context_length": 32}),
    "olmo2": ("olmo2", {"attention.layer_norm_rms_epsilon": 1e-5}),
    "granite": ("granite", MULTIPLIERS),
    "smollm3": ("smollm3", {"rope.freq_base": 2e6}),
    "mixtral": ("llama", {"rope.freq_base": 1e6, "expert_count": 4, "expert_used_count": 2}),
    "qwen3-moe": (
        "qwen3moe",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 24,
        },
    ),
}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}


def file_keys(config: dict, architecture: str, extra: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
        **extra,
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def file_tensors(config: dict, tensors: dict, architecture: str) -> dict[str, np.ndarray]:
    """Under the library's names; rows of q and k and the weights of norms as the file has them."""
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    out = {}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        if architecture in ("llama", "granite", "smollm3"):
            for part, heads in (("q_proj", "attention"), ("k_proj", "key_value")):
                if f".{part}." in name:
                    array = interleaved(array, config[f"num_{heads}_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if ".experts." in name:  # stacked, expert by expert
            layer, expert, part = re.search(r"layers\.(\d+).*experts\.(\d+)\.(\w+)", name).groups()
            part = EXPERTS.get(part, part.removesuffix("_proj"))
            stacked.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", {})[int(expert)] = array
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        out[known] = np.ascontiguousarray(array, np.float32)
    for name, each in stacked.items():
        out[name] = np.stack([each[index] for index in sorted(each)])
    scaling = config.get("rope_parameters") or {}
    for key in ("long", "short"):
        if f"{key}_factor" in scaling:
            out[f"rope_factors_{key}.weight"] = np.float32(scaling[f"{key}_factor"])
    return out


@pytest.fixture(scope="module")
def token_metadata() -> dict[str, Any]:
    return byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")


@pytest.mark.parametrize("name", FILES)
def test_a74_a_file_of_the_family_gives_the_published_logits(tmp_path, token_metadata, name):
    golden = json.loads((GOLDENS / name / "golden.json").read_text())
    config = json.loads((GOLDENS / name / "config.json").read_text())
    architecture, extra = FILES[name]
    tensors = file_tensors(config, load_file(GOLDENS / name / "model.safetensors"), architecture)
    metadata = file_keys(config, architecture, extra) | token_metadata
    write_gguf(tmp_path / "a.gguf", metadata, tensors, architecture=architecture)
    (folder := tmp_path / "folder").mkdir()
    convert_gguf(tmp_path / "a.gguf", folder)
    if architecture.startswith("gemma"):  # no file says it: llama.cpp scales by the head's size
        whole = json.loads((folder / "config.json").read_text())
        assert whole["query_pre_attn_scalar"] == 16
        whole["query_pre_attn_scalar"] = config["query_pre_attn_scalar"]
        (folder / "config.json").write_text(json.dumps(whole))

    model = load_model(folder, dtype="float32")
    ids = jnp.asarray(golden["prompt_token_ids"], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    hidden = model.apply(model.params, ids, positions, dense(jnp.zeros_like(ids)))
    got = np.asarray(model.logits(model.params, hidden))[np.array(golden["logits_rows"])]
    np.testing.assert_allclose(got, golden["logits"], atol=2e-4)


def test_every_architecture_is_tested():
    assert {architecture for architecture, _ in FILES.values()} == set(FAMILIES)
