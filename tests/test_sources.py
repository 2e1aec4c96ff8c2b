"""Parameters out of other layouts: packed, fused and stacked tensors, whole and in parts."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paged_jax.errors import ModelLoadError
from paged_jax.models import load_model
from paged_jax.models.sources import MXFP4, Stack, Tensor

GOLDENS = Path(__file__).parent / "data" / "families"
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of the three bits below the sign


class File:
    """Tensors in memory."""

    def __init__(self, **tensors: np.ndarray):
        self.tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self.tensors[name].dtype

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def packed(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random blocks and scales of `[X, out, in]`, and their values, worked out one by one."""
    experts, rows, size = shape
    blocks = rng.integers(0, 256, (experts, rows, size // 32, 16)).astype(np.uint8)
    scales = rng.integers(120, 128, (experts, rows, size // 32)).astype(np.uint8)
    values = np.zeros(shape, np.float32)
    for x, row, block, byte in np.ndindex(blocks.shape):
        for half in (0, 1):
            code = int(blocks[x, row, block, byte]) >> (4 * half) & 15
            value = FP4[code & 7] * (-1.0 if code & 8 else 1.0)
            value *= 2.0 ** (int(scales[x, row, block]) - 127)
            values[x, row, 32 * block + 2 * byte + half] = value
    return blocks, scales, values


def copy_golden(name: str, directory: Path) -> dict[str, np.ndarray]:
    shutil.copytree(GOLDENS / name, directory, dirs_exist_ok=True)
    return load_file(directory / "model.safetensors")


def same_params(one: Path, other: Path) -> None:
    first, second = (load_model(d, dtype="float32").params for d in (one, other))
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_mxfp4_is_read_as_the_values_that_it_stands_for():
    blocks, scales, values = packed(np.random.default_rng(0), 2, 6, 64)
    source = MXFP4(Tensor("w"), lambda t: t[:, 1::2]).resolve({"w_blocks", "w_scales"})
    file = File(w_blocks=blocks, w_scales=scales)
    assert source.shape(file) == (2, 3, 64)
    everything = (slice(None),) * 3
    np.testing.assert_array_equal(source.read(file, everything), values[:, 1::2])
    part = (slice(1, 2), slice(0, 2), slice(16, 48))
    np.testing.assert_array_equal(source.read(file, part), values[:, 1::2][part])


def test_gpt_oss_in_mxfp4_equals_its_plain_twin(tmp_path):
    plain, small = tmp_path / "plain", tmp_path / "packed"
    copy_golden("gpt-oss", plain)
    tensors = copy_golden("gpt-oss", small)
    packed_tensors = dict(tensors)
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = tensors[name].shape
        blocks, scales, values = packed(rng, experts, outer, inner)
        tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2))
        del packed_tensors[name]
        packed_tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(packed_tensors, small / "model.safetensors")
    config = json.loads((small / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (small / "config.json").write_text(json.dumps(config))
    same_params(plain, small)


def test_early_gpt2_files_lack_the_prefix_and_hold_masks(tmp_path):
    tensors = copy_golden("gpt2", tmp_path)
    early = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    early["h.0.attn.bias"] = np.tril(np.ones((1, 1, 512, 512), np.float32))
    early["h.0.attn.masked_bias"] = np.float32([-1e4])
    save_file(early, tmp_path / "model.safetensors")
    same_params(GOLDENS / "gpt2", tmp_path)


def test_the_text_of_a_model_that_sees_images_is_served_without_the_rest(tmp_path):
    tensors = copy_golden("gemma3", tmp_path)
    nested = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    nested["vision_tower.encoder.weight"] = np.zeros(4, np.float32)
    save_file(nested, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    same_params(GOLDENS / "gemma3", tmp_path)


def test_a77_fused_tensors_of_another_size_are_errors(tmp_path):
    tensors = copy_golden("phi3", tmp_path)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    for rows in (60, 68):
        wrong = np.zeros((rows, 32), np.float32)
        save_file({**tensors, name: wrong}, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=rf"{name} is \({rows}, 32\) in the file, which"):
            load_model(tmp_path, dtype="float32")


def test_a77_an_expert_that_is_missing_or_of_another_shape_is_named(tmp_path):
    tensors = copy_golden("mixtral", tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    save_file(rest, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"missing: {name}$"):
        load_model(tmp_path, dtype="float32")
    save_file({**rest, name: np.zeros((32, 40), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{name} is \(32, 40\) in the file"):
        load_model(tmp_path, dtype="float32")


def test_stacks_are_read_only_as_far_as_they_are_asked_for():
    file = File(**{f"w{i}": np.full((2, 3), i, np.float32) for i in range(4)})
    del file.tensors["w0"]  # reading it would fail
    stack = Stack(("w0", "w1", "w2", "w3"))
    part = stack.read(file, (slice(1, 3), slice(0, 1), slice(None)))
    np.testing.assert_array_equal(part, [[[1, 1, 1]], [[2, 2, 2]]])
