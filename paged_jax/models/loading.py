"""From a directory to a model on the device, one tensor at a time."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from paged_jax.checkpoint.hf import Checkpoint, open_checkpoint
from paged_jax.errors import ModelLoadError
from paged_jax.models.registry import Family, find_family
from paged_jax.models.served import ServedModel, serve_split

__all__ = ["load_model"]

logger = logging.getLogger(__name__)

DTYPES = ("float32", "bfloat16", "float16")
Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)
Path_ = tuple[str | int, ...]


def load_model(
    directory: Path, *, dtype: str = "auto", progress: Progress | None = None
) -> ServedModel:
    """Load a Hugging Face style directory: config.json and *.safetensors.

    `dtype` is one of float32, bfloat16, float16, or auto: what config.json declares. Parameters
    never exist twice: the module is built from shapes alone, and each tensor goes to the device
    before the next is read. `progress` is called after each tensor.

    Raises ModelLoadError for an unknown architecture, a config that is not supported, and, all in
    one message, tensors that are missing, unexpected or of another shape than config.json says.
    """
    checkpoint = open_checkpoint(directory)
    family = find_family(checkpoint.config)
    config = family.parse(checkpoint.config)
    param_dtype = jnp.dtype(_dtype_name(dtype, checkpoint.config))

    module = nnx.eval_shape(lambda: family.build(config, param_dtype, nnx.Rngs(0)))
    graphdef, abstract, rest = nnx.split(module, nnx.Param, ...)
    shapes = {path: variable.get_value() for path, variable in nnx.to_flat_state(abstract)}
    names = {path: family.tensor_name(path) for path in shapes}
    _check_tensors(checkpoint, family, config, {names[path]: shapes[path] for path in shapes})

    params = _read_params(checkpoint, names, param_dtype, progress)
    apply, logits = serve_split(graphdef, rest)
    return ServedModel(
        apply, logits, params, config.vocab_size, config.hidden_size, config.max_position
    )


def _dtype_name(dtype: str, config: Mapping[str, Any]) -> str:
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ModelLoadError(f"dtype {dtype!r} is not supported, only {', '.join(DTYPES)}")
    return dtype


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
        "misshaped": [
            f"{name} is {shape} in the file, {spec.shape} by config.json"
            for name, spec in sorted(expected.items())
            if name in present and (shape := checkpoint.shape(name)) != spec.shape
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
    names: Mapping[Path_, str],
    dtype: jnp.dtype,
    progress: Progress | None,
) -> dict[str, Any]:
    """The nested dict of parameters on the device."""
    params, done_bytes = {}, 0
    for path, name in names.items():
        tensor = checkpoint.tensor(name)
        # The copy is ours alone, so that JAX may keep it: a view of the file would keep the file.
        params[path] = jax.device_put(np.array(tensor, dtype))
        done_bytes += tensor.nbytes
        if progress is not None:
            progress(done_bytes, checkpoint.num_bytes)
    return traverse_util.unflatten_dict(params)


def _equal(one: np.ndarray, other: np.ndarray, rows: int = 4096) -> bool:
    """Compare two large tensors a few rows at a time."""
    if one.shape != other.shape:
        return False
    starts = range(0, len(one), rows)
    return all(np.array_equal(one[i : i + rows], other[i : i + rows]) for i in starts)


def _shortened(items: list[str], limit: int = 12) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
