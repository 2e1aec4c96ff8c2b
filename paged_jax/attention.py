"""How a model attends: the hook it calls, and what stands behind it while training or serving.

A model calls `attend` once in each layer and never sees blocks or caches. `dense` is the plain
form, `PagedAttend` the one with a KV cache, and `discover_layers` reads a model's shapes by
watching the calls it makes.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from paged_jax.errors import ModelLoadError
from paged_jax.packing import pack, unpack
from paged_jax.sharding import ALL_DEVICES
from pallas_kernels import (
    KV_HEADS,
    AttentionMetadata,
    Backend,
    KVPool,
    paged_attention,
    read_kv,
    write_kv,
)

__all__ = [
    "Attend",
    "AttendsByRow",
    "LayerSpec",
    "PagedAttend",
    "StepRows",
    "dense",
    "discover_layers",
]

MASKED = -1e30  # finite: a row without a key must not become NaN


@runtime_checkable
class Attend(Protocol):
    """Attention of one layer over the flat list of T tokens of a step.

    Query head `h` reads KV head `h // (H // K)`. A token sees the tokens of its own sequence up
    to and including itself; with `window` only the last `window` of them, itself included.
    Scores are `scale * q.k` (default `D ** -0.5`), then `softcap * tanh(score / softcap)`.
    `sinks` are one extra logit a head that takes part in the softmax and carries no value.
    """

    def __call__(
        self,
        q: Float[Array, "T H D"],
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        *,
        layer: int | Int[Array, ""],
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Float[Array, " H"] | None = None,
    ) -> Float[Array, "T H D"]: ...


def dense(segment_ids: Int[Array, " T"]) -> Attend:
    """Attend without a cache: causal within equal `segment_ids`, softmax in float32.

    For training, and the oracle that serving is held against. Memory grows with `H * T * T`.
    The tokens of one segment stand next to each other, in order.
    """
    return _DenseAttend(segment_ids)


# Static, as all that a model may be given for `attend`: it can be an argument of what is
# rematerialised, scanned or compiled, beside arrays.
@jax.tree_util.register_static
class _DenseAttend:
    def __init__(self, segment_ids: Int[Array, " T"]):
        self._segment_ids = segment_ids

    def rows(self, layers: Sequence["LayerSpec"]) -> Bool[Array, "T T"]:
        return _visible(self._segment_ids, None)

    def __call__(self, q, k, v, *, layer, scale=None, window=None, softcap=None, sinks=None):
        del layer
        num_tokens, num_heads, head_size = q.shape
        num_kv_heads = k.shape[1]
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
        scale = head_size**-0.5 if scale is None else scale

        grouped = q.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_size)
        scores = scale * jnp.einsum("tkgd,skd->kgts", grouped, k, preferred_element_type=_F32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        visible = _visible(self._segment_ids, window)[None, None]
        scores = jnp.where(visible, scores, MASKED)

        top = scores.max(axis=-1, keepdims=True)
        if sinks is not None:
            sinks = sinks.astype(_F32).reshape(num_kv_heads, -1, 1, 1)
            top = jnp.maximum(top, sinks)
        weights = jnp.where(visible, jnp.exp(scores - top), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks - top)
        out = jnp.einsum("kgts,skd->tkgd", weights / total, v, preferred_element_type=_F32)
        return out.reshape(q.shape).astype(q.dtype)


_F32 = jnp.float32


def _visible(segment_ids: Int[Array, " T"], window: int | None) -> Bool[Array, "T T"]:
    """May the query of row t see the key of column s?"""
    token = jnp.arange(segment_ids.shape[0])
    behind = token[:, None] - token[None, :]
    visible = (segment_ids[:, None] == segment_ids[None, :]) & (behind >= 0)
    return visible if window is None else visible & (behind < window)


@jax.tree_util.register_static
class PagedAttend:
    """Attend through the KV cache of a step: writes this layer's keys and values, then reads.

    Lives for one trace. The pools are held in `jax.new_ref` cells, so that the call also works
    where a Python side effect would leak: with a traced `layer` inside `lax.scan`, `nn.scan` and
    `jax.checkpoint`. The caller donates the pools it passed in and takes `pools()` in return.
    """

    def __init__(
        self,
        pools: Sequence[KVPool],
        attn: AttentionMetadata,
        *,
        layer_slots: Sequence[tuple[int, int]],
        decode_rows: int,
        backend: Backend,
        mesh: Mesh | None = None,
        packed: bool = False,
    ) -> None:
        """`pools[g]` is block group g's pool; `layer_slots[layer]` is (group, index in it).

        If the model's tokens are `packed` (see `paged_jax.packing`), a call takes and gives C of
        them, where `attn` speaks of D + C.

        Over a mesh of several devices each one attends with its own heads, to its own part of the
        pools: their specs say what one device holds.
        """
        self._pools = tuple(pools)
        self._refs = tuple(tuple(map(jax.new_ref, pool.arrays)) for pool in pools)
        self._attn = jax.tree.map(jnp.asarray, attn)
        self._layer_slots = tuple(layer_slots)
        self._decode_rows = decode_rows
        self._backend = backend
        self._mesh = None if mesh is None or mesh.size == 1 else mesh
        self._packed = packed

    def __call__(self, q, k, v, *, layer, scale=None, window=None, softcap=None, sinks=None):
        group, index = self._slot(layer)
        pool, out = _write_and_attend(
            self._read(group),
            q,
            k,
            v,
            self._attn,
            jnp.asarray(index, jnp.int32),
            sinks,
            group=group,
            decode_rows=self._decode_rows,
            scale=scale,
            window=window,
            softcap=softcap,
            backend=self._backend,
            mesh=self._mesh,
            packed=self._packed,
        )
        self._write(group, pool)
        return out

    def rows(self, layers: Sequence["LayerSpec"]) -> "StepRows":
        if self._mesh is not None:
            raise ModelLoadError("a model that attends by itself runs on one device")
        attn = self._attn
        owned = jnp.diff(attn.query_start_loc).at[: self._decode_rows].set(1)
        past_lens = jnp.maximum(attn.seq_lens - owned, 0)
        pools = self.pools()

        def read(layer: int, rows: Array) -> tuple[Array, Array]:
            group, index = self._slot(layer)
            tables = attn.block_tables[group][rows]
            return read_kv(pools[group], tables, layer=index, backend=self._backend)

        return StepRows(
            self._decode_rows,
            attn.query_start_loc,
            past_lens,
            read,
            self._write_layer,
            self.unpack,
            self.pack,
        )

    def _write_layer(self, layer: int, k: Array, v: Array) -> None:
        group, index = self._slot(layer)
        pool = self._read(group)
        pool = write_kv(pool, k, v, self._attn, layer=index, group=group, backend=self._backend)
        self._write(group, pool)

    def pack(self, x: Array) -> Array:
        """An array with an entry for each token of the step as the model is given it."""
        if not self._packed:
            return x
        return pack(x, self._attn.num_decodes, decode_rows=self._decode_rows)

    def unpack(self, x: Array) -> Array:
        """And back, from what the model gives."""
        if not self._packed:
            return x
        return unpack(x, self._attn.num_decodes, decode_rows=self._decode_rows)

    def pools(self) -> tuple[KVPool, ...]:
        """The pools with everything that was written so far, one of each block group."""
        return tuple(self._read(group) for group in range(len(self._refs)))

    def _read(self, group: int) -> KVPool:
        arrays = tuple(ref[...] for ref in self._refs[group])
        return dataclasses.replace(self._pools[group], arrays=arrays)

    def _write(self, group: int, pool: KVPool) -> None:
        for ref, array in zip(self._refs[group], pool.arrays, strict=True):
            ref[...] = array

    def _slot(self, layer: int | Array) -> tuple[int, int | Array]:
        number = _static_layer(layer)
        if number is not None:
            return self._layer_slots[number]
        groups = {group for group, _ in self._layer_slots}
        if len(groups) > 1:
            raise ValueError(
                f"`layer` is traced, but the layers lie in block groups {sorted(groups)}: a "
                "scanned model needs the same window in every layer"
            )
        indices = np.array([index for _, index in self._layer_slots], np.int32)
        return groups.pop(), jnp.asarray(indices)[layer]


class StepRows(NamedTuple):
    """A step by sequences, for a model that attends by itself.

    The first `decode_rows` rows own one token each, the first of the step, padding included; row
    `r` of the others owns tokens `starts[r]` to `starts[r + 1]`.
    """

    decode_rows: int
    starts: Int[Array, " S_plus_1"]
    past_lens: Int[Array, " S"]
    """Tokens of each row that are cached already."""
    read: Callable[[int, Int[Array, " R"]], tuple[Float[Array, "R J K D"], Float[Array, "R J K D"]]]
    """(layer, rows) -> keys and values cached before the step, by position; past a row's end they
    may be anything."""
    write: Callable[[int, Float[Array, "T K D"], Float[Array, "T K D"]], None]
    """(layer, keys, values): puts those of the step's tokens into the cache."""
    unpack: Callable[[Array], Array]
    """From an entry for each token as the model is given them to one for each as rows own them."""
    pack: Callable[[Array], Array]
    """And back."""


