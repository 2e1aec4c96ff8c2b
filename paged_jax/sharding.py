"""Where arrays live: a mesh of the engine's devices, and how a weight is cut over it.

The mesh is `kv_heads` times `kv_copies`: devices that differ in the first hold other KV heads,
those that differ in the second hold the same ones, because there are fewer KV heads than devices.
Query heads, and whatever else is cut, are cut over all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.errors import ConfigError
from pallas_kernels import KV_HEADS

__all__ = [
    "ALL_DEVICES",
    "KV_COPIES",
    "Split",
    "choose_device",
    "choose_devices",
    "make_mesh",
    "num_bytes_a_device",
    "num_parts",
    "on_host",
    "replicated",
    "weight_sharding",
]

KV_COPIES = "kv_copies"
ALL_DEVICES = (KV_HEADS, KV_COPIES)  # in the place of one mesh axis


class Split(NamedTuple):
    """The axis along which a weight is cut into equal parts: one for each device, or, `by_kv_head`,
    for each device that holds other KV heads."""

    axis: int
    by_kv_head: bool = False


def choose_device(kind: str) -> jax.Device:
    """The first device of a kind (`cpu`, `gpu`, `tpu`), or of JAX's default one for `auto`.

    Raises ConfigError if JAX has none of that kind, rather than falling back to the CPU.
    """
    return choose_devices(kind, 1)[0]


def choose_devices(kind: str, count: int) -> tuple[jax.Device, ...]:
    """The first devices of a kind. Raises ConfigError if JAX has fewer."""
    try:
        devices = jax.devices(None if kind == "auto" else kind)
    except RuntimeError as error:
        raise ConfigError(
            f"device={kind!r}: JAX finds none ({error}). `paged-jax doctor` says more"
        ) from None
    if len(devices) < count:
        raise ConfigError(
            f"tensor_parallel_size={count} wants as many devices, and JAX finds {len(devices)} "
            f"({devices[0].device_kind})"
        )
    return tuple(devices[:count])


def make_mesh(devices: Sequence[jax.Device], num_kv_shares: int | None = None) -> Mesh:
    """The devices, with the KV heads cut into so many shares; without a number, one for each."""
    shape = (num_kv_shares or len(devices), -1)
    return Mesh(np.array(devices).reshape(shape), ALL_DEVICES)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same in the memory of the devices' host that they can reach by themselves."""
    return sharding.with_memory_kind("pinned_host")


def num_parts(mesh: Mesh, split: Split) -> int:
    return mesh.shape[KV_HEADS] if split.by_kv_head else mesh.size


def weight_sharding(mesh: Mesh, split: Split | None, shape: Sequence[int]) -> NamedSharding:
    """Of a weight of that shape; it is whole on every device if its axis does not divide."""
    if split is None or shape[split.axis] % num_parts(mesh, split):
        return replicated(mesh)
    axes = KV_HEADS if split.by_kv_head else ALL_DEVICES
    return NamedSharding(mesh, PartitionSpec(*(None,) * split.axis, axes))


def num_bytes_a_device(array: jax.Array) -> int:
    """What each device holds of an array that is laid out evenly."""
    return int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
