"""The user's cache folder: private, written atomically, one process at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from paged_jax.errors import ConfigError

__all__ = ["atomic_file", "cache_dir", "locked", "sync"]


def cache_dir() -> Path:
    """The folder for downloads, converted models and compiled programs, created 0700 if missing.

    PAGED_JAX_HOME, else $XDG_CACHE_HOME/paged-jax, else ~/.cache/paged-jax. Raises ConfigError
    when it cannot be created or when every user of the machine may write to it.
    """
    if home := os.environ.get("PAGED_JAX_HOME"):
        path = Path(home).expanduser()
    elif (xdg := os.environ.get("XDG_CACHE_HOME", "")) and Path(xdg).is_absolute():
        path = Path(xdg) / "paged-jax"
    else:
        path = Path.home() / ".cache" / "paged-jax"
    path = path.absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(
            f"the cache folder {path} cannot be used: {error.strerror}; "
            "set PAGED_JAX_HOME to a folder of yours"
        ) from error
    if mode & 0o002:
        raise ConfigError(
            f"every user may write to the cache folder {path}, so its files cannot be trusted; "
            f"run `chmod 700 {path}` or set PAGED_JAX_HOME to a folder of yours"
        )
    return path


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the cache's lock `name`; waits for another process that holds it.

    The lock goes with the process, so a killed one leaves nothing behind but an empty file.
    """
    folder = cache_dir() / "locks"
    folder.mkdir(mode=0o700, exist_ok=True)
    with open(folder / f"{name}.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears at `path` complete and on disk, or not at all.

    Callers that may race hold a lock: the temporary name is the same for each.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
