"""From a directory to a model on its devices, one tensor at a time."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.sharding import Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from paged_jax.checkpoint.hf import Checkpoint, open_checkpoint, read_config
from paged_jax.checkpoint.orbax import has_params, restore_params
from paged_jax.errors import ConfigError
from paged_jax.layers import linear_paths, param_splits
from paged_jax.models.experts import expert_paths
from paged_jax.models.fit import check_tensors
from paged_jax.models.registry import Family, find_family
from paged_jax.models.served import ServedModel, serve_split
from paged_jax.models.sources import Index, Path, Source
from paged_jax.progress import Progress, SilentProgress

__all__ = ["describe_model", "load_model", "named_params"]

PARAM_DTYPES = ("float32", "bfloat16", "float16")
COPY_ITEMS = 1 << 22  # at a time

Place = Callable[[Path, tuple[int, ...]], Sharding]
Shapes = Mapping[Path, jax.ShapeDtypeStruct]


def load_model(
    directory: FilePath | str,
    *,
    dtype: DTypeLike,
    max_model_len: int | None = None,
    sharding: Place | None = None,
    progress: Progress | None = None,
) -> ServedModel:
    """Load a directory: config.json, and *.safetensors or parameters in Orbax's format.

    `dtype` of the parameters is float32, bfloat16 or float16, whatever the files hold.
    `max_model_len` is the longest sequence that will be served, where it is shorter than the
    model's own limit: some rotations depend on it. `sharding` gives the sharding of the parameter
    at a path and of a shape; without it all go to the default device. Parameters never exist
    twice: the module is built from shapes alone, each tensor goes to its devices before the next
    is read, and of a sharded one only what this host's devices hold.

    Raises ModelLoadError for damaged files, an unknown architecture, a config that is not
    supported, and, all in one message, tensors that are missing, unexpected or unlike config.json;
    ConfigError for another dtype.
    """
    directory = FilePath(directory)
    opened = _open(directory, dtype, max_model_len)
    model = opened.model
    shapes = traverse_util.flatten_dict(model.params)
    read = _restore if has_params(directory) else partial(_read, opened.family, opened.config)
    params = read(directory, shapes, sharding, progress or SilentProgress())
    return model._replace(params=traverse_util.unflatten_dict(params))


def describe_model(
    directory: FilePath | str, *, dtype: DTypeLike, max_model_len: int | None = None
) -> ServedModel:
    """What `load_model` would give, with shapes (`jax.ShapeDtypeStruct`) for parameters."""
    return _open(FilePath(directory), dtype, max_model_len).model


class _Opened(NamedTuple):
    family: Family
    config: Any
    model: ServedModel  # of shapes


def _open(directory: FilePath, dtype: DTypeLike, max_model_len: int | None) -> _Opened:
    param_dtype = jnp.dtype(dtype)
    if param_dtype.name not in PARAM_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(PARAM_DTYPES)}; got {dtype!r}")
    raw = read_config(directory)
    family = find_family(raw)
    config = family.parse(raw)
    if max_model_len is not None:
        config = config.for_context(max_model_len)

    module = nnx.eval_shape(lambda: family.build(config, param_dtype, _one_key()))
    graphdef, abstract, rest = nnx.split(module, nnx.Param, ...)
    shapes = {path: variable.get_value() for path, variable in nnx.to_flat_state(abstract)}
    apply, logits = serve_split(graphdef, rest)
    model = ServedModel(
        apply,
        logits,
        traverse_util.unflatten_dict(shapes),
        config.vocab_size,
        config.hidden_size,
        config.max_position,
        linears=linear_paths(module),
        experts=expert_paths(module),
        splits=param_splits(abstract),
    )
    return _Opened(family, config, model)


class _OneKey(nnx.RngStream):
    """Always the same key, which is enough for shapes: what Flax does to count draws takes, under a
    trace, a time that grows with their square."""

    def __call__(self) -> jax.Array:
        return self.key[...]


def _one_key() -> nnx.Rngs:
    rngs = nnx.Rngs(0)
    rngs.default = _OneKey(jax.random.key(0), tag="default")
    return rngs


def named_params(params: Mapping[str, Any]) -> dict[str, jax.Array]:
    """A nested dict of parameters as a flat one, by dotted paths."""
    flat = traverse_util.flatten_dict(params)
    return {_dotted(path): array for path, array in flat.items()}


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _restore(
    directory: FilePath, shapes: Shapes, sharding: Place | None, progress: Progress
) -> dict[Path, jax.Array]:
    """The parameters from Orbax's format."""
    default = SingleDeviceSharding(jax.config.jax_default_device or jax.devices()[0])
    names = {_dotted(path): path for path in shapes}
    wanted = {
        name: jax.ShapeDtypeStruct(
            shapes[path].shape,
            shapes[path].dtype,
            sharding=default if sharding is None else sharding(path, shapes[path].shape),
        )
        for name, path in names.items()
    }
    num_bytes = sum(math.prod(s.shape) * s.dtype.itemsize for s in wanted.values())
    with progress.track("Restoring weights", num_bytes, unit="B") as advance:
        arrays = restore_params(directory, wanted)
        advance(num_bytes)
    return {path: arrays[name] for name, path in names.items()}


