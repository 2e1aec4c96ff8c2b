"""The LoRA adapters of an engine, by name: which slot of the device holds which."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from paged_jax.checkpoint.peft import adapter_folders, find_adapter, read_adapter
from paged_jax.errors import ConfigError, ModelLoadError
from paged_jax.lora import Adapter, LoraWeight, add_slots
from paged_jax.models import ServedModel, layer_matrices
from paged_jax.weights import Path as ParamPath
from paged_jax.weights import tree_paths

__all__ = ["Adapters", "LoadedAdapter", "adapter_targets", "with_adapter_slots"]


def with_adapter_slots(model: ServedModel, num_slots: int, rank: int) -> ServedModel:
    """The model with room for adapters. ConfigError if none of its matrices can have one."""
    paths = layer_matrices(model)
    if not paths:
        raise ConfigError(
            "enable_lora finds no matrix to adapt: it takes those of paged_jax.layers.Linear, and "
            "this model multiplies with none"
        )
    return model._replace(params=add_slots(model.params, paths, num_slots=num_slots, rank=rank))


def adapter_targets(params: Any) -> dict[ParamPath, tuple[int, int]]:
    """Matrices that have room for adapters, with their shapes."""
    return {
        path: leaf.shape
        for path, leaf in tree_paths(params).items()
        if isinstance(leaf, LoraWeight)
    }


class LoadedAdapter(NamedTuple):
    """`slot_id` is what the device knows it by, from 1 on. `key` is of this loading alone: what it
    wrote into the cache is not that of another adapter of the same name."""

    slot_id: int
    key: int


class Adapters:
    """Owned by the engine's thread; `names` may be read by any."""

    def __init__(
        self,
        targets: Mapping[ParamPath, tuple[int, int]],
        *,
        num_slots: int,
        max_rank: int,
        root: Path | None,
        fill: Callable[[int, Adapter | None], None],
    ):
        """`root` is the folder that names are looked up in; `fill` puts an adapter into a slot."""
        self._targets = targets
        self._max_rank = max_rank
        self._root = root
        self._fill = fill
        self._free = list(range(1, num_slots + 1))
        self._num_slots = num_slots
        self._num_loaded = 0
        self._loaded: Mapping[str, LoadedAdapter] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    def find(self, name: str) -> LoadedAdapter | None:
        return self._loaded.get(name)

    def names_in_root(self) -> list[str]:
        """Folders of the root that hold an adapter."""
        return [] if self._root is None else adapter_folders(self._root)

    def load(self, name: str, directory: Path | str | None = None) -> None:
        """Read an adapter and put it into a free slot, under a name that is not in use.

        Without a directory it is the folder of that name in the root. Raises ModelLoadError for
        what cannot be read or does not fit, ConfigError where there is no room.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter needs a name, got {name!r}")
        if name in self._loaded:
            raise ConfigError(f"the adapter {name!r} is loaded already: unload it first")
        if not self._free:
            raise ConfigError(
                f"max_loras={self._num_slots} adapters are loaded ({', '.join(self._loaded)}): "
                "unload one, or start the engine with more"
            )
        if directory is None:
            if self._root is None:
                raise ModelLoadError(
                    f"the adapter {name!r} needs a directory: no lora_dir is configured"
                )
            directory = find_adapter(self._root, name)
        adapter = read_adapter(directory, self._targets, max_rank=self._max_rank)
        slot_id = self._free[0]
        self._fill(slot_id - 1, adapter)
        del self._free[0]
        self._num_loaded += 1
        self._loaded = {**self._loaded, name: LoadedAdapter(slot_id, self._num_loaded)}

    def unload(self, name: str) -> None:
        """Free an adapter's slot. ConfigError if there is none of that name."""
        found = self._loaded.get(name)
        if found is None:
            raise ConfigError(f"no adapter {name!r} is loaded; there are: {self._shown()}")
        self._loaded = {key: value for key, value in self._loaded.items() if key != name}
        self._free.append(found.slot_id)

    def _shown(self) -> str:
        return ", ".join(self._loaded) or "none"
