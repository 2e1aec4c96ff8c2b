"""Trees of parameters: what can be said and done about them without knowing the model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding

from paged_jax.errors import ModelLoadError
from paged_jax.sharding import Split, weight_sharding
from paged_jax.weights import Path, Weight, is_weight, tree_paths

__all__ = ["cast_floats", "laid_out", "leaves_like", "own_copy", "place", "spread"]

MAX_NAMED = 8  # paths of one kind in a message


def cast_floats(params: Any, dtype: str) -> Any:
    """The same tree with every floating leaf in `dtype`; `auto` leaves all as they are."""
    if dtype == "auto":
        return params
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        params,
    )


def own_copy(params: Any, device: jax.Device) -> Any:
    """The same values in buffers of our own: a trainer may donate or overwrite its own."""
    return jax.tree.map(lambda leaf: jax.device_put(leaf, device, may_alias=False), params)


def place(leaf: Any, dtype: Any, sharding: Sharding) -> jax.Array:
    """A copy of an array, from the host or any device, cast and laid out as asked."""
    if leaf.dtype != dtype:
        leaf = leaf.astype(dtype)
    return jax.device_put(leaf, sharding, may_alias=False)


def spread(
    params: Any, splits: Mapping[Path, Split], mesh: Mesh, *, may_alias: bool | None = None
) -> Any:
    """The same tree on a mesh, its weights cut as `splits` says by path; the others are whole on
    every device. Shapes (`jax.ShapeDtypeStruct`) get the shardings.

    What lies there already is not copied, unless it may not be shared with what was given.
    """
    leaves = [
        laid_out(leaf, splits.get(path), mesh, may_alias=may_alias)
        for path, leaf in tree_paths(params).items()
    ]
    return jax.tree.structure(params, is_leaf=is_weight).unflatten(leaves)


def laid_out(leaf: Any, split: Split | None, mesh: Mesh, *, may_alias: bool | None = None) -> Any:
    """A parameter, an array or a `Weight`, on a mesh."""

    def put(array: Any, axis: int | None) -> Any:
        of_array = None if axis is None or split is None else split._replace(axis=axis)
        sharding = weight_sharding(mesh, of_array, np.shape(array))
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        return jax.device_put(array, sharding, may_alias=may_alias)

    axis = None if split is None else split.axis
    return leaf.placed(axis, put) if is_weight(leaf) else put(leaf, axis)


def leaves_like(tree: Any, like: Any) -> list[Any]:
    """The leaves of `tree`, in the order of those of `like`; paths and shapes must agree.

    `tree` is nested dicts and lists of arrays, an `nnx.State`, or an `nnx.Module`, whose `Param`s
    are taken. Numbers in a path may be strings. Raises ModelLoadError with everything that
    differs, by path.
    """
    new = _by_path(_plain(tree))
    old = _by_path(like)
    wrong = {
        "missing": [path for path in old if path not in new],
        "unexpected": [path for path in new if path not in old],
        "of another kind": [
            f"{path} is {difference}"
            for path, leaf in old.items()
            if path in new and (difference := _difference(new[path], leaf))
        ],
    }
    if any(wrong.values()):
        parts = (f"{kind}: {_shortened(found)}" for kind, found in wrong.items() if found)
        raise ModelLoadError("the parameters do not fit the model; " + "; ".join(parts))
    return [new[path] for path in old]


def _plain(tree: Any) -> Any:
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree


def _by_path(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def _difference(new: Any, old: jax.Array | Weight) -> str:
    """What keeps `new` from taking the place of `old`; empty if nothing does."""
    if not isinstance(new, jax.Array | np.ndarray):
        return f"{type(new).__name__}, no array"
    if new.shape != old.shape:
        return f"{list(new.shape)}, must be {list(old.shape)}"
    if jnp.issubdtype(new.dtype, jnp.floating) != jnp.issubdtype(old.dtype, jnp.floating):
        return f"{new.dtype}, must be {old.dtype}"
    return ""


def _shortened(found: Sequence[str]) -> str:
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return ", ".join(found[:MAX_NAMED]) + more
