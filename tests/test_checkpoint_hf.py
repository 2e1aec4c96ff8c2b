"""Hugging Face folders: what loads is exactly what was saved; what is damaged is named."""

import json
import mmap
import pickle
import struct
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paged_jax.checkpoint import open_checkpoint
from paged_jax.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from paged_jax.errors import ModelLoadError

INDEX = "model.safetensors.index.json"


def write_config(directory: Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))


def raw_file(path: Path, header: object, data: bytes = b"", *, header_bytes: int | None = None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", header_bytes or len(raw)) + raw + data)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Three shards with two tensors each: t0 and t1 in the first, and so on."""
    write_config(tmp_path)
    weight_map = {}
    for shard in range(3):
        names = (f"t{2 * shard}", f"t{2 * shard + 1}")
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        tensors = {name: np.full((4, 100), int(name[1:]), np.float32) for name in names}
        save_file(tensors, tmp_path / file)
        weight_map |= dict.fromkeys(names, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def edit_index(directory: Path, tensor: str, file: object) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"][tensor] = file
    (directory / INDEX).write_text(json.dumps(index))


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(directory)
    for word in words:
        assert word in str(caught.value)


def test_what_the_library_saved_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    saved = {
        "float32": rng.normal(size=(3, 5)).astype(np.float32),
        "bfloat16": rng.normal(size=(4, 2)).astype(ml_dtypes.bfloat16),
        "float16": rng.normal(size=(7,)).astype(np.float16),
        "int8": rng.integers(-128, 127, (2, 3, 4), np.int8),
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }
    write_config(tmp_path, hidden_size=5)
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 5}
    assert checkpoint.names() == sorted(saved)
    for name, array in saved.items():
        found = checkpoint.tensor(name)
        assert found.dtype == checkpoint.dtype(name) == array.dtype
        assert found.shape == checkpoint.shape(name) == array.shape
        np.testing.assert_array_equal(found, array)
    assert checkpoint.num_bytes == sum(array.nbytes for array in saved.values())


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_every_dtype_is_read_bit_by_bit(tmp_path, dtype_name):
    dtype = DTYPES[dtype_name]
    array = np.array([0, 1, 1, 0, 1], np.uint8).astype(dtype)
    raw_file(
        tmp_path / "model.safetensors",
        {"a": entry(dtype_name, [5], 0, array.nbytes)},
        array.tobytes(),
    )
    write_config(tmp_path)
    found = open_checkpoint(tmp_path).tensor("a")
    assert found.dtype == dtype
    assert found.tobytes() == array.tobytes()


def test_tensors_are_read_only_views_of_the_file(tmp_path):
    write_config(tmp_path)
    save_file({"a": np.ones((64, 64), np.float32)}, tmp_path / "model.safetensors")
    array = open_checkpoint(tmp_path).tensor("a")
    assert isinstance(array.base, mmap.mmap)
    assert not array.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 2


@pytest.mark.parametrize("pad", [1, 2, 3, 4])
def test_an_unaligned_tensor_is_copied_into_alignment(tmp_path, pad):
    write_config(tmp_path)
    header = {"pad": entry("U8", [pad], 0, pad), "a": entry("F32", [2], pad, pad + 8)}
    data = bytes(pad) + np.array([1.5, -2], np.float32).tobytes()
    raw_file(tmp_path / "model.safetensors", header, data)
    array = open_checkpoint(tmp_path).tensor("a")
    assert array.flags.aligned
    assert array.tolist() == [1.5, -2]


def test_shards_are_put_together(sharded):
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.names() == [f"t{i}" for i in range(6)]
    assert checkpoint.num_bytes == 6 * 1600
    assert all((checkpoint.tensor(f"t{i}") == i).all() for i in range(6))


def test_an_unknown_tensor_is_named_with_its_neighbours(sharded):
    with pytest.raises(ModelLoadError, match=r"no tensor 'tt1' among 6; near: t1"):
        open_checkpoint(sharded).tensor("tt1")


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a71_a_missing_shard_is_named(sharded, missing):
    file = f"model-{missing:05}-of-00003.safetensors"
    (sharded / file).unlink()
    refused(sharded, file, "not there")


def test_a71_a_tensor_listed_in_the_wrong_shard_is_named(sharded):
    edit_index(sharded, "t1", "model-00003-of-00003.safetensors")
    refused(sharded, "'t1'", "model-00003-of-00003", "model-00001-of-00003")


def test_a_tensor_in_no_shard_is_named(sharded):
    edit_index(sharded, "ghost", "model-00002-of-00003.safetensors")
    refused(sharded, "'ghost'", "no file has it")


@pytest.mark.parametrize("file", [None, 3, ["model-00001-of-00003.safetensors"]])
def test_an_index_entry_that_is_no_file_is_named(sharded, file):
    edit_index(sharded, "t1", file)
    refused(sharded, INDEX, "'t1'")


@pytest.mark.parametrize("cut", [1, 1000, 3300])
def test_a72_a_cut_off_shard_is_refused_before_any_tensor_is_used(sharded, cut):
    path = sharded / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    refused(sharded, path.name, "cut off")


GOOD = entry("F32", [2], 0, 8)
DAMAGED = {
    "header beyond the file": (GOOD, {"header_bytes": 10**6}, "cut off"),
    "header of absurd length": (GOOD, {"header_bytes": 2**63}, "cut off"),
    "cut tensor": (entry("F32", [3], 0, 12), {}, "'a'"),
    "offsets of another size": (entry("F32", [1], 0, 8), {}, "'a'"),
    "offsets backwards": (entry("F32", [0], 8, 0), {}, "'a'"),
    "negative offset": (entry("F32", [2], -8, 0), {}, "'a'"),
    "negative shape": (entry("F32", [-1, -2], 0, 8), {}, "'a'"),
    "fractional shape": (entry("F32", [2.0], 0, 8), {}, "'a'"),
    "boolean shape": (entry("F32", [True, 2], 0, 8), {}, "'a'"),
    "hole at the start": (entry("F32", [1], 4, 8), {}, "hole"),
    "bytes left over": (entry("F32", [1], 0, 4), {}, "belong to none"),
    "unknown dtype": (entry("F4", [2], 0, 8), {}, "F4"),
    "no offsets": ({"dtype": "F32", "shape": [2]}, {}, "'a'"),
    "no object": ([1, 2], {}, "'a'"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a72_a_damaged_header_is_named(tmp_path, kind):
    write_config(tmp_path)
    damaged, options, word = DAMAGED[kind]
    raw_file(tmp_path / "model.safetensors", {"a": damaged}, bytes(8), **options)
    refused(tmp_path, "model.safetensors", word)


@pytest.mark.parametrize("second", [(4, 12), (0, 8), (0, 4)])
def test_a72_overlapping_tensors_are_named(tmp_path, second):
    write_config(tmp_path)
    begin, end = second
    header = {"a": GOOD, "b": entry("F32", [(end - begin) // 4], begin, end)}
    raw_file(tmp_path / "model.safetensors", header, bytes(12))
    refused(tmp_path, "model.safetensors", "overlaps")


@pytest.mark.parametrize(
    ("header", "word"),
    [
        (b'{"a": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": 1}', "twice"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_header_that_is_no_object_is_refused(tmp_path, header, word):
    write_config(tmp_path)
    raw_file(tmp_path / "model.safetensors", header, bytes(4))
    refused(tmp_path, "model.safetensors", word)


@given(at=st.integers(0, 400), byte=st.integers(0, 255), length=st.integers(0, 500))
def test_damage_is_noticed_or_harmless(tmp_path_factory, at, byte, length):
    path = tmp_path_factory.mktemp("damage") / "model.safetensors"
    save_file({"a": np.ones((3, 4), np.float32), "b": np.ones(20, np.int8)}, path)
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content[: length if length < len(content) else None])
    try:
        file = SafetensorsFile(path)
    except ModelLoadError:
        return
    for name in file.entries:
        file.tensor(name).tobytes()


@pytest.mark.parametrize("config", ["{", "[]", "[" * 100_000, '"llama"', ""])
def test_a_config_that_is_no_object_is_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    refused(tmp_path, "config.json")


def test_what_is_missing_is_named(tmp_path):
    refused(tmp_path / "nowhere", "not a folder")
    refused(tmp_path, "no config.json")
    write_config(tmp_path)
    refused(tmp_path, "no *.safetensors")
    (tmp_path / INDEX).write_text("{}")
    refused(tmp_path, "no weight_map")


def test_weights_of_any_name_will_do_if_there_is_only_one_file(tmp_path):
    write_config(tmp_path)
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "pytorch.safetensors")
    assert open_checkpoint(tmp_path).names() == ["a"]
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "other.safetensors")
    refused(tmp_path, INDEX, "other.safetensors, pytorch.safetensors")


def test_a_gguf_in_the_folder_is_pointed_at(tmp_path):
    write_config(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    refused(tmp_path, f"name the file itself: {tmp_path / 'x.gguf'}")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a75_pickles_are_refused_and_never_run(tmp_path, name):
    sentinel = tmp_path / "sentinel"
    payload = f"open({str(sentinel)!r}, 'w')"

    class Evil:
        def __reduce__(self):
            return eval, (payload,)

    (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    write_config(tmp_path)
    refused(tmp_path, name, "safe_serialization")
    assert not sentinel.exists()
    pickle.loads((tmp_path / name).read_bytes()).close()
    assert sentinel.exists()  # the payload would have worked


class Opened:
    """The files opened while it is on; audit hooks cannot be taken away again."""

    def __init__(self):
        self.paths: list[Path] = []
        self.on = False
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple) -> None:
        if self.on and event == "open" and isinstance(args[0], str | Path):
            self.paths.append(Path(args[0]).resolve())


OPENED = Opened()


@pytest.mark.parametrize("how", ["relative", "absolute", "backslash", "nested", "link", "dot"])
def test_a76_a_shard_outside_the_folder_is_refused_and_not_opened(tmp_path, how):
    model, outside = tmp_path / "model", tmp_path / "outside"
    model.mkdir(), outside.mkdir()
    save_file({"a": np.ones(2, np.float32)}, outside / "x.safetensors")
    (model / "link.safetensors").symlink_to(outside / "x.safetensors")
    file = {
        "relative": "../outside/x.safetensors",
        "absolute": str(outside / "x.safetensors"),
        "backslash": "..\\outside\\x.safetensors",
        "nested": "sub/../../outside/x.safetensors",
        "link": "link.safetensors",
        "dot": ".",
    }[how]
    write_config(model)
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    OPENED.paths.clear()
    OPENED.on = True
    try:
        with pytest.raises(ModelLoadError, match=r"outside the model's folder|leads out"):
            open_checkpoint(model)
    finally:
        OPENED.on = False
    assert [path for path in OPENED.paths if path.is_relative_to(tmp_path)] == [
        model / "config.json",
        model / INDEX,
    ]


def test_a76_an_encoded_path_is_only_a_file_name(tmp_path):
    write_config(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "..%2fx.safetensors"}}))
    refused(tmp_path, "..%2fx.safetensors", "not there")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a76_a_link_out_of_the_folder_is_refused(tmp_path, name):
    model = tmp_path / "model"
    model.mkdir()
    write_config(model)
    save_file({"a": np.ones(2, np.float32)}, model / "model.safetensors")
    assert open_checkpoint(model).names() == ["a"]
    (model / name).rename(tmp_path / name)
    (model / name).symlink_to(tmp_path / name)
    refused(model, name, "outside the model's folder")


def test_a_link_in_a_circle_is_refused(tmp_path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    refused(tmp_path, "model.safetensors", "circle")


def test_links_inside_the_folder_and_to_the_folder_are_fine(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    write_config(model)
    save_file({"a": np.ones(2, np.float32)}, model / "real.safetensors")
    (model / "model.safetensors").symlink_to("real.safetensors")
    (tmp_path / "link").symlink_to(model)
    assert open_checkpoint(tmp_path / "link").names() == ["a"]


@pytest.mark.parametrize("shared_store", [False, True])
def test_the_hugging_face_cache_is_all_links_and_works(tmp_path, shared_store):
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    write_config(blobs)
    save_file({"a": np.ones(2, np.float32)}, blobs / "b10b")
    if shared_store:
        store = tmp_path / "hub" / "blobs" / "b1"
        store.mkdir(parents=True)
        (blobs / "b10b").rename(store / "b10b")
        (blobs / "b10b").symlink_to("../../blobs/b1/b10b")
    (snapshot / "config.json").symlink_to("../../blobs/config.json")
    (snapshot / "model.safetensors").symlink_to("../../blobs/b10b")
    assert open_checkpoint(snapshot).names() == ["a"]
    (snapshot / "model.safetensors").unlink()
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    (snapshot / "model.safetensors").symlink_to(tmp_path / "x.safetensors")
    refused(snapshot, "outside the model's folder")
