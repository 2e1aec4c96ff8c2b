"""The examples run as they stand, and what they print is true."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import pytest

from paged_jax.models import from_linen, from_nnx
from tests.dense_decoding import DenseDecoder


@pytest.fixture(autouse=True)
def as_users_run_it():
    """JAX's own defaults: optax relies on them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


EXAMPLES = Path(__file__).resolve().parent.parent / "scripts" / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_nnx_model_from_scratch_is_trained_and_served(capsys):
    example = load("nnx_from_scratch")
    result = example.main(steps=40)
    assert result["losses"][-1] < 0.5 * result["losses"][0]
    decoder = DenseDecoder(from_nnx(result["model"]), example.CONTEXT)
    for prompt, text in zip(result["prompts"], result["texts"], strict=True):
        decoded = decoder.greedy(example.encode(prompt), 24)
        assert not decoded.is_clear or text == example.decode(decoded.token_ids)
    assert f"'the cat ' -> {result['texts'][0]!r}" in capsys.readouterr().out


def test_a_linen_model_with_scanned_layers_is_served(capsys):
    example = load("linen_scan")
    result = example.main()
    served = from_linen(result["module"], result["params"], num_layers=example.LAYERS)
    decoder = DenseDecoder(served, 64)
    for prompt, output in zip(result["prompts"], result["outputs"], strict=True):
        decoded = decoder.greedy(prompt, 8)
        assert not decoded.is_clear or output == list(decoded.token_ids)
    assert "6 layers" in capsys.readouterr().out


def test_a_policy_gradient_loop_learns_with_weights_updated_in_place(capsys):
    result = load("policy_gradient").main(iterations=10)
    rewards = result["rewards"]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert 0 < max(result["differences"]) < 1e-4
    out = capsys.readouterr().out
    assert "|train - rollout| log-probability at most" in out and "iteration 9" in out


def test_every_example_is_run_here():
    found = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = {"linen_scan", "nnx_from_scratch", "policy_gradient"}
    assert found == tested
