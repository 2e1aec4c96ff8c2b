"""Reading and changing hidden states between a model's layers.

A tap stands behind each layer: what passes it can be captured, and a request's own vector be added
to it. The vectors lie in a table by batch row, a leaf of the device's state, so that steering
compiles nothing and takes no argument of the model's.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from paged_jax.attention import Attend, AttendsByRow, LayerSpec, StepRows, dense
from paged_jax.errors import ModelLoadError

__all__ = ["Steering", "TappedAttend", "add_taps", "check_taps", "tap"]


@jax.tree_util.register_static
class TappedAttend:
    """An `attend` that also knows what happens between the layers. Lives for one trace."""

    def __init__(
        self,
        attend: Attend,
        *,
        capture_layers: Sequence[int] = (),
        steering: "Steering | None" = None,
    ):
        self._attend = attend
        self._capture_layers = tuple(capture_layers)
        self._steering = steering
        self._captured: dict[int, jax.Array] = {}
        self.tapped: set[int] = set()

    def __call__(self, q, k, v, **options: Any) -> jax.Array:
        return self._attend(q, k, v, **options)

    def rows(self, layers: Sequence[LayerSpec]) -> StepRows | Bool[Array, "T T"]:
        """See `attention.AttendsByRow`."""
        assert isinstance(self._attend, AttendsByRow)
        return self._attend.rows(layers)

    def tap(self, hidden: Float[Array, "T E"], layer: int) -> Float[Array, "T E"]:
        """What goes on from behind this layer."""
        if layer in self.tapped:
            raise ModelLoadError(f"tap was called twice with layer={layer}")
        self.tapped.add(layer)
        if self._steering is not None and layer in self._steering.layers:
            hidden = hidden + self._steering.of(layer).astype(hidden.dtype)
        if layer in self._capture_layers:
            self._captured[layer] = hidden
        return hidden

    def captured(self) -> Float[Array, "C T E"] | None:
        """The states behind the layers to capture, in their order; None if there are none.

        Raises ModelLoadError if the model has no tap behind one of them.
        """
        wanted = {*self._capture_layers, *(self._steering.layers if self._steering else ())}
        missing = sorted(wanted - self.tapped)
        if missing:
            raise ModelLoadError(
                f"the model has no tap behind layers {missing}: its layers must be called one by "
                "one from an nnx.List `layers`, or it must call paged_jax.taps.tap(attend, hidden, "
                f"layer=i) itself; there are taps behind {sorted(self.tapped)}"
            )
        if not self._capture_layers:
            return None
        return jnp.stack([self._captured[layer] for layer in self._capture_layers])


class Steering(NamedTuple):
    """Vectors that are added behind layers, for each token of a step its request's own."""

    layers: tuple[int, ...]
    table: Float[Array, "R L E"]  # by batch row
    rows: Int[Array, " T"]

    def of(self, layer: int) -> Float[Array, "T E"]:
        return self.table[self.rows, self.layers.index(layer)]


def tap(attend: Attend, hidden: Float[Array, "T E"], *, layer: int) -> Float[Array, "T E"]:
    """For models that call their layers in a way of their own: what goes on behind layer `layer`.

    x = tap(attend, block(x), layer=i)
    """
    return attend.tap(hidden, layer) if isinstance(attend, TappedAttend) else hidden


class _TappedLayer(nnx.Module):
    """A layer with a tap behind it."""

    def __init__(self, layer: nnx.Module, index: int, attend: TappedAttend):
        self.layer = layer
        self.index = index
        self.attend = attend

    def __call__(self, *args: Any, **options: Any) -> Any:
        result = self.layer(*args, **options)
        if isinstance(result, tuple):
            return (self.attend.tap(result[0], self.index), *result[1:])
        return self.attend.tap(result, self.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def add_taps(module: nnx.Module, attend: Attend) -> None:
    """Put a tap behind each member of `module.layers`, if it is a list of modules."""
    layers = vars(module).get("layers")
    if isinstance(attend, TappedAttend) and isinstance(layers, nnx.List):
        for index, layer in enumerate(layers):
            layers[index] = _TappedLayer(layer, index, attend)


def check_taps(apply: Callable[..., Any], params: Any, layers: Iterable[int]) -> None:
    """ModelLoadError if the model has no tap behind one of these layers. Looks at shapes only."""
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)
    layers = tuple(layers)

    def run(params, token_ids):
        attend = TappedAttend(dense(jnp.zeros_like(token_ids)), capture_layers=layers)
        apply(params, token_ids, token_ids, attend)
        return attend.captured()

    jax.eval_shape(run, params, tokens)
