"""Modules that keep a cache of their own: `module(tokens[B, L], positions, cache, mask)`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from paged_jax.attention import Attend, AttendsByRow, LayerSpec, StepRows
from paged_jax.errors import ModelLoadError
from paged_jax.models.served import ServedModel, from_function

__all__ = ["from_cached"]

Cache = Any  # a pytree whose leaves bear the names below
Call = Callable[..., tuple[jax.Array, Cache]]
NAMES = ("k", "v", "end_index", "positions")


def from_cached(
    module: nnx.Module | linen.Module,
    init_cache: Callable[[int], Cache],
    params: Any = None,
    *,
    call: Call | None = None,
    logits: Callable[[Any, jax.Array], jax.Array] | None = None,
    max_position: int | None = None,
    uses_positions: bool = True,
) -> ServedModel:
    """Serve a module in the style of Gemma's Flax package and of Tunix, without changing it.

    `module(token_ids[1,L], positions[1,L], cache, mask[1,L,C])` gives scores [1,L,V] and the new
    cache. `cache` is what `init_cache(C)` gives for one sequence: a tree of layers, each with `k`
    and `v` [1,C,K,D], `end_index` [1], and `positions` [1,C] if it wants them. The module puts new
    keys and values at `end_index`, and a token sees the slots of its row of `mask`; a token stands
    in the slot of its position. With None for a cache, it attends over the tokens that it is given.

    `call(module, token_ids, positions, cache, mask)` is for another signature. If it gives hidden
    states [1,L,E], `logits(module, hidden[R,E])` makes scores of those that need them. `params`
    are those of a Linen module; of an NNX module its `nnx.Param`s are served.

    The keys and values lie in pages as any model's do, but each step copies those of its sequences
    for the module to attend over: right for every such module, slower than one that calls `attend`.

    Raises ModelLoadError, saying how to mend it, for a cache or a module of another form.
    """
    bind, params = _split(module, params)
    layers = _find_layers(init_cache)
    run = call or (lambda module, *inputs: module(*inputs))
    name = type(module).__name__

    def apply(params, token_ids, positions, attend: Attend):
        if not isinstance(attend, AttendsByRow):
            raise ModelLoadError(f"{type(attend).__name__} has no cache to give: it needs `rows`")
        model = _Sequence(name, lambda *inputs: run(bind(params), *inputs), init_cache, layers)
        rows = attend.rows([layer.spec for layer in layers])
        if not isinstance(rows, StepRows):
            scores, _ = model.call(token_ids[None], positions[None], None, rows[None])
            return scores[0]
        return _run_rows(model, rows, token_ids, positions)

    def own_logits(params, hidden):
        assert logits is not None
        return logits(bind(params), hidden)

    return from_function(
        apply,
        params,
        logits=None if logits is None else own_logits,
        max_position=max_position,
        uses_positions=uses_positions,
    )


def _split(module: nnx.Module | linen.Module, params: Any) -> tuple[Callable[[Any], Any], Any]:
    """How to put parameters into the module, and the parameters."""
    if isinstance(module, linen.Module):
        if params is None:
            raise ModelLoadError(f"{type(module).__name__} is a Linen module: give its params")
        return lambda params: module.bind({"params": params}), params
    if params is not None:
        raise ModelLoadError("an NNX module has its parameters in itself: give no params")
    served = nnx.clone(module)
    served.eval()
    graphdef, state, rest = nnx.split(served, nnx.Param, ...)
    return lambda params: nnx.merge(graphdef, params, rest), nnx.to_pure_dict(state)


class _Layer(NamedTuple):
    """One layer of a cache: the keys to its part of the tree, and what it keeps for a token."""

    path: tuple[Any, ...]
    spec: LayerSpec


PROBE_LEN = 8  # slots; any length will do


def _find_layers(init_cache: Callable[[int], Cache]) -> list[_Layer]:
    """The layers of a cache, in the order of its tree. Looks at shapes only."""
    parts = _parts(jax.eval_shape(lambda: init_cache(PROBE_LEN)))
    if not parts:
        raise ModelLoadError(f"init_cache({PROBE_LEN}) gives no arrays: the model has no layers")
    return [_Layer(path, _spec(path, part)) for path, part in parts.items()]


def _parts(cache: Cache) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The arrays of each layer by name, by the path to the layer."""
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path, leaf in jax.tree.leaves_with_path(cache):
        name = _name(path)
        if name not in NAMES:
            raise ModelLoadError(
                f"the cache has {jax.tree_util.keystr(path)}, which is none of "
                f"{', '.join(NAMES)}: it cannot be filled"
            )
        parts.setdefault(path[:-1], {})[name] = leaf
    return parts


