"""From a directory to a model on the device, one tensor at a time."""

import logging
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jax.typing import DTypeLike

from paged_jax.checkpoint.hf import Checkpoint, open_checkpoint
from paged_jax.errors import ConfigError, ModelLoadError
from paged_jax.layers import linear_paths
from paged_jax.models.registry import Family, find_family
from paged_jax.models.served import ServedModel, serve_split
from paged_jax.progress import Progress, SilentProgress

__all__ = ["load_model"]

logger = logging.getLogger(__name__)

PARAM_DTYPES = ("float32", "bfloat16", "float16")
FILE_DTYPES = (*PARAM_DTYPES, "float64")
COPY_ITEMS = 1 << 22  # at a time

ParamPath = tuple[str | int, ...]


def load_model(
    directory: Path | str, *, dtype: DTypeLike, progress: Progress | None = None
) -> ServedModel:
    """Load a Hugging Face style directory: config.json and *.safetensors.

    `dtype` of the parameters is float32, bfloat16 or float16, whatever the files hold. Parameters
    never exist twice: the module is built from shapes alone, and each tensor goes to the default
    device before the next is read.

    Raises ModelLoadError for damaged files, an unknown architecture, a config that is not
    supported, and, all in one message, tensors that are missing, unexpected or unlike config.json;
    ConfigError for another dtype.
    """
    param_dtype = jnp.dtype(dtype)
    if param_dtype.name not in PARAM_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(PARAM_DTYPES)}; got {dtype!r}")
    checkpoint = open_checkpoint(directory)
    family = find_family(checkpoint.config)
    config = family.parse(checkpoint.config)

    module = nnx.eval_shape(lambda: family.build(config, param_dtype, nnx.Rngs(0)))
    graphdef, abstract, rest = nnx.split(module, nnx.Param, ...)
    shapes = {path: variable.get_value() for path, variable in nnx.to_flat_state(abstract)}
    names = {path: family.tensor_name(path) for path in shapes}
    _check_tensors(checkpoint, family, config, {names[path]: shapes[path] for path in shapes})

    params = _read_params(checkpoint, names, param_dtype, progress or SilentProgress())
    apply, logits = serve_split(graphdef, rest)
    return ServedModel(
        apply,
        logits,
        params,
        config.vocab_size,
        config.hidden_size,
        config.max_position,
        linears=linear_paths(module),
    )


def _check_tensors(
    checkpoint: Checkpoint,
    family: Family,
    config: Any,
    expected: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raise one ModelLoadError with everything in which the files and the model differ."""
    present = {name for name in checkpoint.names() if not name.endswith(family.ignored)}
    aliases = {name: used for name, used in family.aliases(config).items() if name in present}
    present -= set(aliases)

    wrong = {
        "missing": sorted(set(expected) - present),
        "unexpected": sorted(present - set(expected)),
        "of another shape": [
            f"{name} is {shape} in the file, {spec.shape} by config.json"
            for name, spec in sorted(expected.items())
            if name in present and (shape := checkpoint.shape(name)) != spec.shape
        ],
        "of a dtype that cannot be loaded": [
            f"{name} is {file_dtype}"
            for name in sorted(present & set(expected))
            if (file_dtype := checkpoint.dtype(name).name) not in FILE_DTYPES
        ],
    }
    if any(wrong.values()):
        parts = (f"{kind}: {_shortened(found)}" for kind, found in wrong.items() if found)
        raise ModelLoadError("the tensors do not fit config.json; " + "; ".join(parts))
    for name, used in aliases.items():
        if not _equal(checkpoint.tensor(name), checkpoint.tensor(used)):
            logger.warning(
                "%s is ignored: config.json ties it to %s, and the two differ", name, used
            )


def _read_params(
    checkpoint: Checkpoint,
    names: Mapping[ParamPath, str],
    dtype: jnp.dtype,
    progress: Progress,
) -> dict[str, Any]:
    """The nested dict of parameters on the device."""
    params = {}
    num_bytes = {
        name: math.prod(checkpoint.shape(name)) * checkpoint.dtype(name).itemsize
        for name in names.values()
    }
    # The largest first: what is held twice while it is copied then lies below the final peak.
    order = sorted(names.items(), key=lambda item: num_bytes[item[1]], reverse=True)
    with progress.track("Loading weights", sum(num_bytes.values()), unit="B") as advance:
        for path, name in order:
            array = jax.device_put(_copied(checkpoint.tensor(name), dtype))
            params[path] = array.block_until_ready()  # else the copies would queue up
            advance(num_bytes[name])
    return traverse_util.unflatten_dict(params)


def _copied(tensor: np.ndarray, dtype: jnp.dtype) -> np.ndarray:
    """A copy that JAX may keep, as it does on a CPU; a view would keep the file.

    Goes piece by piece and gives back the pages of the file that it has read.
    """
    copy = np.empty(tensor.shape, dtype)
    source, target = tensor.reshape(-1), copy.reshape(-1)
    for start in range(0, source.size, COPY_ITEMS):
        target[start : start + COPY_ITEMS] = source[start : start + COPY_ITEMS]
        _forget_pages(tensor)
    return copy


def _forget_pages(tensor: np.ndarray) -> None:
    """Drop what a mapped file takes of this process's memory; it is read again when needed."""
    owner: Any = tensor
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)


def _equal(one: np.ndarray, other: np.ndarray, rows: int = 4096) -> bool:
    """Compare two large tensors a few rows at a time."""
    if one.shape != other.shape:
        return False
    starts = range(0, len(one), rows)
    return all(np.array_equal(one[i : i + rows], other[i : i + rows]) for i in starts)


def _shortened(items: list[str], limit: int = 12) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
