"""`paged-jax convert`: a model of any kind becomes a folder that any mesh restores quickly."""

import shutil
from pathlib import Path

from paged_jax.cache import sync
from paged_jax.checkpoint.orbax import save_params
from paged_jax.errors import ConfigError
from paged_jax.hub import resolve_model
from paged_jax.models import load_model, named_params
from paged_jax.progress import ConsoleProgress, Progress

__all__ = ["convert"]

COPIED = ("*.json", "*.jinja")
NOT_COPIED = ".index.json"  # of the files that the weights were in


def convert(
    source: str, target: Path | str, *, dtype: str, progress: Progress | None = None
) -> Path:
    """Write the model `source` into the new folder `target`; returns the folder.

    Beside the weights, in `dtype` and Orbax's format, it gets the configuration and the tokenizer.
    Memory: the weights once. Raises ConfigError if `target` exists, and what `resolve_model` and
    `load_model` raise; nothing is left of a conversion that failed.
    """
    progress = progress or ConsoleProgress()
    target = Path(target).expanduser()
    if target.exists():
        raise ConfigError(f"{target} exists already: name a folder that does not")
    files = resolve_model(source, progress=progress)
    model = load_model(files.directory, dtype=dtype, progress=progress)
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    try:
        partial.mkdir(parents=True)
        for pattern in COPIED:
            for path in files.directory.glob(pattern):
                if not path.name.endswith(NOT_COPIED):
                    shutil.copyfile(path, partial / path.name)
                    sync(partial / path.name)
        progress.say(f"writing {target}")
        save_params(partial, named_params(model.params))
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
