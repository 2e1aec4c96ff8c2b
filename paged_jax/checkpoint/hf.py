"""A model's folder as Hugging Face lays it out: config.json and safetensors, sharded or not."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paged_jax.checkpoint.model_files import model_file, read_json
from paged_jax.checkpoint.safetensors_file import SafetensorsFile
from paged_jax.errors import ModelLoadError

__all__ = ["Checkpoint", "open_checkpoint", "read_config"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Home(NamedTuple):
    """Where a tensor lies."""

    file: SafetensorsFile
    name: str  # that it has in the file


class Checkpoint:
    """The configuration and the tensors of one model; nothing is read before it is asked for."""

    def __init__(self, directory: Path, config: dict, homes: Mapping[str, Home]):
        self.directory = directory
        self.config = config
        self._homes = homes

    def renamed(self, new_name: Callable[[str], str]) -> "Checkpoint":
        """The same tensors under other names. Raises ModelLoadError where two get the same."""
        homes: dict[str, Home] = {}
        for name, home in self._homes.items():
            if (renamed := new_name(name)) in homes:
                raise ModelLoadError(
                    f"{self.directory}: {name!r} and {homes[renamed].name!r} are the same tensor"
                )
            homes[renamed] = home
        return Checkpoint(self.directory, self.config, homes)

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return sorted(self._homes)

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file; bf16 and float8 come as `ml_dtypes` types.

        Raises ModelLoadError if the model has no such tensor.
        """
        home = self._home(name)
        return home.file.tensor(home.name)

    def shape(self, name: str) -> tuple[int, ...]:
        home = self._home(name)
        return home.file.entries[home.name].shape

    def dtype(self, name: str) -> np.dtype:
        home = self._home(name)
        return home.file.entries[home.name].dtype

    def forget_pages(self, name: str) -> None:
        """Give back the memory that reading the tensor's file took; it is read again if needed."""
        self._home(name).file.forget_pages()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors together."""
        entries = (home.file.entries[home.name] for home in self._homes.values())
        return sum(entry.end - entry.begin for entry in entries)

    def _home(self, name: str) -> Home:
        if name in self._homes:
            return self._homes[name]
        near = difflib.get_close_matches(name, self._homes, n=3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ModelLoadError(f"{self.directory}: no tensor {name!r} among {len(self._homes)}{hint}")


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Open a model's folder and check all of it but the values.

    Raises ModelLoadError, naming the file and the tensor, for whatever is missing, cut off,
    inconsistent, pickled, or outside the folder.
    """
    directory = Path(directory)
    config = read_config(directory)
    homes = {name: Home(file, name) for name, file in _tensor_homes(directory).items()}
    return Checkpoint(directory, config, homes)


def read_config(directory: Path) -> dict:
    """The model's config.json. Raises ModelLoadError if there is none that can be read."""
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is not a folder")
    config = read_json(directory, "config.json")
    if config is None:
        raise ModelLoadError(f"{directory} has no config.json")
    return config


def _tensor_homes(directory: Path) -> dict[str, SafetensorsFile]:
    if model_file(directory, SINGLE).exists():
        return _single_file(directory, SINGLE)
    index = read_json(directory, INDEX)
    if index is not None:
        return _sharded(directory, index)
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if len(found) == 1:
        return _single_file(directory, found[0])
    if found:
        raise ModelLoadError(
            f"{directory} has {len(found)} safetensors files and no {INDEX} that says "
            f"which tensor is where: {', '.join(found)}"
        )
    raise _no_weights(directory)


def _single_file(directory: Path, name: str) -> dict[str, SafetensorsFile]:
    file = SafetensorsFile(model_file(directory, name))
    return dict.fromkeys(file.entries, file)


def _sharded(directory: Path, index: dict) -> dict[str, SafetensorsFile]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{directory / INDEX} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ModelLoadError(f"{directory / INDEX}: tensor {tensor!r}: {name!r} is no file")
    names = sorted(set(weight_map.values()))
    paths = {name: model_file(directory, name) for name in names}  # all checked before any is read
    missing = [name for name in names if not paths[name].is_file()]
    if missing:
        raise ModelLoadError(
            f"{directory}: {len(missing)} of the {len(names)} files that {INDEX} names are not "
            f"there: {', '.join(missing)}; copy or download them"
        )
    shards = {name: SafetensorsFile(paths[name]) for name in names}
    homes = {tensor: shards[name] for tensor, name in weight_map.items()}
    for tensor, file in homes.items():
        if tensor not in file.entries:
            others = [name for name, shard in shards.items() if tensor in shard.entries]
            where = f"it is in {', '.join(others)}" if others else "no file has it"
            raise ModelLoadError(
                f"{file.path}: tensor {tensor!r}: {INDEX} says it is here, but {where}"
            )
    return homes


def _no_weights(directory: Path) -> ModelLoadError:
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    if ggufs:
        return ModelLoadError(
            f"{directory} has no *.safetensors; to serve {ggufs[0]} name the file itself: "
            f"{directory / ggufs[0]}"
        )
    if pickles:
        return ModelLoadError(
            f"{directory} holds its weights as pickles ({', '.join(pickles[:3])}), which can run "
            "code when they are read and are never loaded; save them as safetensors instead "
            "(transformers: model.save_pretrained(folder, safe_serialization=True))"
        )
    return ModelLoadError(f"{directory} has no *.safetensors")
