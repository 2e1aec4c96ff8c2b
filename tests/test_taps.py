"""Hidden states between layers: captured, and steered by each request's own vector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.attention import dense
from paged_jax.errors import ModelLoadError
from paged_jax.models import ServedModel, from_function, from_nnx
from paged_jax.taps import Steering, TappedAttend, tap
from tests import nnx_models

E = nnx_models.E
IDS = np.arange(10, 22, dtype=np.int32)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return from_nnx(nnx_models.Decoder([(None, 2), (6, 1), (None, 2)]))


def run(model: ServedModel, ids=IDS, **taps):
    """Hidden states of one sequence, and what was captured."""
    ids = jnp.asarray(ids)
    attend = TappedAttend(dense(jnp.zeros_like(ids)), **taps)
    hidden = model.apply(model.params, ids, jnp.arange(len(ids), dtype=jnp.int32), attend)
    return hidden, attend.captured()


def by_hand(ids=IDS, vectors=None) -> list[np.ndarray]:
    """The states behind each layer, from the module itself."""
    module = nnx_models.Decoder([(None, 2), (6, 1), (None, 2)])
    x = module.tokens[...][ids] + module.places[...][np.arange(len(ids))]
    states = []
    for i, layer in enumerate(module.layers):
        x = layer(x, dense(jnp.zeros(len(ids), jnp.int32)))
        if vectors is not None and i in vectors:
            x = x + vectors[i]
        states.append(np.asarray(x))
    return states


def test_what_leaves_the_chosen_layers_is_captured(model):
    plain, none = run(model)
    assert none is None
    hidden, captured = run(model, capture_layers=(2, 0))
    np.testing.assert_array_equal(hidden, plain)
    states = by_hand()
    assert captured.shape == (2, len(IDS), E)
    np.testing.assert_allclose(captured[0], states[2], atol=1e-5)
    np.testing.assert_allclose(captured[1], states[0], atol=1e-5)


def test_a_vector_is_added_behind_its_layer_for_its_rows_only(model):
    vector = np.random.default_rng(0).standard_normal(E).astype(np.float32)
    table = np.zeros((3, 1, E), np.float32)
    table[1, 0] = vector
    rows = np.where(np.arange(len(IDS)) >= 7, 1, 2).astype(np.int32)
    steering = Steering((1,), jnp.asarray(table), jnp.asarray(rows))
    _, captured = run(model, capture_layers=(0, 1, 2), steering=steering)
    added = np.where(rows[:, None] == 1, vector, 0)
    for got, want in zip(captured, by_hand(vectors={1: added}), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(captured[2][:7], run(model, capture_layers=(2,))[1][0][:7])


def test_a_function_may_tap_by_itself():
    def apply(params, token_ids, positions, attend):
        x = params["tokens"][token_ids] + positions[:, None].astype(jnp.float32)
        heads = x[:, None, :]
        x = tap(attend, x + attend(heads, heads, heads, layer=0)[:, 0], layer=0)
        return x @ params["tokens"].T

    params = {"tokens": jax.random.normal(jax.random.key(0), (30, E))}
    served = from_function(apply, params)
    hidden, captured = run(served, capture_layers=(0,))
    np.testing.assert_allclose(captured[0] @ params["tokens"].T, hidden, atol=1e-4)
    with pytest.raises(ModelLoadError, match=r"no tap behind layers \[3\].*taps behind \[0\]"):
        run(served, capture_layers=(3,))
