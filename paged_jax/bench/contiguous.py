"""One sequence decoded through a contiguous cache: what paged attention is compared with.

Plain jnp over arrays of a fixed length, in the layout that suits the two products best. It has no
blocks and no tables, and can hold one sequence only.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from paged_jax.attention import LayerSpec
from paged_jax.models import ServedModel

__all__ = ["ContiguousCache", "decode_step", "empty_cache"]

MASKED = -1e30


class ContiguousCache(NamedTuple):
    """Keys `[K, D, S]` and values `[K, S, D]` of each layer, S positions long."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def empty_cache(layers: Sequence[LayerSpec], length: int, dtype: Any) -> ContiguousCache:
    return ContiguousCache(
        tuple(jnp.zeros((s.num_kv_heads, s.head_size, length), dtype) for s in layers),
        tuple(jnp.zeros((s.num_kv_heads, length, s.head_size), dtype) for s in layers),
    )


def decode_step(model: ServedModel) -> Callable[..., tuple[ContiguousCache, jax.Array]]:
    """The compiled step `(params, cache, token_id[1], position[1]) -> (cache, hidden[1, E])`.

    The cache is donated. The model must number its layers, that is, not scan over them.
    """

    def step(params, cache, token_id, position):
        attend = _Attend(cache, position[0])
        hidden = model.apply(params, token_id, position, attend)
        return attend.cache(), hidden

    return jax.jit(step, donate_argnums=1)


class _Attend:
    """Writes this layer's key and value, then attends. Lives for one trace."""

    def __init__(self, cache: ContiguousCache, position: Int[Array, ""]):
        self._keys, self._values = list(cache.keys), list(cache.values)
        self._position = position

    def cache(self) -> ContiguousCache:
        return ContiguousCache(tuple(self._keys), tuple(self._values))

    def __call__(
        self,
        q: Float[Array, "1 H D"],
        k: Float[Array, "1 K D"],
        v: Float[Array, "1 K D"],
        *,
        layer: int,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, " H"] | None = None,
    ) -> Float[Array, "1 H D"]:
        position, zero = self._position, jnp.zeros((), self._position.dtype)
        dtype = self._keys[layer].dtype
        keys = lax.dynamic_update_slice(
            self._keys[layer], k[0][:, :, None].astype(dtype), (zero, zero, position)
        )
        values = lax.dynamic_update_slice(
            self._values[layer], v[0][:, None, :].astype(dtype), (zero, position, zero)
        )
        self._keys[layer], self._values[layer] = keys, values

        num_kv_heads, head_size, length = keys.shape
        grouped = q.reshape(num_kv_heads, -1, head_size).astype(dtype)
        scores = jnp.einsum("kgd,kds->kgs", grouped, keys, preferred_element_type=jnp.float32)
        scores = scores * (head_size**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        at = jnp.arange(length, dtype=position.dtype)
        visible = at <= position
        if window is not None:
            visible &= at > position - window
        scores = jnp.where(visible[None, None, :], scores, MASKED)
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1, 1)
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(dtype)
        out = jnp.einsum("kgs,ksd->kgd", weights, values, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)
