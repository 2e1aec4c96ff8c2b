"""Compiled programs are kept on disk, so that the second start is quick."""

from pathlib import Path

import jax

from paged_jax.cache import cache_dir

__all__ = ["use_compile_cache"]


def use_compile_cache(directory: str | None = None) -> None:
    """Keep every compiled program in `directory`, by default the user's cache.

    JAX's own setting (JAX_COMPILATION_CACHE_DIR) stands if nothing else is asked for.
    """
    if directory is None:
        if jax.config.jax_compilation_cache_dir:
            return
        path = cache_dir() / "xla"
    else:
        path = Path(directory).expanduser().resolve()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
