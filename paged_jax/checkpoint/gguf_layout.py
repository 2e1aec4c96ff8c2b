"""Which tensors of a GGUF file make up each tensor of the folder, and which there must be."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paged_jax.checkpoint.gguf_families import Family
from paged_jax.checkpoint.gguf_file import GGUFFile

__all__ = ["Origin", "Shape", "expected_shapes", "origins"]

Shape = tuple[int, ...]

KINDS = ("weight", "bias")
BARE = ("self_attn.sinks",)  # without ".weight" at Hugging Face


@dataclasses.dataclass(frozen=True)
class Origin:
    """What a tensor of the folder is made of."""

    names: tuple[str, ...]
    """Of the file; the values of several take turns along the last axis."""

    expert: int | None = None
    """Which matrix of a stack; None: the whole tensor."""

    transposed: bool = False
    """The last two axes are the other way round."""

    def shape(self, file: GGUFFile) -> Shape:
        """Of the folder's tensor; of tensors that do not go together, one that none has."""
        found, *others = (file.tensors[name].shape for name in self.names)
        if any(other != found for other in others):
            return ()
        if self.expert is not None:
            return found[1:]
        if self.transposed:
            found = (*found[:-2], found[-1], found[-2])
        return (*found[:-1], len(self.names) * found[-1])

    def pieces(self, file: GGUFFile, order: np.ndarray | None) -> Iterator[np.ndarray]:
        """The values as float32, in the order of rows that is given, if the origin is one tensor.

        Memory: a few rows; where values are rearranged, one matrix of each tensor.
        """
        if self.transposed or len(self.names) > 1:
            yield from self._rearranged(file)
            return
        (name,) = self.names
        if self.expert is not None:
            num_rows = file.tensors[name].shape[1]
            order = np.arange(self.expert * num_rows, (self.expert + 1) * num_rows)
        yield from file.pieces(name, order)

    def _rearranged(self, file: GGUFFile) -> Iterator[np.ndarray]:
        *stack, num_rows, _ = file.tensors[self.names[0]].shape
        for i in range(math.prod(stack)):
            rows = np.arange(i * num_rows, (i + 1) * num_rows)
            matrices = [np.concatenate(list(file.pieces(name, rows))) for name in self.names]
            if self.transposed:
                matrices = [matrix.T for matrix in matrices]
            yield np.stack(matrices, axis=-1)


def origins(file: GGUFFile, family: Family, skipped: tuple[str, ...]) -> dict[str, Origin]:
    """What each tensor of the folder is made of, by its Hugging Face name.

    Raises ModelLoadError for a tensor that the architecture does not have, `skipped` ones aside.
    """
    found: dict[str, Origin] = {}
    for name in file.tensors:
        if name not in skipped:
            found |= _origins_of(name, file, family)
    return found