@runtime_checkable
class AttendsByRow(Protocol):
    """An `attend` for models that attend by themselves, over a cache that they are given."""

    def rows(self, layers: Sequence["LayerSpec"]) -> StepRows | Bool[Array, "T T"]:
        """The step by sequences; where there is no cache, which tokens each token may see.

        `layers` are those that the model caches, in order.
        """


# Under jit, with the layer as an array, so that layers that are alike are traced once for all.
@partial(
    jax.jit,
    static_argnames=(
        *("group", "decode_rows", "scale", "window", "softcap", "backend", "mesh", "packed"),
    ),
)
def _write_and_attend(
    pool: KVPool,
    q: Array,
    k: Array,
    v: Array,
    attn: AttentionMetadata,
    layer: Array,
    sinks: Array | None,
    *,
    group: int,
    decode_rows: int,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    backend: Backend,
    mesh: Mesh | None,
    packed: bool,
) -> tuple[KVPool, Array]:
    """The two halves of paged attention in the order in which they must run."""

    def on_one_device(pool, q, k, v, attn, layer, sinks):
        written = attn
        if packed:
            q = unpack(q, attn.num_decodes, decode_rows=decode_rows)
            slots = pack(attn.slot_mapping.T, attn.num_decodes, decode_rows=decode_rows)
            written = attn._replace(slot_mapping=slots.T)
        pool = write_kv(pool, k, v, written, layer=layer, group=group, backend=backend)
        out = paged_attention(
            q,
            pool,
            attn,
            layer=layer,
            decode_rows=decode_rows,
            group=group,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            backend=backend,
        )
        return pool, pack(out, attn.num_decodes, decode_rows=decode_rows) if packed else out

    if mesh is None:
        return on_one_device(pool, q, k, v, attn, layer, sinks)
    # No device needs what another one holds: the heads are cut, and nothing else.
    all_of_it, of_pool = PartitionSpec(), backend.layout(pool.spec).partition_specs
    of_heads, of_kv_heads = PartitionSpec(None, ALL_DEVICES), PartitionSpec(None, KV_HEADS)
    of_q_k_v, of_sinks = (of_heads, of_kv_heads, of_kv_heads), PartitionSpec(ALL_DEVICES)
    pool_specs = KVPool(of_pool, pool.spec)
    on_all = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=(pool_specs, *of_q_k_v, all_of_it, all_of_it, of_sinks),
        out_specs=(pool_specs, of_heads),
        check_vma=False,  # devices with the same KV heads write the same into their copies
    )
    return on_all(pool, q, k, v, attn, layer, sinks)