def _spec(path: tuple[Any, ...], part: dict[str, jax.ShapeDtypeStruct]) -> LayerSpec:
    where = jax.tree_util.keystr(path) or "the cache"
    if missing := [name for name in ("k", "v", "end_index") if name not in part]:
        raise ModelLoadError(f"init_cache: {where} lacks {', '.join(missing)}")
    k, v = part["k"], part["v"]
    if k.ndim != 4 or k.shape[:2] != (1, PROBE_LEN) or v.shape != k.shape or v.dtype != k.dtype:
        raise ModelLoadError(
            f"init_cache({PROBE_LEN}) must give k and v [1, {PROBE_LEN}, K, D] for one sequence, "
            f"a slot for each token; {where} has k {k.dtype}{k.shape}, v {v.dtype}{v.shape}"
        )
    num_kv_heads, head_size = k.shape[2:]
    return LayerSpec(num_kv_heads, num_kv_heads, head_size, None, k.dtype)


def _name(path: tuple[Any, ...]) -> str:
    last = path[-1] if path else None
    return str(getattr(last, "key", getattr(last, "name", last)))


class _Sequence:
    """The module as it runs one sequence on, its parameters put in."""

    def __init__(
        self, name: str, call: Call, init_cache: Callable[[int], Cache], layers: list[_Layer]
    ):
        self._name = name
        self._call = call
        self._init_cache = init_cache
        self.layers = layers

    def call(
        self,
        token_ids: Int[Array, "1 L"],
        positions: Int[Array, "1 L"],
        cache: Cache | None,
        mask: Bool[Array, "1 L C"],
    ) -> tuple[Float[Array, "1 L V"], Cache]:
        """Call the module, and look at what it gives."""
        result = self._call(token_ids, positions, cache, mask)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ModelLoadError(
                f"{self._name} must give (scores [1, L, V], new cache), not a "
                f"{type(result).__name__}: say call=... that does"
            )
        scores, new = result
        if getattr(scores, "ndim", None) != 3 or scores.shape[:2] != token_ids.shape:
            raise ModelLoadError(
                f"{self._name} maps token_ids {token_ids.shape} to "
                f"{getattr(scores, 'shape', type(scores).__name__)}, not to [1, L, V]"
            )
        if cache is not None and _shapes(new) != _shapes(cache):
            raise ModelLoadError(
                f"{self._name} was given a cache {_shapes(cache)} and gives another one back, "
                f"{_shapes(new)}: it must be the same with the new keys and values in it"
            )
        return scores, new

    def extend(
        self,
        token_ids: Int[Array, " L"],
        positions: Int[Array, " L"],
        past_len: Int[Array, ""],
        past: list[tuple[Float[Array, "J K D"], Float[Array, "J K D"]]],
    ) -> tuple[Float[Array, "L V"], list[tuple[Float[Array, "L K D"], Float[Array, "L K D"]]]]:
        """Scores of new tokens behind `past_len` cached ones, and their keys and values."""
        num_new = token_ids.shape[0]
        cache_len = past[0][0].shape[0] + num_new
        slots = jnp.arange(cache_len, dtype=jnp.int32)
        seen = slots[None, :] <= past_len + slots[:num_new, None]
        cache = self._filled(cache_len, past_len, past)
        scores, new = self.call(token_ids[None], positions[None], cache, seen[None])

        def written(array: Float[Array, "1 C K D"]) -> Float[Array, "L K D"]:
            return lax.dynamic_slice_in_dim(array[0], past_len, num_new)

        parts = _parts(new)
        pairs = [(parts[path]["k"], parts[path]["v"]) for path, _ in self.layers]
        return scores[0], [(written(k), written(v)) for k, v in pairs]

    def _filled(
        self,
        cache_len: int,
        past_len: Int[Array, ""],
        past: list[tuple[Float[Array, "J K D"], Float[Array, "J K D"]]],
    ) -> Cache:
        """A cache of the module's own form: `past` in its first slots, zeros behind."""
        by_path = {layer.path: pair for layer, pair in zip(self.layers, past, strict=True)}
        slots = jnp.arange(cache_len, dtype=jnp.int32)

        def fill(path: tuple[Any, ...], leaf: Array) -> Array:
            name = _name(path)
            if name == "end_index":
                return jnp.full(leaf.shape, past_len, leaf.dtype)
            if name == "positions":
                return slots[None].astype(leaf.dtype)
            cached = by_path[path[:-1]][NAMES.index(name)]
            # What unused slots hold may be no number, and zero times that is none either.
            kept = jnp.where(slots[: len(cached), None, None] < past_len, cached, 0)
            filled = jnp.pad(kept, ((0, cache_len - len(cached)), (0, 0), (0, 0)))
            return filled[None].astype(leaf.dtype)

        return jax.tree.map_with_path(fill, self._init_cache(cache_len))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.shape, tree)


