"""Where arrays live: a mesh of the engine's devices (one, for now) and shardings on it."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.errors import ConfigError

__all__ = ["choose_device", "make_mesh", "on_host", "replicated"]


def choose_device(kind: str) -> jax.Device:
    """The first device of a kind (`cpu`, `gpu`, `tpu`), or JAX's default one for `auto`.

    Raises ConfigError if JAX has none of that kind, rather than falling back to the CPU.
    """
    try:
        return jax.devices(None if kind == "auto" else kind)[0]
    except RuntimeError as error:
        raise ConfigError(
            f"device={kind!r}: JAX finds none ({error}). `paged-jax doctor` says more"
        ) from None


def make_mesh(device: jax.Device) -> Mesh:
    return Mesh([device], ("model",))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def on_host(mesh: Mesh) -> NamedSharding:
    """In the memory of the devices' host that they can reach by themselves."""
    return NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
