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

from paged_jax import Engine, EngineConfig, SamplingParams
from paged_jax.attention import dense
from paged_jax.checkpoint import convert_gguf
from paged_jax.checkpoint.gguf_families import FAMILIES
from paged_jax.errors import ModelLoadError
from paged_jax.models import load_model
from paged_jax.progress import SilentProgress
from tests.engine_runs import run_all
from tests.tiny_gguf import byte_level_metadata, interleaved, trained_byte_level, write_gguf

pytestmark = pytest.mark.usefixtures("quick_compiles")

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
    "phi3-longrope": (
        "phi3",
        {"attention.sliding_window": 0, "rope.scaling.original_context_length": 32},
    ),
    "olmo2": ("olmo2", {"attention.layer_norm_rms_epsilon": 1e-5}),
    "granite": ("granite", MULTIPLIERS),
    "smollm3": ("smollm3", {"rope.freq_base": 2e6}),
    "gpt2": ("gpt2", {}),
    "gpt-oss": (
        "gpt-oss",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 16,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "rope.scaling.yarn_beta_fast": 32.0,
            "rope.scaling.yarn_beta_slow": 1.0,
        },
    ),
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
    keys = gpt2_keys(config) if architecture == "gpt2" else rotary_keys(config)
    return {f"{architecture}.{key}": value for key, value in (keys | extra).items()}


def gpt2_keys(config: dict) -> dict[str, Any]:
    return {
        "block_count": config["n_layer"],
        "context_length": config["n_positions"],
        "embedding_length": config["n_embd"],
        "feed_forward_length": 4 * config["n_embd"],
        "attention.head_count": config["n_head"],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def rotary_keys(config: dict) -> dict[str, Any]:
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
    }


def file_tensors(config: dict, tensors: dict, architecture: str) -> dict[str, np.ndarray]:
    """Under the library's names; rows of q and k and the weights of norms as the file has them."""
    kind = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(kind, config.get("num_hidden_layers") or config["n_layer"])
    if architecture == "gpt2":
        tensors = {name: array.T if ".c_" in name else array for name, array in tensors.items()}
    if architecture == "gpt-oss":
        tensors = experts_apart(tensors)
    out = {}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name, array in tensors.items():
        if architecture in ("llama", "granite", "smollm3"):
            for part, heads in (("q_proj", "attention"), ("k_proj", "key_value")):
                if f".{part}." in name:
                    array = interleaved(array, config[f"num_{heads}_heads"])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1
        if ".experts." in name and architecture != "gpt-oss":  # stacked, expert by expert
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


def experts_apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss with gate and up by themselves, `[experts, out, in]`, and every name with an end."""
    out = {}
    for name, array in tensors.items():
        owner, _, end = name.rpartition(".")
        kind = "bias" if end.endswith("_bias") else "weight"
        end = end.removesuffix("_bias")
        if owner.endswith(".experts") and kind == "weight":
            array = array.swapaxes(1, 2)
        if end == "gate_up_proj":
            out[f"{owner}.gate_proj.{kind}"] = array[:, 0::2]
            out[f"{owner}.up_proj.{kind}"] = array[:, 1::2]
        elif end in ("down_proj", "sinks"):
            out[f"{owner}.{end}.{kind}"] = array
        else:
            out[name] = array
    return out


@pytest.fixture(scope="module")
def token_metadata() -> dict[str, Any]:
    return byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")


def golden_of(name: str) -> dict:
    return json.loads((GOLDENS / name / "golden.json").read_text())


def converted(tmp_path: Path, name: str, tokens: dict[str, Any], **more: Any) -> Path:
    """The folder made of a file with the golden's model; `more` keys by their last parts."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    architecture, extra = FILES[name]
    tensors = file_tensors(config, load_file(GOLDENS / name / "model.safetensors"), architecture)
    metadata = file_keys(config, architecture, extra | more) | tokens
    write_gguf(tmp_path / "a.gguf", metadata, tensors, architecture=architecture)
    (folder := tmp_path / "folder").mkdir()
    convert_gguf(tmp_path / "a.gguf", folder)
    if architecture.startswith("gemma"):  # no file says it: llama.cpp scales by the head's size
        whole = json.loads((folder / "config.json").read_text())
        assert whole["query_pre_attn_scalar"] == 16
        whole["query_pre_attn_scalar"] = config["query_pre_attn_scalar"]
        (folder / "config.json").write_text(json.dumps(whole))
    return folder


def logits_of(folder: Path, golden: dict) -> np.ndarray:
    model = load_model(folder, dtype="float32")
    ids = jnp.asarray(golden["prompt_token_ids"], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)
    hidden = model.apply(model.params, ids, positions, dense(jnp.zeros_like(ids)))
    return np.asarray(model.logits(model.params, hidden))[np.array(golden["logits_rows"])]