def _run_rows(
    model: _Sequence, rows: StepRows, token_ids: Int[Array, " T"], positions: Int[Array, " T"]
) -> Float[Array, "T V"]:
    """A step, sequence by sequence: one-token rows side by side, chunks one after the other."""
    decodes = rows.decode_rows
    token_ids, positions = rows.unpack(token_ids), rows.unpack(positions)
    parts = []
    if decodes:
        parts.append(_run_decodes(model, rows, token_ids[:decodes], positions[:decodes]))
    if token_ids.shape[0] > decodes:
        parts.append(_run_chunks(model, rows, token_ids[decodes:], positions[decodes:]))
    scores, new = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
    for layer, (k, v) in enumerate(new):
        rows.write(layer, k, v)
    return rows.pack(scores)


def _run_decodes(
    model: _Sequence, rows: StepRows, token_ids: Int[Array, " R"], positions: Int[Array, " R"]
) -> Any:
    num_rows = token_ids.shape[0]
    every = jnp.arange(num_rows, dtype=jnp.int32)
    past = [rows.read(layer, every) for layer in range(len(model.layers))]
    extend = jax.vmap(model.extend)
    each = extend(token_ids[:, None], positions[:, None], rows.past_lens[:num_rows], past)
    return jax.tree.map(lambda part: part[:, 0], each)


def _run_chunks(
    model: _Sequence, rows: StepRows, token_ids: Int[Array, " C"], positions: Int[Array, " C"]
) -> Any:
    """Each chunk takes the tokens behind it along, and what they give is overwritten by theirs."""
    num_tokens, decodes = token_ids.shape[0], rows.decode_rows
    token_ids, positions = (jnp.pad(part, (0, num_tokens)) for part in (token_ids, positions))

    def run(i: Int[Array, ""]) -> tuple[Int[Array, ""], Any]:
        row = decodes + i
        start = rows.starts[row] - decodes
        ids, at = (
            lax.dynamic_slice_in_dim(part, start, num_tokens) for part in (token_ids, positions)
        )
        past = [
            tuple(array[0] for array in rows.read(layer, row[None]))
            for layer in range(len(model.layers))
        ]
        return start, model.extend(ids, at, rows.past_lens[row], past)

    def one_row(i, whole):
        start, part = run(i)
        return jax.tree.map(
            lambda whole, part: lax.dynamic_update_slice_in_dim(whole, part, start, axis=0),
            whole,
            part,
        )

    shapes = jax.eval_shape(run, jnp.int32(0))[1]
    empty = jax.tree.map(lambda s: jnp.zeros((2 * num_tokens, *s.shape[1:]), s.dtype), shapes)
    lens = jnp.diff(rows.starts[decodes:])
    whole = lax.fori_loop(0, jnp.sum(lens > 0, dtype=jnp.int32), one_row, empty)
    return jax.tree.map(lambda part: part[:num_tokens], whole)
