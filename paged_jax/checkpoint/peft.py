"""LoRA adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paged_jax.checkpoint.safetensors_file import SafetensorsFile
from paged_jax.errors import ModelLoadError
from paged_jax.lora import Adapter
from paged_jax.weights import Path as ParamPath

__all__ = ["adapter_folders", "find_adapter", "read_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."  # of every tensor's name
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
MAX_NAMED = 8

# What changes the mathematics and is not implemented: each must be absent, or one of these.
ONLY: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}


def find_adapter(root: Path, name: str) -> Path:
    """The folder of the adapter `name` in `root`. Nothing outside of `root` is looked at.

    Raises ModelLoadError for a name that is no plain file name, a link that leads out, or nothing.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ModelLoadError(f"{name!r} is no adapter's name: a folder's plain name is")
    folders = adapter_folders(root)
    if name not in folders:
        known = ", ".join(folders) or "none"
        raise ModelLoadError(f"there is no adapter {name!r} in lora_dir; there are: {known}")
    return root / name


def adapter_folders(root: Path) -> list[str]:
    """Names of the folders in `root` that hold an adapter and lie there in truth."""
    try:
        found = sorted(path.name for path in root.iterdir() if (path / CONFIG).is_file())
    except OSError as error:
        raise ModelLoadError(f"{root} cannot be read: {error.strerror}") from error
    real = root.resolve()
    return [name for name in found if (root / name).resolve() == real / name]


def read_adapter(
    directory: Path | str, targets: Mapping[ParamPath, tuple[int, int]], *, max_rank: int
) -> Adapter:
    """Read an adapter of a model whose matrices `targets` have these shapes [out, in].

    Raises ModelLoadError for files that are damaged or lead out of the folder, for kinds of
    adapters that are not plain LoRA, and for targets, shapes and ranks that do not fit.
    """
    directory = Path(directory)
    config = _read_config(directory)
    for key, allowed in ONLY.items():
        if config.get(key) not in allowed:
            choices = " or ".join(map(repr, allowed))
            raise ModelLoadError(
                f"{directory.name}/{CONFIG}: {key}={config.get(key)!r} is not supported, only "
                f"{choices}"
            )
    file = SafetensorsFile(_inside(directory, WEIGHTS))
    modules = _modules(directory, file)
    known = {_dotted(path): path for path in targets}
    unknown = sorted(set(modules) - set(known))
    if unknown:
        kinds = sorted({name.rpartition(".")[2] for name in known})
        raise ModelLoadError(
            f"{directory.name}: the adapter has matrices for {_shortened(unknown)}, where this "
            f"model takes none; it takes them for {', '.join(kinds)}"
        )
    matrices, largest = {}, 0
    for name in modules:
        path = known[name]
        down, up = (_float32(file, modules[name] + end) for end in (DOWN, UP))
        rank = _check_shapes(directory, name, down, up, targets[path])
        if rank > max_rank:
            raise ModelLoadError(
                f"{directory.name}: rank {rank} of {name} is more than max_lora_rank={max_rank}: "
                "start the engine with a larger one"
            )
        matrices[path] = (down, up * _scaling(directory, config, name, rank))
        largest = max(largest, rank)
    return Adapter(largest, matrices)


def _inside(directory: Path, name: str) -> Path:
    """A file of the folder; ModelLoadError if it is a link that leads out of it."""
    path = directory / name
    if path.resolve().parent != directory.resolve():
        raise ModelLoadError(f"{directory.name}/{name} is a link that leads out of its folder")
    return path


def _read_config(directory: Path) -> dict[str, Any]:
    path = _inside(directory, CONFIG)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
        config = json.loads(text)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return config


def _modules(directory: Path, file: SafetensorsFile) -> dict[str, str]:
    """Dotted paths of the adapted modules, with what their tensors' names begin with."""
    found: dict[str, set[str]] = {}
    others = []
    for name in file.entries:
        end = next((end for end in (DOWN, UP) if name.endswith(end)), None)
        if end is None or not name.startswith(PREFIX):
            others.append(name)
        else:
            found.setdefault(name.removesuffix(end), set()).add(end)
    incomplete = sorted(stem for stem, ends in found.items() if ends != {DOWN, UP})
    if others or incomplete or not found:
        raise ModelLoadError(
            f"{file.path}: not every tensor is one of a pair {PREFIX}NAME{DOWN} and {UP}: "
            + (_shortened(sorted(others) + incomplete) or "there is none")
        )
    return {stem.removeprefix(PREFIX).removeprefix("model."): stem for stem in found}


def _dotted(path: ParamPath) -> str:
    return ".".join(map(str, path[:-1]))


def _float32(file: SafetensorsFile, name: str) -> np.ndarray:
    return file.tensor(name).astype(np.float32)


def _check_shapes(
    directory: Path, name: str, down: np.ndarray, up: np.ndarray, shape: tuple[int, int]
) -> int:
    rank = down.shape[0] if down.ndim else 0
    if rank == 0 or down.shape != (rank, shape[1]) or up.shape != (shape[0], rank):
        raise ModelLoadError(
            f"{directory.name}: {name} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, "
            f"the model's matrix {list(shape)} wants [r, {shape[1]}] and [{shape[0]}, r]"
        )
    return rank


def _scaling(directory: Path, config: Mapping[str, Any], name: str, rank: int) -> np.float32:
    """alpha / r, or alpha / sqrt(r) where `use_rslora` is set; a pattern may name its own alpha."""
    alpha = config.get("lora_alpha")
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if name == pattern or name.endswith("." + pattern):
            alpha = own
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelLoadError(f"{directory.name}/{CONFIG}: lora_alpha={alpha!r} must be a number")
    return np.float32(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
