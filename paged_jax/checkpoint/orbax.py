"""Parameters in Orbax's format, one array under each dotted path, for any mesh to restore."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from paged_jax.checkpoint.model_files import model_file
from paged_jax.errors import ModelLoadError

__all__ = ["has_params", "read_shapes", "restore_params", "save_params"]

FOLDER = "params"  # in the model's folder
CHUNK_BYTES = 16 * 2**20  # decoded as a whole: what a host needs beside the arrays themselves
SHOWN = 12  # paths of one kind in a message

Arrays = Mapping[str, Any]


def has_params(directory: Path) -> bool:
    """Does the model's folder hold its parameters in this format?"""
    return model_file(directory, FOLDER).is_dir()


def save_params(directory: Path, params: Arrays) -> None:
    """Write `params` into the model's folder, which has none yet. Each host writes its shards."""
    from orbax.checkpoint import SaveArgs, StandardCheckpointer

    in_chunks = dict.fromkeys(params, SaveArgs(chunk_byte_size=CHUNK_BYTES))
    with StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / FOLDER, dict(params), save_args=in_chunks)


def read_shapes(directory: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every saved array. Raises ModelLoadError if they cannot be read."""
    from orbax.checkpoint import StandardCheckpointer

    path = model_file(directory, FOLDER).absolute()
    try:
        with StandardCheckpointer() as checkpointer:
            saved = checkpointer.metadata(path).item_metadata
        return {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in saved.items()}
    except Exception as error:  # whatever a damaged folder makes the library say
        raise ModelLoadError(f"{path} holds no readable Orbax checkpoint: {error}") from error


def restore_params(directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """The saved arrays in the shapes, dtypes and shardings of `wanted`, however they were saved.

    One without a sharding comes as a NumPy array, in this host's memory. Takes memory for the
    arrays and for the largest one again. Raises one ModelLoadError with every array that is
    missing, unexpected or of another shape.
    """
    from orbax.checkpoint import Checkpointer, StandardCheckpointHandler
    from orbax.checkpoint.args import StandardRestore

    saved = read_shapes(directory)
    _check(directory, saved, wanted)
    target = {name: _target(spec) for name, spec in wanted.items()}
    path = model_file(directory, FOLDER).absolute()
    in_flight: Any = _largest(saved, wanted) / 1e9 + 1e-3  # the library says int, and multiplies
    try:
        handler = StandardCheckpointHandler(restore_concurrent_gb=in_flight)
        with Checkpointer(handler) as checkpointer:
            return checkpointer.restore(path, args=StandardRestore(target))
    except Exception as error:  # whatever a damaged folder makes the library say
        raise ModelLoadError(f"{path} cannot be restored: {error}") from error


def _largest(*trees: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Bytes of the largest array, as it is saved or as it is wanted."""
    arrays = (array for tree in trees for array in tree.values())
    return max((math.prod(array.shape) * array.dtype.itemsize for array in arrays), default=0)


def _target(spec: jax.ShapeDtypeStruct) -> Any:
    if spec.sharding is not None:
        return spec
    return np.broadcast_to(np.zeros((), spec.dtype), spec.shape)  # takes no memory


def _check(
    directory: Path,
    saved: Mapping[str, jax.ShapeDtypeStruct],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    wrong = {
        "missing": sorted(wanted.keys() - saved.keys()),
        "unexpected": sorted(saved.keys() - wanted.keys()),
        "of another shape": [
            f"{name} is {saved[name].shape} in the file, {wanted[name].shape} by config.json"
            for name in sorted(wanted.keys() & saved.keys())
            if saved[name].shape != wanted[name].shape
        ],
    }
    if any(wrong.values()):
        parts = "; ".join(
            f"{kind}: {', '.join(found[:SHOWN])}"
            + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
            for kind, found in wrong.items()
            if found
        )
        raise ModelLoadError(f"{directory}: the parameters do not fit config.json; {parts}")
