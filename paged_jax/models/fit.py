"""Whether a model's files hold what its config.json asks for; said in full before any is read."""

import logging
from collections.abc import Callable, Mapping

import jax
import numpy as np

from paged_jax.checkpoint.hf import Checkpoint
from paged_jax.errors import ModelLoadError
from paged_jax.models.sources import Path, Source

__all__ = ["check_tensors"]

logger = logging.getLogger(__name__)

SHOWN = 12  # names of one kind in a message


def check_tensors(
    checkpoint: Checkpoint,
    shapes: Mapping[Path, jax.ShapeDtypeStruct],
    sources: Mapping[Path, Source],
    *,
    aliases: Mapping[str, str],
    is_ignored: Callable[[str], bool],
) -> None:
    """Raise one ModelLoadError with everything in which the files and the model differ.

    `aliases` are tensors that are not used, and what is used instead: a warning tells where the
    two are there and differ.
    """
    present = {name for name in checkpoint.names() if not is_ignored(name)}
    tied = {name: used for name, used in aliases.items() if name in present}
    present -= set(tied)
    wanted = {name for source in sources.values() for name in source.names}
    whole = {path: s for path, s in sources.items() if present.issuperset(s.names)}

    wrong = {
        "missing": sorted(wanted - present),
        "unexpected": sorted(present - wanted),
        "of another shape": _unlike(checkpoint, shapes, whole),
        "of a dtype that cannot be loaded": sorted(
            f"{name} is {checkpoint.dtype(name).name}"
            for name, allowed in {n: s.file_dtypes for s in whole.values() for n in s.names}.items()
            if checkpoint.dtype(name).name not in allowed
        ),
    }
    if any(wrong.values()):
        parts = (f"{kind}: {_shortened(found)}" for kind, found in wrong.items() if found)
        raise ModelLoadError("the tensors do not fit config.json; " + "; ".join(parts))
    for name, used in tied.items():
        if not _equal(checkpoint.tensor(name), checkpoint.tensor(used)):
            logger.warning(
                "%s is ignored: config.json ties it to %s, and the two differ", name, used
            )


def _unlike(
    checkpoint: Checkpoint,
    shapes: Mapping[Path, jax.ShapeDtypeStruct],
    sources: Mapping[Path, Source],
) -> list[str]:
    """The tensors whose shapes do not give their parameter's, and what they are."""
    found = {}
    for path, source in sources.items():
        if source.shape(checkpoint) == shapes[path].shape:
            continue
        for name in source.names:
            shape = checkpoint.shape(name)
            expected = shapes[path].shape
            if source.is_verbatim:
                found[name] = f"{name} is {shape} in the file, {expected} by config.json"
            else:
                what = ".".join(map(str, path))
                found[name] = (
                    f"{name} is {shape} in the file, which does not give {what} {expected}"
                )
    return [found[name] for name in sorted(found)]


def _equal(one: np.ndarray, other: np.ndarray, rows: int = 4096) -> bool:
    """Compare two large tensors a few rows at a time."""
    if one.shape != other.shape:
        return False
    starts = range(0, len(one), rows)
    return all(np.array_equal(one[i : i + rows], other[i : i + rows]) for i in starts)


def _shortened(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
