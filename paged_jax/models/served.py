"""A model as the engine sees it: two functions of a plain pytree of parameters."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Float, Int

from paged_jax.attention import Attend, dense
from paged_jax.errors import ConfigError, ModelLoadError
from paged_jax.layers import linear_paths, param_splits
from paged_jax.models.experts import expert_paths
from paged_jax.quantization import HEAD_SCHEME, check_scheme, quantize_params
from paged_jax.sharding import Split
from paged_jax.taps import add_taps
from paged_jax.weights import Path, is_weight, tree_paths

__all__ = [
    "Apply",
    "Logits",
    "ServedModel",
    "from_function",
    "from_linen",
    "from_nnx",
    "layer_matrices",
    "quantized",
    "serve_split",
]

Params = Any  # a pytree of arrays
Apply = Callable[[Params, Int[Array, " T"], Int[Array, " T"], Attend], Float[Array, "T E"]]
Logits = Callable[[Params, Float[Array, "R E"]], Float[Array, "R V"]]


class ServedModel(NamedTuple):
    """Functions and parameters of one decoder. The functions are pure and ready for `jax.jit`."""

    apply: Apply  # (params, token_ids[T], positions[T], attend) -> hidden[T,E]
    logits: Logits  # (params, hidden[R,E]) -> float32[R,V]
    params: Params
    vocab_size: int
    hidden_size: int
    max_position: int | None = None  # the longest context it was made for; None: unknown
    num_layers: int | None = None  # only scanned models say it: see discover_layers
    linears: tuple[Path, ...] = ()  # matrices that `layers.linear` multiplies, and nothing else
    experts: tuple[Path, ...] = ()  # stacks of matrices, one for each expert
    splits: Mapping[Path, Split] = MappingProxyType({})  # how weights are cut over devices


def from_function(
    apply: Apply,
    params: Params,
    *,
    logits: Logits | None = None,
    max_position: int | None = None,
    num_layers: int | None = None,
    uses_positions: bool = True,
) -> ServedModel:
    """Serve `apply(params, token_ids[T], positions[T], attend)`, a pure function.

    It gives hidden states [T,E], of which `logits(params, hidden[R,E])` makes scores [R,V]; without
    `logits` it gives the scores [T,V] themselves. `num_layers` is for models that scan over their
    layers. Raises ModelLoadError, saying how to mend it, for a function of another form.
    """

    def own_logits(params, hidden):
        return hidden if logits is None else logits(params, hidden)

    def float_logits(params, hidden):
        return own_logits(params, hidden).astype(jnp.float32)

    return _measured(apply, float_logits, params, max_position, num_layers, uses_positions)


def from_nnx(
    module: nnx.Module,
    *,
    max_position: int | None = None,
    num_layers: int | None = None,
    uses_positions: bool = True,
) -> ServedModel:
    """Serve a Flax NNX module with `__call__(token_ids, positions, attend)` and `logits(hidden)`.

    `params` is the nested dict of its `nnx.Param`s; other state is kept as it is now. What is
    served is in evaluation mode; the module itself is left as it is. Parameters with a
    `split=Split(axis)` are cut where the model runs over several devices.
    """
    served = nnx.clone(module)
    served.eval()
    graphdef, params, rest = nnx.split(served, nnx.Param, ...)
    apply, logits = serve_split(graphdef, rest)
    pure = nnx.to_pure_dict(params)
    model = _measured(apply, logits, pure, max_position, num_layers, uses_positions)
    return model._replace(
        linears=linear_paths(served), experts=expert_paths(served), splits=param_splits(params)
    )


def from_linen(
    module: linen.Module,
    params: Params,
    *,
    max_position: int | None = None,
    num_layers: int | None = None,
    uses_positions: bool = True,
) -> ServedModel:
    """Serve a Flax Linen module with `__call__(token_ids, positions, attend)` and `logits(hidden)`.

    `params` is the collection of that name, as `module.init(...)["params"]` gives it.
    """

    def apply(params, token_ids, positions, attend):
        try:
            return module.apply({"params": params}, token_ids, positions, attend)
        except KeyError as error:  # JAX loses track of the cache's cells, and says no more
            if not isinstance(error.args[0], jax.extend.core.Var):
                raise
            raise ModelLoadError(
                f"{type(module).__name__} rematerialises its layers inside of nn.scan: say "
                "nn.scan(..., check_constancy_invariants=False), since the check that Flax would "
                "make cannot be traced through the KV cache; or serve it without nn.remat, its "
                "parameters are the same"
            ) from error

    def logits(params, hidden):
        return module.apply({"params": params}, hidden, method="logits").astype(jnp.float32)

    return _measured(apply, logits, params, max_position, num_layers, uses_positions)


def serve_split(graphdef: nnx.GraphDef, rest: nnx.State) -> tuple[Apply, Logits]:
    """The two functions of an NNX module that was split into graph, parameters and the rest."""

    def apply(params, token_ids, positions, attend):
        module = nnx.merge(graphdef, params, rest)
        add_taps(module, attend)
        return module(token_ids, positions, attend)

    def logits(params, hidden):
        return nnx.merge(graphdef, params, rest).logits(hidden).astype(jnp.float32)

    return apply, logits


def _measured(
    apply: Apply,
    logits: Logits,
    params: Params,
    max_position: int | None,
    num_layers: int | None,
    uses_positions: bool,
) -> ServedModel:
    """Find the sizes by running the functions on shapes."""
    tokens = jax.ShapeDtypeStruct((8,), jnp.int32)

    def run(params, token_ids, positions):
        return apply(params, token_ids, positions, dense(jnp.zeros_like(token_ids)))

    traced, hidden = jax.make_jaxpr(run, return_shape=True)(params, tokens, tokens)
    if getattr(hidden, "ndim", None) != 2 or hidden.shape[0] != 8:
        raise ModelLoadError(
            f"the model must map token_ids [8] to hidden [8, E]: {_shapes(hidden)}"
        )
    rows = jax.eval_shape(logits, params, hidden)
    if rows.ndim != 2 or rows.shape[0] != 8:
        raise ModelLoadError(f"logits must map hidden {hidden.shape} to [8, V]: {rows.shape}")
    if uses_positions and not _reads_last_input(traced.jaxpr):
        raise ModelLoadError(
            "the model never reads `positions`: the tokens of a step belong to several sequences "
            "and stand anywhere in them, so positions counted by the model itself (jnp.arange) "
            "are wrong. Use the argument, or say uses_positions=False if it needs none"
        )
    return ServedModel(
        apply, logits, params, rows.shape[1], hidden.shape[1], max_position, num_layers
    )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: getattr(leaf, "shape", leaf), tree)


def _reads_last_input(jaxpr: Any) -> bool:
    """Whether any equation, or the result, takes the last argument of a traced function."""
    variable = jaxpr.invars[-1]
    return any(variable is read for eqn in jaxpr.eqns for read in eqn.invars) or any(
        variable is out for out in jaxpr.outvars
    )


def layer_matrices(model: ServedModel) -> tuple[Path, ...]:
    """Those of `model.linears` that the layers use, and not `logits`."""
    of_head = head_matrices(model)
    return tuple(path for path in model.linears if path not in of_head)


def head_matrices(model: ServedModel) -> tuple[Path, ...]:
    """Those of `model.linears` that `logits` uses."""
    flat = tree_paths(model.params)
    dtypes = [flat[path].dtype for path in model.linears]
    if not dtypes:
        return ()
    hidden = jax.ShapeDtypeStruct((8, model.hidden_size), dtypes[0])
    traced = jax.make_jaxpr(model.logits)(model.params, hidden)
    read = {id(variable) for eqn in traced.jaxpr.eqns for variable in eqn.invars}
    leaves = jax.tree.unflatten(jax.tree.structure(model.params), traced.jaxpr.invars[:-1])
    of_head = {
        path
        for path, leaf in tree_paths(leaves).items()
        if any(id(variable) in read for variable in jax.tree.leaves(leaf))
    }
    return tuple(path for path in model.linears if path in of_head)


def quantized(model: ServedModel, scheme: str) -> ServedModel:
    """The model with its matrices in few bits, as `paged_jax.quantization` says.

    Those of the layers and of experts by `scheme`, the head by HEAD_SCHEME. A matrix is quantized
    once; the model that was given keeps its own. Raises ConfigError for an unknown scheme, or where
    there is nothing to quantize.
    """
    if any(map(is_weight, tree_paths(model.params).values())):
        return model
    of_layers = check_scheme(scheme)
    schemes = dict.fromkeys((*layer_matrices(model), *model.experts), of_layers)
    schemes |= dict.fromkeys(head_matrices(model), HEAD_SCHEME)
    if not schemes:
        raise ConfigError(
            f"quantization={scheme} finds nothing to quantize: it takes the matrices of "
            "paged_jax.layers.Linear, and this model multiplies with none"
        )
    params = jax.tree.map(lambda leaf: leaf, model.params)
    quantize_params(params, schemes)
    return model._replace(params=params)