class LayerSpec(NamedTuple):
    """What one layer's call of `attend` says about its attention and its KV cache."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None  # tokens, the query's own included; None sees everything
    dtype: jnp.dtype  # of keys and values


def discover_layers(
    apply: Callable[..., Any], params: Any, num_layers: int | None = None
) -> tuple[LayerSpec, ...]:
    """The attention layers of `apply(params, token_ids, positions, attend)`, in order.

    Runs the model on shapes alone (`jax.eval_shape`) and records its calls of `attend`. A
    scanned model traces its layer once and passes a traced `layer`: it must say `num_layers`.
    Raises ModelLoadError, saying how to mend it, if the calls do not describe a stack of layers.
    """
    recorder = _Recorder()
    tokens = jax.ShapeDtypeStruct((_TRACE_LEN,), jnp.int32)
    jax.eval_shape(lambda p, ids, pos: apply(p, ids, pos, recorder), params, tokens, tokens)
    return recorder.layers(num_layers)


_TRACE_LEN = 8  # tokens; any length will do


@jax.tree_util.register_static
class _Recorder:
    """An `attend` that notes the shapes it is called with and returns zeros."""

    def __init__(self) -> None:
        self._numbered: dict[int, LayerSpec] = {}
        self._traced: set[LayerSpec] = set()

    def __call__(self, q, k, v, *, layer, scale=None, window=None, softcap=None, sinks=None):
        spec = _layer_spec(q, k, v, window)
        number = _static_layer(layer)
        if number is None:
            self._traced.add(spec)
        elif number in self._numbered:
            raise ModelLoadError(
                f"attend was called twice with layer={number}: each layer needs its own number, "
                "since its keys and values are stored under it"
            )
        else:
            self._numbered[number] = spec
        return jnp.zeros_like(q)

    def rows(self, layers: Sequence[LayerSpec]) -> Bool[Array, "T T"]:
        self._numbered |= dict(enumerate(layers))
        return jnp.ones((_TRACE_LEN, _TRACE_LEN), jnp.bool_)

    def layers(self, num_layers: int | None) -> tuple[LayerSpec, ...]:
        if not self._numbered and not self._traced:
            raise ModelLoadError(
                "the model never called attend(q, k, v, layer=...): its attention must go through "
                "the `attend` argument, or it has no KV cache"
            )
        if self._traced and num_layers is None:
            raise ModelLoadError(
                "the model passes a traced `layer` to attend (it scans over its layers), so its "
                "depth cannot be seen: say num_layers=..."
            )
        if len(self._traced) > 1:
            raise ModelLoadError(
                "the scanned layers differ from each other: "
                + " and ".join(map(str, sorted(self._traced, key=str)))
                + "; unroll them, or number them with Python integers"
            )
        count = len(self._numbered) if num_layers is None else num_layers
        everywhere = {number: spec for spec in self._traced for number in range(count)}
        found = everywhere | self._numbered
        missing = [number for number in range(count) if number not in found]
        beyond = sorted(set(found) - set(range(count)))
        if missing or beyond:
            raise ModelLoadError(
                f"attend was called with layers {sorted(self._numbered)}, which are not "
                f"0..{count - 1}: missing {missing}, unexpected {beyond}"
            )
        return tuple(found[number] for number in range(count))


def _layer_spec(q: Array, k: Array, v: Array, window: Any) -> LayerSpec:
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ModelLoadError(f"attend wants q [T,H,D], k and v [T,K,D] without a batch: {shapes}")
    if k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ModelLoadError(f"attend wants q [T,H,D], k and v [T,K,D], T and D equal: {shapes}")
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{num_heads=} must be a multiple of {num_kv_heads=}: {shapes}")
    try:
        window = None if window is None else operator.index(window)
    except TypeError:
        raise ModelLoadError(
            f"{window=} must be a Python integer or None: it decides how blocks are kept"
        ) from None
    return LayerSpec(num_heads, num_kv_heads, q.shape[2], window, jnp.dtype(k.dtype))


def _static_layer(layer: Any) -> int | None:
    """The layer's number, or None where it is traced."""
    return None if isinstance(layer, jax.core.Tracer) else operator.index(layer)