def _origins_of(name: str, file: GGUFFile, family: Family) -> dict[str, Origin]:
    """The tensors in which the file's tensor is the first, or the only one."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, part, kind = match.groups() if match else (None, "", "")
    if layer is None:
        if part not in family.top_names:
            raise file.error(f"tensor {name!r} is not known in this architecture")
        return {f"{family.top_names[part]}.{kind}": Origin((name,))}
    prefix = family.layer.format(int(layer))
    if part in family.experts and kind == "weight":
        return {
            f"{prefix}{family.experts[part].format(index)}.weight": Origin((name,), expert=index)
            for index in range(file.tensors[name].shape[0])
        }
    for stack, parts in family.stacks.items():
        if part in parts:
            names = tuple(f"blk.{layer}.{each}.{kind}" for each in parts)
            if part != parts[0] or any(each not in file.tensors for each in names):
                return {}  # comes with the first, or the whole is missing
            whole = f"{prefix}{stack}" if kind == "weight" else f"{prefix}{stack}_bias"
            return {whole: Origin(names, transposed=kind == "weight")}
    if part not in family.names:
        raise file.error(f"tensor {name!r} is not known in this architecture")
    known = family.names[part]
    transposed = known in family.transposed and kind == "weight"
    full_name = f"{prefix}{known}" if known in BARE else f"{prefix}{known}.{kind}"
    return {full_name: Origin((name,), transposed=transposed)}


def expected_shapes(
    config: Mapping[str, Any], family: Family, found: Mapping[str, Origin]
) -> dict[str, Shape]:
    """The shape of every tensor of the configuration, by its Hugging Face name.

    `found` are the file's: of the biases that a family may have, the first layer's tell.
    """
    if family.is_rotary:
        E, V, count = (config[key] for key in ("hidden_size", "vocab_size", "num_hidden_layers"))
        layer = _rotary_layer(config, family, found)
        top = {"model.embed_tokens.weight": (V, E), "model.norm.weight": (E,)}
    else:
        E, V, count = (config[key] for key in ("n_embd", "vocab_size", "n_layer"))
        layer = _gpt2_layer(config)
        top = {
            "transformer.wte.weight": (V, E),
            "transformer.wpe.weight": (config["n_positions"], E),
            "transformer.ln_f.weight": (E,),
            "transformer.ln_f.bias": (E,),
        }
    if not config["tie_word_embeddings"]:
        top["lm_head.weight"] = (V, E)
    layers = (family.layer.format(index) for index in range(count))
    return top | {f"{prefix}{name}": shape for prefix in layers for name, shape in layer.items()}


def _gpt2_layer(config: Mapping[str, Any]) -> dict[str, Shape]:
    E, F = config["n_embd"], config["n_inner"]
    matrices = {
        "attn.c_attn": (E, 3 * E),
        "attn.c_proj": (E, E),
        "mlp.c_fc": (E, F),
        "mlp.c_proj": (F, E),
    }
    shapes: dict[str, Shape] = {f"{name}.weight": shape for name, shape in matrices.items()}
    shapes |= {f"{name}.bias": shape[1:] for name, shape in matrices.items()}
    return shapes | {f"{norm}.{kind}": (E,) for norm in ("ln_1", "ln_2") for kind in KINDS}


def _rotary_layer(
    config: Mapping[str, Any], family: Family, found: Mapping[str, Origin]
) -> dict[str, Shape]:
    E, F, D = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    H, K = (config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    by_head = family.architecture != "Olmo2ForCausalLM"  # norms of q and k are of one head
    shapes: dict[str, Shape] = {
        "self_attn.q_proj": (H * D, E),
        "self_attn.k_proj": (K * D, E),
        "self_attn.v_proj": (K * D, E),
        "self_attn.qkv_proj": (H * D + 2 * K * D, E),
        "self_attn.o_proj": (E, H * D),
        "self_attn.q_norm": (D if by_head else H * D,),
        "self_attn.k_norm": (D if by_head else K * D,),
        "self_attn.sinks": (H,),
        "mlp.gate_proj": (F, E),
        "mlp.up_proj": (F, E),
        "mlp.gate_up_proj": (2 * F, E),
        "mlp.down_proj": (E, F),
    }
    layer: dict[str, Shape] = {}
    if family.experts or family.stacks:
        X = config.get("num_experts") or config["num_local_experts"]
        shapes[family.names["ffn_gate_inp"]] = (X, E)
        layer = _experts(X, E, config.get("moe_intermediate_size", F), family)
    for part in family.names.values():
        shape = shapes.get(part, (E,))
        layer[part if part in BARE else f"{part}.weight"] = shape
        if f"{family.layer.format(0)}{part}.bias" in found:
            layer[f"{part}.bias"] = shape[:1]
    return layer


def _experts(X: int, E: int, F: int, family: Family) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for part, name in family.experts.items():
        shape = (E, F) if part == "ffn_down_exps" else (F, E)
        shapes |= {f"{name.format(index)}.weight": shape for index in range(X)}
    for name, parts in family.stacks.items():
        inner, outer = (F, E) if parts == ("ffn_down_exps",) else (E, len(parts) * F)
        shapes |= {name: (X, inner, outer), f"{name}_bias": (X, outer)}
    return shapes
