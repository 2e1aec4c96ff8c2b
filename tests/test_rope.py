"""Rotary embeddings: frequencies against the published formulas, dialects, refusals."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.errors import ModelLoadError
from paged_jax.rope import Rope, rotate
from tests.oracle_llama import rope_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
CONFIGS = {
    "absent": {},
    "null": {"rope_theta": 10000.0, "rope_scaling": None},
    "default": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default"}},
    "linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "yarn": {"rope_theta": 1000000.0, "rope_scaling": YARN},
    "parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    "parameters-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2}
    },
    "parameters-llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a73_frequencies_and_angles_follow_the_published_formula(config):
    rope = Rope.from_hf(config, head_size=128)
    want = rope_frequencies(config, 128)
    np.testing.assert_allclose(rope.frequencies(), want, rtol=1e-6)

    positions = np.array([0, 1000, 8192, 20000])
    cos, sin = jax.jit(rope)(jnp.asarray(positions))
    # The models were trained with float32 angles: the product is rounded before it is turned.
    angles = (positions[:, None].astype(np.float32) * want.astype(np.float32)).astype(np.float64)
    length = 0.1 * math.log(4) + 1 if config.get("rope_scaling") is YARN else 1.0
    np.testing.assert_allclose(cos, length * np.cos(angles), atol=1e-6)
    np.testing.assert_allclose(sin, length * np.sin(angles), atol=1e-6)


def test_every_kind_of_scaling_changes_the_frequencies():
    """A scaling that is read and then not applied would pass for 'default'."""
    plain = Rope.from_hf({"rope_theta": 500000.0}, head_size=128).frequencies()
    linear = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    np.testing.assert_allclose(4 * Rope.from_hf(linear, head_size=128).frequencies(), plain)
    llama3 = Rope.from_hf(CONFIGS["llama3"], head_size=128).frequencies()
    ratio = plain / llama3
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(8.0)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()  # and a blend between


def test_parameters_of_the_newer_dialect_win():
    config = {"rope_theta": 1.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}
    assert Rope.from_hf(config, head_size=4).theta == 10.0


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rope = Rope.from_hf({}, head_size=16)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 2, 16)), jnp.float32) for _ in range(2))

    def product(q_position: int, k_position: int) -> np.ndarray:
        at = [rope(jnp.array([p])) for p in (q_position, k_position)]
        return np.einsum("thd,thd->h", rotate(q, at[0]), rotate(k, at[1]))

    np.testing.assert_allclose(product(7, 3), product(104, 100), atol=1e-4)
    assert np.abs(product(7, 3) - product(7, 4)).max() > 1e-2
    np.testing.assert_allclose(product(5, 5), np.einsum("thd,thd->h", q, k), atol=1e-5)


def test_a_step_computes_each_cosine_once():
    """And not again for every head of every layer, as XLA's CPU did with a cosine by itself."""
    rope = Rope(rotary_size=16, theta=10000.0)
    weights = jnp.ones((3, 64, 64))

    def layers(x, positions):
        angles = rope(positions)
        for weight in weights:
            x = rotate((x @ weight).reshape(8, 4, 16), angles).reshape(8, 64)
        return x

    compiled = jax.jit(layers).lower(jnp.ones((8, 64)), jnp.arange(8)).compile()
    assert compiled.as_text().count(" cosine(") == 1


def test_rotation_is_float32_inside_and_keeps_the_dtype():
    rope = Rope.from_hf({}, head_size=16)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 16)), jnp.bfloat16)
    angles = rope(jnp.array([1, 999, 5000]))
    out = rotate(x, angles)
    assert out.dtype == jnp.bfloat16
    wide = rotate(x.astype(jnp.float32), angles)
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "'spiral' is not supported"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' lacks factor"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' lacks short_factor, long_factor"),
        ({"rope_scaling": "linear"}, "rope parameters must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
            "'llama3' lacks high_freq_factor",
        ),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            r"each kind of layer: \['full_attention'\]",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config, message):
    with pytest.raises(ModelLoadError, match=message):
        Rope.from_hf(config, head_size=16)
    with pytest.raises(ModelLoadError, match="even head_size=15"):
        Rope.from_hf({}, head_size=15)
