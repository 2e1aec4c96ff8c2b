"""One model over several devices: which they are, what each holds, and how it gets there."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh, Sharding

from paged_jax.attention import LayerSpec, discover_layers
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError
from paged_jax.models import ServedModel, describe_model, load_model
from paged_jax.progress import Progress
from paged_jax.sharding import KV_COPIES, choose_devices, make_mesh, num_parts, weight_sharding
from paged_jax.weights import Path as ParamPath
from paged_jax.weights import tree_paths
from pallas_kernels import KV_HEADS

__all__ = ["choose_mesh", "describe_mesh", "layers_a_device", "load_on_devices", "num_kv_shares"]

MAX_NAMED = 3  # weights in a line


def load_on_devices(
    directory: Path | str,
    config: EngineConfig,
    *,
    dtype: str,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> ServedModel:
    """`load_model` onto the configured devices, each tensor straight to where its parts belong.

    Raises what `load_model` and `choose_mesh` raise.
    """
    devices = choose_devices(config.device, config.tensor_parallel_size)
    load = partial(
        load_model, directory, dtype=dtype, max_model_len=max_model_len, progress=progress
    )
    if len(devices) == 1:
        with jax.default_device(devices[0]):
            return load()
    model = describe_model(directory, dtype=dtype, max_model_len=max_model_len)
    mesh = choose_mesh(model, config)

    def place(path: ParamPath, shape: tuple[int, ...]) -> Sharding:
        return weight_sharding(mesh, model.splits.get(path), shape)

    return load(sharding=place)


def choose_mesh(model: ServedModel, config: EngineConfig) -> Mesh:
    """The devices to run a model on. Its parameters may be shapes.

    Raises ConfigError where there are fewer devices than `tensor_parallel_size`, where its heads
    cannot be dealt out to so many, or where the model does not say how its weights are cut.
    """
    size = config.tensor_parallel_size
    devices = choose_devices(config.device, size)
    if size == 1:
        return make_mesh(devices)
    if not model.splits:
        raise ConfigError(
            f"tensor_parallel_size={size}: this model does not say how its weights are cut. Build "
            "it of paged_jax.layers with Linear(..., split=...), or give the parameters of an NNX "
            "module their axis, nnx.Param(value, split=paged_jax.sharding.Split(axis)): see "
            "docs/tensor_parallel.md"
        )
    layers = discover_layers(model.apply, model.params, model.num_layers)
    return make_mesh(devices, num_kv_shares(layers, size))


def num_kv_shares(layers: Sequence[LayerSpec], size: int) -> int:
    """How many shares of the KV heads there are: one for each device, or one for each head.

    Raises ConfigError, with the sizes that would do, if the heads cannot be dealt out.
    """
    shares = _shares_of_all(layers, size)
    if shares is None:
        heads = sorted({(layer.num_heads, layer.num_kv_heads) for layer in layers})
        shown = " and ".join(f"num_heads={h} with num_kv_heads={k}" for h, k in heads)
        sizes = [n for n in range(1, heads[0][0] + 1) if _shares_of_all(layers, n) is not None]
        raise ConfigError(
            f"tensor_parallel_size={size} does not fit {shown}: it must divide num_heads, and "
            "divide num_kv_heads or be a multiple of it. This model takes "
            f"{', '.join(map(str, sizes))}"
        )
    return shares


def _shares_of_all(layers: Sequence[LayerSpec], size: int) -> int | None:
    """None if the heads of some layer cannot be dealt out, or only unlike those of another."""
    shares = {_shares(layer, size) for layer in layers}
    return shares.pop() if len(shares) == 1 else None


def _shares(layer: LayerSpec, size: int) -> int | None:
    """A device's query heads must find there all of the KV heads that they read."""
    if layer.num_heads % size:
        return None
    if layer.num_kv_heads % size == 0:
        return size
    return layer.num_kv_heads if size % layer.num_kv_heads == 0 else None


def layers_a_device(layers: Sequence[LayerSpec], mesh: Mesh) -> tuple[LayerSpec, ...]:
    """What each device has to do of every layer."""
    return tuple(
        layer._replace(
            num_heads=layer.num_heads // mesh.size,
            num_kv_heads=layer.num_kv_heads // mesh.shape[KV_HEADS],
        )
        for layer in layers
    )


def describe_mesh(model: ServedModel, layers: Sequence[LayerSpec], mesh: Mesh) -> Iterator[str]:
    """Lines for a log; none if there is one device. `layers` are those of one device."""
    if mesh.size == 1:
        return
    heads = sorted({(layer.num_heads, layer.num_kv_heads) for layer in layers})
    shown = " or ".join(f"{h} query and {k} KV heads" for h, k in heads)
    kind = mesh.devices.flat[0].device_kind
    copies = mesh.shape[KV_COPIES]
    shared = f"; {copies} hold the same KV heads" if copies > 1 else ""
    yield f"tensor parallel over {mesh.size} devices ({kind}), each with {shown} of a layer{shared}"
    undivided = [
        f"{'.'.join(map(str, path))} {list(leaf.shape)}"
        for path, leaf in tree_paths(model.params).items()
        if (split := model.splits.get(path)) and leaf.shape[split.axis] % num_parts(mesh, split)
    ]
    if undivided:
        more = f" and {len(undivided) - MAX_NAMED} more" if len(undivided) > MAX_NAMED else ""
        yield (
            f"whole on every device, since {mesh.size} does not divide them: "
            f"{', '.join(undivided[:MAX_NAMED])}{more}"
        )
