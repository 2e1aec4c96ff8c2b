"""Low-rank adapters, many at once: every token of a batch is computed with its own, or with none.

(LoRA: Hu et al. 2021, arXiv:2106.09685.) The adapters of a matrix lie side by side in slots:
`down [N*r, in]`, `up [N*r, out]`. All are applied to every token in two products, and between them
what is not the token's own is set to zero; with ranks as small as they are, that costs less than
gathering matrices, and a batch without adapters skips both.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.layers import linear
from paged_jax.weights import Path, Weight, is_weight, tree_paths

__all__ = ["Adapter", "LoraWeight", "add_slots", "fill_slot", "with_adapter_ids"]


class Adapter(NamedTuple):
    """One adapter in host memory. `up` has its scaling in it."""

    rank: int
    matrices: Mapping[Path, tuple[np.ndarray, np.ndarray]]  # (down [r, in], up [out, r])


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["base", "down", "up", "adapter_ids"],
    meta_fields=["num_slots"],
)
@dataclass(frozen=True)
class LoraWeight(Weight):
    """A matrix with N adapters. Slot i serves the tokens whose id is i + 1; 0 is the base."""

    base: Any  # an array [F, E], or another Weight
    down: jax.Array  # [N*r, E]
    up: jax.Array  # [N*r, F]
    adapter_ids: jax.Array | None  # i32[T] of the step being traced; None: no token has one
    num_slots: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.base.shape

    @property
    def dtype(self) -> Any:
        return self.base.dtype

    def multiply(self, x: Float[Array, "T E"], dtype: DTypeLike) -> Float[Array, "T F"]:
        """A token without an adapter gets what the base alone gives, bit for bit."""
        y = linear(x, self.base, dtype=dtype)
        ids = self.adapter_ids
        if ids is None:
            return y
        return lax.cond(jnp.any(ids > 0), lambda: self._added(x, y, ids), lambda: y)

    def _added(
        self, x: Float[Array, "T E"], y: Float[Array, "T F"], ids: Int[Array, " T"]
    ) -> Float[Array, "T F"]:
        rank = self.down.shape[0] // self.num_slots
        owner = jnp.arange(self.down.shape[0], dtype=jnp.int32) // rank + 1
        inner = jnp.einsum("te,ne->tn", x, self.down, preferred_element_type=jnp.float32)
        inner = jnp.where(ids[:, None] == owner[None, :], inner, 0.0).astype(self.up.dtype)
        delta = jnp.einsum("tn,nf->tf", inner, self.up, preferred_element_type=jnp.float32)
        return jnp.where(ids[:, None] > 0, (y + delta).astype(y.dtype), y)

    def replaced(self, leaf: Any) -> Self:
        base = self.base.replaced(leaf) if is_weight(self.base) else leaf
        return replace(self, base=base)

    def placed(self, axis: int | None, put: Callable[[Any, int | None], Any]) -> Self:
        base = self.base.placed(axis, put) if is_weight(self.base) else put(self.base, axis)
        down, up = put(self.down, 1 if axis == 1 else None), put(self.up, 1 if axis == 0 else None)
        return replace(self, base=base, down=down, up=up)


def add_slots(params: Any, linears: Iterable[Path], *, num_slots: int, rank: int) -> Any:
    """The same tree with room for adapters at these matrices."""
    targets = set(linears)

    def wrapped(path: Any, leaf: Any) -> Any:
        if path not in targets:
            return leaf
        rows, columns = leaf.shape
        down = jnp.zeros((num_slots * rank, columns), leaf.dtype)
        up = jnp.zeros((num_slots * rank, rows), leaf.dtype)
        return LoraWeight(leaf, down, up, None, num_slots)

    flat = tree_paths(params)
    leaves = [wrapped(path, leaf) for path, leaf in flat.items()]
    return jax.tree.structure(params, is_leaf=is_weight).unflatten(leaves)


def with_adapter_ids(params: Any, adapter_ids: Int[Array, " T"] | None) -> Any:
    """The tree that a step with these tokens multiplies with."""
    return jax.tree.map(
        lambda leaf: (
            replace(leaf, adapter_ids=adapter_ids) if isinstance(leaf, LoraWeight) else leaf
        ),
        params,
        is_leaf=is_weight,
    )


@partial(jax.jit, donate_argnums=(0, 1))
def _put(down, up, new_down, new_up, start):
    zero = jnp.zeros_like(start)
    return (
        lax.dynamic_update_slice(down, new_down, (start, zero)),
        lax.dynamic_update_slice(up, new_up, (start, zero)),
    )


def fill_slot(params: Any, slot: int, adapter: Adapter | None) -> Any:
    """The same tree with an adapter in a slot, or with the slot empty; donates what was there."""
    matrices = {} if adapter is None else adapter.matrices

    def filled(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, LoraWeight):
            return leaf
        rank = leaf.down.shape[0] // leaf.num_slots
        down, up = np.zeros((rank, leaf.shape[1]), np.float32), np.zeros((rank, leaf.shape[0]))
        if path in matrices:
            new_down, new_up = matrices[path]
            down[: len(new_down)], up[: len(new_down)] = new_down, new_up.T
        dtype = leaf.down.dtype
        places = (leaf.down.sharding, leaf.up.sharding)
        new = _put(leaf.down, leaf.up, down.astype(dtype), up.astype(dtype), np.int32(slot * rank))
        down, up = jax.device_put(new, places)  # where they are already, unless XLA thought better
        return replace(leaf, down=down, up=up)

    leaves = [filled(path, leaf) for path, leaf in tree_paths(params).items()]
    return jax.tree.structure(params, is_leaf=is_weight).unflatten(leaves)
