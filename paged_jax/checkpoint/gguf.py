"""Turns a GGUF file into a Hugging Face style folder, weights dequantised to float32."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.checkpoint.gguf_families import FAMILIES, MIXTRAL, Family, Keys
from paged_jax.checkpoint.gguf_file import GGUFFile
from paged_jax.checkpoint.gguf_layout import Origin, Shape, expected_shapes, origins
from paged_jax.checkpoint.safetensors_file import write_float32
from paged_jax.errors import ModelLoadError
from paged_jax.progress import Progress, SilentProgress

__all__ = ["convert_gguf"]


ROPE_FACTORS = "rope_freqs.weight"
LONGROPE = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
LLAMA3_SCALING: Mapping[str, float] = {  # of every published model that has it; the factor differs
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def convert_gguf(
    path: Path | str,
    directory: Path | str,
    *,
    families: Mapping[str, Family] = FAMILIES,
    progress: Progress | None = None,
) -> None:
    """Write the model in the file `path` into `directory`, which exists and is empty.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json,
    tokenizer_config.json and, where the file has one, chat_template.jinja. Memory: a few rows of
    one tensor at a time, or a matrix where it must be transposed. Raises ModelLoadError for a file
    that is damaged, or of an architecture, tensor type or tokenizer that is not known; what was
    written by then is of no use.
    """
    directory = Path(directory)
    file = GGUFFile(Path(path))
    family = _family(file, families)
    found = origins(file, family, skipped=(ROPE_FACTORS, *LONGROPE.values()))
    config = _config(file, family, found)
    _check_shapes(file, found, config, family)
    _write_tokenizer(file, directory)
    _write_json(directory / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ends)
    _write_weights(file, found, config, family, directory, progress or SilentProgress())


def _family(file: GGUFFile, families: Mapping[str, Family]) -> Family:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in families:
        raise file.error(
            f"the architecture {architecture!r} is not known; known are "
            f"{', '.join(sorted(families))}"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise file.error("it is one part of several; join them first with llama-gguf-split --merge")
    family = families[architecture]
    if not file.metadata.get(f"{architecture}.expert_count", 0):
        return family
    family = MIXTRAL if architecture == "llama" else family
    if not (family.experts or family.stacks):
        raise file.error("mixtures of experts of this architecture are not read from GGUF files")
    return family


def _config(file: GGUFFile, family: Family, found: Mapping[str, Origin]) -> dict[str, Any]:
    keys = Keys(file)
    embedding = found.get(f"{family.top_names['token_embd']}.weight")
    if embedding is None:
        raise file.error("tensor 'token_embd.weight' is missing")
    ids = _special_token_ids(file)
    eos_ids = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if name in ids))
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape(file)[0],
        "tie_word_embeddings": "lm_head.weight" not in found,
        "bos_token_id": ids.get("bos"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": ids.get("padding"),
        "torch_dtype": "float32",
        **(_rotary_config(file, keys, family, found) if family.is_rotary else {}),
        **family.settings(keys),
    }


def _rotary_config(
    file: GGUFFile, keys: Keys, family: Family, found: Mapping[str, Origin]
) -> dict[str, Any]:
    num_heads = keys.integer("attention.head_count")
    num_kv_heads = keys.integer("attention.head_count_kv", num_heads)
    hidden_size = keys.integer("embedding_length")
    head_size = keys.integer("attention.key_length", hidden_size // num_heads)
    if num_heads % num_kv_heads or head_size % 2:
        raise file.error(f"{num_heads=} must divide by {num_kv_heads=}, and {head_size=} by 2")
    if keys.integer("attention.value_length", head_size) != head_size:
        raise file.error("keys and values of different lengths are not known")
    rotary = keys.integer("rope.dimension_count", head_size)
    if rotary != head_size and not family.partial_rotary:
        raise file.error("rotary embedding of only a part of the head is not known")
    theta = keys.number("rope.freq_base", 10000.0)
    return {
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, keys, family, theta, head_size),
        "max_position_embeddings": keys.integer("context_length"),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in found,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in found,
        **({} if rotary == head_size else {"partial_rotary_factor": rotary / head_size}),
    }


def _special_token_ids(file: GGUFFile) -> dict[str, int]:
    from paged_jax.checkpoint.gguf_tokenizer import special_token_ids

    try:
        return special_token_ids(file.metadata)
    except ModelLoadError as error:
        raise file.error(str(error)) from error


def _rope_scaling(
    file: GGUFFile, keys: Keys, family: Family, theta: float, head_size: int
) -> dict[str, Any] | None:
    if LONGROPE["long_factor"] in file.tensors:
        return _longrope(file, keys)
    if ROPE_FACTORS in file.tensors:
        return _llama3_scaling(file, theta, head_size)
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise file.error(f"rope.scaling.type {kind!r} is not none, linear or yarn")
    scaling = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    return scaling if kind == "linear" else scaling | _yarn(keys, family)


def _yarn(keys: Keys, family: Family) -> dict[str, Any]:
    declared = {
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "attention_factor": keys.optional("rope.scaling.yarn_attn_factor"),
        "beta_fast": keys.optional("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.optional("rope.scaling.yarn_beta_slow"),
    }
    declared |= family.yarn
    return {key: value for key, value in declared.items() if value is not None}


def _longrope(file: GGUFFile, keys: Keys) -> dict[str, Any]:
    if missing := [name for name in LONGROPE.values() if name not in file.tensors]:
        raise file.error(f"tensor {missing[0]!r} is missing")
    tables = {key: file.values(name).tolist() for key, name in LONGROPE.items()}
    length = keys.optional("rope.scaling.attn_factor")
    return {"rope_type": "longrope", "attention_factor": length, **tables}


def _llama3_scaling(file: GGUFFile, theta: float, head_size: int) -> dict[str, Any]:
    """What Hugging Face says about the divisors that GGUF stores one by one.

    The lowest frequency is divided by the full factor; the others must then follow.
    """
    stored = file.values(ROPE_FACTORS).reshape(-1)
    factor = float(stored.max(initial=1.0))
    scaling = {"rope_type": "llama3", "factor": factor, **LLAMA3_SCALING}
    frequencies = theta ** -(np.arange(0, head_size, 2) / head_size)
    context = LLAMA3_SCALING["original_max_position_embeddings"]
    low, high = LLAMA3_SCALING["low_freq_factor"], LLAMA3_SCALING["high_freq_factor"]
    turns = context * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise file.error(f"tensor {ROPE_FACTORS!r} holds no llama3 scaling of rotary frequencies")
    return scaling


def _check_shapes(
    file: GGUFFile, found: Mapping[str, Origin], config: Mapping[str, Any], family: Family
) -> None:
    """Raise ModelLoadError unless exactly the tensors of the configuration are there."""
    expected = expected_shapes(config, family, found)
    for name in expected.keys() - found.keys():
        raise file.error(f"the tensor of {name!r} is missing")
    for name in found.keys() - expected.keys():
        raise file.error(f"tensor {found[name].names[0]!r} is not known in this architecture")
    for name, shape in expected.items():
        origin = found[name]
        if origin.shape(file) != shape:
            are = " and ".join(f"{each!r} is {file.tensors[each].shape}" for each in origin.names)
            raise file.error(f"tensor {are}, expected {shape} for {name!r}")


def _write_tokenizer(file: GGUFFile, directory: Path) -> None:
    from paged_jax.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_config

    try:
        tokenizer = build_tokenizer(file.metadata)
        _write_json(directory / "tokenizer_config.json", tokenizer_config(file.metadata))
    except ModelLoadError as error:
        raise file.error(str(error)) from error
    except Exception as error:  # the library says no more exactly that it was given nonsense
        raise file.error(f"its tokenizer cannot be built: {error}") from error
    tokenizer.save(str(directory / "tokenizer.json"))
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None:
        (directory / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    file: GGUFFile,
    found: Mapping[str, Origin],
    config: Mapping[str, Any],
    family: Family,
    directory: Path,
    progress: Progress,
) -> None:
    shapes = {name: origin.shape(file) for name, origin in found.items()}
    num_values = sum(math.prod(shape) for shape in shapes.values())
    title = f"converting {file.path.name} to float32 ({4 * num_values / 1e6:.0f} MB)"
    with progress.track(title, 4 * num_values, unit="B") as advance:

        def pieces(name: str) -> Iterator[np.ndarray]:
            order = _row_order(name, shapes[name], config) if family.interleaved else None
            for piece in found[name].pieces(file, order):
                yield piece - np.float32(family.norm_offset) if _is_norm(name) else piece
                advance(piece.nbytes)

        with open(directory / "model.safetensors", "wb") as target:
            write_float32(target, shapes, ((name, pieces(name)) for name in shapes))


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _row_order(name: str, shape: Shape, config: Mapping[str, Any]) -> np.ndarray | None:
    """Which rows of an interleaved file's tensor are the rows as Hugging Face has them.

    None where the order is the same. Rotary embedding turns two rows of a head together. Hugging
    Face keeps the first of all pairs, then the second of all; an interleaved file keeps them
    pair by pair.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    projection = name.split(".")[-2]
    if projection not in heads:
        return None
    num_rows = shape[0]
    pairs = np.arange(num_rows).reshape(config[heads[projection]], -1, 2)
    return pairs.swapaxes(1, 2).reshape(num_rows)
