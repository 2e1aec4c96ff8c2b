"""The JSON file that a benchmark leaves behind, and where it was measured."""

import importlib.metadata
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paged_jax import __version__
from paged_jax.errors import RequestError

__all__ = ["environment", "require_writable", "write_json"]

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
SIGNIFICANT_DIGITS = 6


def require_writable(path: str | None) -> None:
    """Raise RequestError if the file could not be written: before a long run, not after it."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise RequestError(f"--json {path} cannot be written")


def write_json(path: str | None, report: Mapping[str, Any]) -> None:
    """Write the report, floats rounded to six significant digits; nothing without a path."""
    if path is None:
        return
    text = json.dumps(_rounded(report), indent=1, allow_nan=False)
    try:
        Path(path).write_text(text + "\n")
    except OSError as error:
        raise RequestError(f"--json {path} cannot be written: {error.strerror}") from error
    print(f"written to {path}", file=sys.stderr)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def environment() -> dict[str, Any]:
    """Where and when this runs; a `load` above zero before a run says that others run as well."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "paged_jax": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **versions,
    }
