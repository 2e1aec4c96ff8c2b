"""Weights that are more than one array: they stand where a matrix `[out, in]` stands in the tree of
parameters, and know how to multiply. `paged_jax.layers.linear` asks them to."""

import abc
from collections.abc import Callable
from typing import Any, Self

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

__all__ = ["Path", "Weight", "is_weight", "tree_paths"]

Path = tuple[str | int, ...]  # of a parameter in its tree


class Weight(abc.ABC):
    """A matrix `[out, in]` in a form of its own, or a stack of them; a pytree of arrays."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(out, in), of a stack (number, out, in)"""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """What it is multiplied in."""

    @abc.abstractmethod
    def multiply(self, x: Float[Array, "T E"], dtype: DTypeLike) -> Float[Array, "T F"]:
        """`x @ w.T` in `dtype`, of one matrix."""

    @abc.abstractmethod
    def replaced(self, leaf: Any) -> Self:
        """The same form of other values, given as one array of its shape."""

    @abc.abstractmethod
    def placed(self, axis: int | None, put: Callable[[Any, int | None], Any]) -> Self:
        """The same of arrays that `put(array, axis)` has put onto devices. Each comes with its own
        axis to cut if the matrix is cut along `axis`, or with None if it stays whole."""

    def __getitem__(self, index: Any) -> Self:
        """Flax reads a parameter as `param[...]`."""
        assert index is Ellipsis, f"a weight is taken whole, not by {index!r}"
        return self


def is_weight(leaf: Any) -> bool:
    return isinstance(leaf, Weight)


def tree_paths(tree: Any) -> dict[Path, Any]:
    """The leaves of nested dicts and lists by path; a `Weight` is one leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)
    return {tuple(_plain(key) for key in path): leaf for path, leaf in flat}


def _plain(key: Any) -> str | int:
    if isinstance(key, jax.tree_util.DictKey):
        return key.key
    if isinstance(key, jax.tree_util.SequenceKey):
        return key.idx
    return str(key)