def _read(
    family: Family,
    config: Any,
    directory: FilePath,
    shapes: Shapes,
    sharding: Place | None,
    progress: Progress,
) -> dict[Path, jax.Array]:
    """The parameters from safetensors, under the names that the family has for them."""
    checkpoint = open_checkpoint(directory).renamed(family.canonical)
    present = set(checkpoint.names())
    sources = {path: family.source(config, path).resolve(present) for path in shapes}
    check_tensors(
        checkpoint,
        shapes,
        sources,
        aliases=family.aliases(config),
        is_ignored=family.is_ignored,
    )
    return _read_params(checkpoint, shapes, sources, sharding, progress)


def _read_params(
    checkpoint: Checkpoint,
    shapes: Shapes,
    sources: Mapping[Path, Source],
    sharding: Place | None,
    progress: Progress,
) -> dict[Path, jax.Array]:
    """Each parameter on its devices."""
    params = {}
    num_bytes = {path: source.num_bytes(checkpoint) for path, source in sources.items()}
    # The largest first: what is held twice while it is copied then lies below the final peak.
    order = sorted(sources, key=lambda path: num_bytes[path], reverse=True)
    with progress.track("Loading weights", sum(num_bytes.values()), unit="B") as advance:
        for path in order:
            place = None if sharding is None else sharding(path, shapes[path].shape)
            array = _read_param(checkpoint, shapes[path], sources[path], place)
            params[path] = array.block_until_ready()  # else the copies would queue up
            advance(num_bytes[path])
    return params


def _read_param(
    checkpoint: Checkpoint,
    spec: jax.ShapeDtypeStruct,
    source: Source,
    sharding: Sharding | None,
) -> jax.Array:
    def part(index: Index) -> np.ndarray:
        return _copied(checkpoint, source, _bounded(index, spec.shape), spec.dtype)

    if sharding is None:
        return jax.device_put(part((slice(None),) * len(spec.shape)))
    return jax.make_array_from_callback(spec.shape, sharding, part)


def _bounded(index: Index, shape: tuple[int, ...]) -> tuple[range, ...]:
    return tuple(range(*one.indices(size)) for one, size in zip(index, shape, strict=True))


def _copied(
    checkpoint: Checkpoint, source: Source, index: tuple[range, ...], dtype: jnp.dtype
) -> np.ndarray:
    """A copy that JAX may keep, as it does on a CPU; a view would keep the file.

    Goes piece by piece and gives back the pages of the file that it has read.
    """
    shape = tuple(map(len, index))
    copy = np.empty(shape, dtype)
    rest = tuple(slice(one.start, one.stop) for one in index[1:])
    begin = index[0].start
    for rows in _pieces(shape):
        piece = source.read(checkpoint, (slice(begin + rows.start, begin + rows.stop), *rest))
        copy[rows] = piece
        for name in source.names:
            checkpoint.forget_pages(name)
    return copy


def _pieces(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis, of about COPY_ITEMS items each."""
    step = max(1, COPY_ITEMS // max(1, math.prod(shape[1:])))
    return (slice(i, min(i + step, shape[0])) for i in range(0, shape[0], step))
