"""Attention back ends by name. A new accelerator is one file, and one line in this package's
front door."""

from collections.abc import Sequence
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool, KVSpec, PoolLayout
from pallas_kernels.scoring import Scoring


class Backend(Protocol):
    """One way to store a pool and attend over it.

    A hashable value whose methods are pure and may be traced. Callers go through
    `pallas_kernels.ops`, which checks every argument first, so a back end checks only what it
    alone cannot take, and says so by name and value at trace time. Whole blocks are moved without
    it: axis 0 of every array is the block.
    """

    @property
    def name(self) -> str: ...

    def is_made_for(self, device_kind: str) -> bool:
        """Whether `auto` should take it on a device of that kind (`jax.Device.device_kind`)."""

    def for_device(self, device_kind: str) -> "Backend":
        """The same back end, tuned for a device of that kind."""

    def refusal(self, spec: KVSpec) -> str | None:
        """What it cannot take about such a pool, by name and value, or None.

        Looks at the block size, the heads and the dtype; the number of blocks is not known yet.
        """

    def layout(self, spec: KVSpec) -> PoolLayout: ...

    def init_pool(self, spec: KVSpec) -> KVPool: ...

    def write_kv(
        self,
        pool: KVPool,
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        slots: Int[Array, " T"],
        *,
        layer: Int[Array, ""],
    ) -> KVPool: ...

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        """Keys and values of whole blocks, taken from the pool's arrays along axis 0."""

    def paged_attention(
        self,
        q: Float[Array, "T H D"],
        pool: KVPool,
        attn: GroupMetadata,
        scoring: Scoring,
        *,
        layer: Int[Array, ""],
        decode_rows: int,
    ) -> Float[Array, "T H D"]: ...


_backends: dict[str, Backend] = {}


def register_backend(backend: Backend) -> Backend:
    """Makes a back end known by its name; raises `ValueError` if the name is taken."""
    if backend.name == "auto" or backend.name in _backends:
        raise ValueError(f"attention back end name {backend.name!r} is taken")
    _backends[backend.name] = backend
    return backend


def backend_names() -> tuple[str, ...]:
    return tuple(sorted(_backends))


def get_backend(name: str) -> Backend:
    """The back end of that name; raises `ValueError` listing the known ones."""
    if name not in _backends:
        known = ", ".join(backend_names())
        raise ValueError(f"unknown attention back end {name!r}; known: {known}")
    return _backends[name]


def choose_backend(
    name: str, device_kind: str, specs: Sequence[KVSpec] = ()
) -> tuple[Backend, str]:
    """The back end to use, tuned for the device, and why, in words for a log.

    `name` is a back end's name, taken at its word: it then raises for what it cannot do.
    `"auto"` is a back end that is made for the device and takes every pool of `specs`, else
    `xla`. `device_kind` is the device's own description (`jax.Device.device_kind`).
    """
    if name != "auto":
        return get_backend(name).for_device(device_kind), f"{name}: chosen by name"
    reasons = []
    for candidate in _backends.values():
        if not candidate.is_made_for(device_kind):
            continue
        backend = candidate.for_device(device_kind)
        refusals = [refusal for spec in specs if (refusal := backend.refusal(spec))]
        if not refusals:
            reasons.append(f"{backend.name}: auto, made for {device_kind!r}")
            return backend, "; ".join(reversed(reasons))
        reasons.append(f"{backend.name} cannot: {refusals[0]}")
    reasons = reasons or [f"no kernel is written for {device_kind!r}"]
    return get_backend("xla").for_device(device_kind), f"xla: auto, {'; '.join(reasons)}"