@pytest.mark.parametrize("name", FILES)
def test_a74_a_file_of_the_family_gives_the_published_logits(tmp_path, token_metadata, name):
    folder = converted(tmp_path, name, token_metadata)
    np.testing.assert_allclose(
        logits_of(folder, golden_of(name)), golden_of(name)["logits"], atol=2e-4
    )


def test_a_cap_on_the_logits_of_gemma_3_is_read(tmp_path, token_metadata):
    """The golden has none: what it gives, capped here."""
    folder = converted(tmp_path, "gemma3", token_metadata, final_logit_softcapping=0.5)
    wanted = np.array(golden_of("gemma3")["logits"])
    capped = 0.5 * np.tanh(wanted / 0.5)
    assert np.abs(capped - wanted).max() > 0.1
    np.testing.assert_allclose(logits_of(folder, golden_of("gemma3")), capped, atol=2e-4)


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("gpt2", marks=pytest.mark.sweep)])
def test_a_file_gives_the_published_tokens_through_pages(tmp_path, token_metadata, name):
    """Of the two that are least alike to the others."""
    golden = golden_of(name)
    config = EngineConfig(
        model=str(converted(tmp_path, name, token_metadata)),
        skip_tokenizer_init=True,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=80,
        block_size=8,
        warmup="none",
        attention_backend="reference",  # compiles fastest
    )
    engine = Engine.from_pretrained(config, progress=SilentProgress())
    count = len(golden["greedy_token_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found = run_all(engine, {"one": (golden["prompt_token_ids"], params)})["one", 0]
    assert found.token_ids == golden["greedy_token_ids"]
    engine.close()


def test_experts_of_gpt_oss_in_mxfp4_are_read_as_the_library_reads_them(tmp_path, token_metadata):
    """As published files have them: the experts' matrices in four bits, the rest in float32."""
    mxfp4 = gguf.GGMLQuantizationType.MXFP4
    config = json.loads((GOLDENS / "gpt-oss" / "config.json").read_text())
    whole = file_tensors(config, load_file(GOLDENS / "gpt-oss" / "model.safetensors"), "gpt-oss")
    metadata = file_keys(config, *FILES["gpt-oss"]) | token_metadata
    kinds = {name: mxfp4 for name in whole if name.endswith("_exps.weight")}
    write_gguf(tmp_path / "a.gguf", metadata, whole, architecture="gpt-oss", kinds=kinds)
    (folder := tmp_path / "folder").mkdir()
    convert_gguf(tmp_path / "a.gguf", folder)
    found = load_model(folder, dtype="float32").params["layers"][0]["mlp"]["experts"]
    for part in ("gate", "up", "down"):
        matrices = whole[f"blk.0.ffn_{part}_exps.weight"]
        read = gguf.quants.dequantize(gguf.quants.quantize(matrices, mxfp4), mxfp4)
        assert 0.01 < np.abs(read - matrices).max() < 0.2
        np.testing.assert_array_equal(found[f"{part}_proj"], read)


def test_a_model_that_calls_itself_as_another_is_refused(tmp_path, token_metadata):
    """OLMo 3 has the tensors of OLMo 2, and windows."""
    config = json.loads((GOLDENS / "olmo2" / "config.json").read_text())
    whole = file_tensors(config, load_file(GOLDENS / "olmo2" / "model.safetensors"), "olmo2")
    extra = FILES["olmo2"][1] | {"attention.sliding_window": 4096}
    metadata = file_keys(config, "olmo2", extra) | token_metadata
    write_gguf(tmp_path / "a.gguf", metadata, whole, architecture="olmo2")
    with pytest.raises(ModelLoadError, match=r"olmo2\.attention\.sliding_window: OLMo 3"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)


def test_a_stack_without_one_of_its_parts_is_refused(tmp_path, token_metadata):
    config = json.loads((GOLDENS / "gpt-oss" / "config.json").read_text())
    whole = file_tensors(config, load_file(GOLDENS / "gpt-oss" / "model.safetensors"), "gpt-oss")
    metadata = file_keys(config, *FILES["gpt-oss"]) | token_metadata
    del whole["blk.1.ffn_up_exps.weight"]
    write_gguf(tmp_path / "a.gguf", metadata, whole, architecture="gpt-oss")
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.experts\.gate_up_proj' is missing"):
        convert_gguf(tmp_path / "a.gguf", tmp_path)


def test_every_architecture_is_tested():
    assert {architecture for architecture, _ in FILES.values()} == set(FAMILIES)
