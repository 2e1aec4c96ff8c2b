"""Files of a model's folder, none of which may lie outside it."""

import json
from pathlib import Path

from paged_jax.errors import ModelLoadError

__all__ = ["model_file", "read_json"]


def _roots(directory: Path) -> list[Path]:
    """The folders that a file of the model may really lie in.

    Besides the folder itself those are the blob folders of a Hugging Face cache, in which
    `models--owner--name/snapshots/revision/file` is a link to `models--owner--name/blobs/digest`,
    itself possibly a link to `blobs/…` of the whole cache.
    """
    folder = directory.resolve()
    repository = folder.parent.parent
    if folder.parent.name != "snapshots" or not repository.name.startswith("models--"):
        return [folder]
    return [folder, repository / "blobs", repository.parent / "blobs"]


def model_file(directory: Path, name: str) -> Path:
    """The path of the model's file `name`, which need not exist.

    Raises ModelLoadError, before anything is opened, if the name or a link leads out of the folder.
    """
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\\" in name or "\0" in name:
        raise ModelLoadError(f"{directory}: the file name {name!r} leads out of the model's folder")
    path = directory / name
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise ModelLoadError(f"{path} is a link that leads in a circle") from error
    if not any(target.is_relative_to(root) for root in _roots(directory)):
        raise ModelLoadError(
            f"{path} is a link to {target}, outside the model's folder; "
            "put the file itself there if it can be trusted"
        )
    return path


def read_json(directory: Path, name: str) -> dict | None:
    """The JSON object in the model's file `name`, or None where there is no such file."""
    path = model_file(directory, name)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
