"""Parameters in Orbax's format: from any mesh to any other, all of them or none."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import StandardCheckpointer, StandardCheckpointHandler

from paged_jax.checkpoint import orbax
from paged_jax.checkpoint.orbax import read_shapes, restore_params, save_params
from paged_jax.cli import main
from paged_jax.errors import ModelLoadError
from paged_jax.models import load_model, named_params
from tests.tiny_models import TINY_LLAMA, write_tiny_llama

SIZES = {"small": 64, "medium": 6400, "large": 64000}
GOLDENS = Path(__file__).parent / "data" / "families"

RESHARD = """
import sys
from pathlib import Path
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from paged_jax.checkpoint.orbax import restore_params, save_params
from paged_jax.models import load_model, named_params

source, target = map(Path, sys.argv[1:])
devices = np.array(jax.devices())
assert len(devices) == 8

def on(*shape):
    mesh = jax.sharding.Mesh(devices.reshape(shape), ("data", "model"))
    def place(path, shape):
        fits = [
            name if size % mesh.shape[name] == 0 else None
            for name, size in zip(("data", "model"), shape)
        ]
        return NamedSharding(mesh, PartitionSpec(*fits))
    return place

def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        np.testing.assert_array_equal(
            np.asarray(one[name]).view(np.uint16), np.asarray(other[name]).view(np.uint16)
        )

whole = named_params(load_model(source, dtype="bfloat16").params)
sharded = named_params(load_model(source, dtype="bfloat16", sharding=on(2, 4)).params)
for name, array in sharded.items():
    assert array.sharding == on(2, 4)((), array.shape), name
assert any(len(a.addressable_shards[0].data) * 2 == len(a) for a in sharded.values())
same(whole, sharded)

save_params(target, sharded)
for place in (on(4, 2), on(8, 1), lambda path, shape: SingleDeviceSharding(devices[3])):
    wanted = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place((), a.shape))
        for name, a in whole.items()
    }
    restored = restore_params(target, wanted)
    for name, array in restored.items():
        assert array.sharding == wanted[name].sharding, name
    same(whole, restored)

host = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in whole.items()}
restored = restore_params(target, host)
assert {type(a) for a in restored.values()} == {np.ndarray}
same(whole, restored)
"""


def test_a78_any_mesh_restores_what_another_saved(tmp_path):
    """On 8 simulated devices; also, safetensors go straight to the shards of a mesh."""
    command = [sys.executable, "-c", RESHARD, GOLDENS / "mixtral", tmp_path]
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("saved", "asked"), [(12, 16), (16, 12)])
def test_a77_another_number_of_layers_is_an_error(tmp_path, saved, asked):
    def arrays(num_layers: int) -> dict[str, np.ndarray]:
        layers = {f"layers.{i}.w": np.zeros((2, 3), np.float32) for i in range(num_layers)}
        return {"embed": np.zeros((4 + num_layers, 2), np.float32), **layers}

    save_params(tmp_path, arrays(saved))
    wanted = {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays(asked).items()}
    with pytest.raises(ModelLoadError) as caught:
        restore_params(tmp_path, wanted)
    message = str(caught.value)
    kind = "missing" if asked > saved else "unexpected"
    assert f"{kind}: layers.12.w, layers.13.w, layers.14.w, layers.15.w" in message
    assert f"embed is ({4 + saved}, 2) in the file, ({4 + asked}, 2) by config.json" in message


def test_large_arrays_are_saved_in_pieces_and_read_one_after_the_other(tmp_path, monkeypatch):
    """What a host needs beside the arrays is a piece or two, and the largest array once more."""
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 4096)
    arrays = {name: np.arange(n, dtype=np.float32).reshape(-1, 64) for name, n in SIZES.items()}
    save_params(tmp_path, arrays)
    with StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(tmp_path / "params").item_metadata
    for array in saved.values():
        assert 4 * math.prod(array.storage.chunk_shape) <= 4096
    limits = []

    def handler(*, restore_concurrent_gb):
        limits.append(1e9 * restore_concurrent_gb)
        return StandardCheckpointHandler(restore_concurrent_gb=restore_concurrent_gb)

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointHandler", handler)
    restored = restore_params(tmp_path, read_shapes(tmp_path))
    assert limits == [pytest.approx(4 * max(SIZES.values()) + 1e6)]
    for name, array in arrays.items():
        np.testing.assert_array_equal(restored[name], array)


def test_a_damaged_checkpoint_is_a_load_error(tmp_path):
    save_params(tmp_path, {"w": np.zeros((64, 64), np.float32)})
    for path in (tmp_path / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(b"nonsense")
    with pytest.raises(ModelLoadError, match=r"params .*Orbax"):
        read_shapes(tmp_path)


def test_convert_makes_a_folder_that_loads_as_the_model_that_it_came_from(tmp_path, capsys):
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_llama(source)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    assert main(["convert", str(source), str(target), "--dtype", "float32"]) == 0
    assert f"is ready in {target}" in capsys.readouterr().out
    names = sorted(path.name for path in target.iterdir())
    assert names == ["config.json", "params", "tokenizer_config.json"]
    one, other = (named_params(load_model(d, dtype="float32").params) for d in (source, target))
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    narrow = load_model(target, dtype="bfloat16").params
    assert {leaf.dtype.name for leaf in jax.tree.leaves(narrow)} == {"bfloat16"}

    config = {**TINY_LLAMA, "num_hidden_layers": 3}
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"missing: layers\.2\.input_layernorm\.weight"):
        load_model(target, dtype="float32")


def test_convert_overwrites_nothing_and_leaves_nothing_behind(tmp_path, capsys):
    source, target = tmp_path / "source", tmp_path / "target"
    write_tiny_llama(source)
    target.mkdir()
    assert main(["convert", str(source), str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    (source / "model.safetensors").unlink()
    assert main(["convert", str(source), str(tmp_path / "other")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]
