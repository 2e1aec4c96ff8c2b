"""Hidden states between layers: captured, and steered by each request's own vector."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ConfigError, Engine, EngineConfig, RequestError, SamplingParams
from paged_jax.attention import dense
from paged_jax.errors import ModelLoadError
from paged_jax.models import ServedModel, from_function, from_nnx
from paged_jax.progress import SilentProgress
from paged_jax.taps import Steering, TappedAttend, tap
from tests import nnx_models
from tests.engine_runs import Run, assert_idle

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


# -- in the engine ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(model) -> Iterator[Engine]:
    engine = Engine(
        model,
        capture_layers=(0, 2),
        steering_layers=(1,),
        max_model_len=48,
        max_num_seqs=3,
        max_num_batched_tokens=9,
        block_size=4,
        num_blocks=60,
        warmup="none",
        progress=SilentProgress(),
    )
    yield engine
    assert_idle(engine)
    engine.close()


def vector(seed: int) -> np.ndarray:
    return 2 * np.random.default_rng(seed).standard_normal(E).astype(np.float32)


def test_the_engine_gives_the_states_of_every_token(engine):
    texts = [IDS.tolist(), [5], list(range(40, 70))]
    for found in (engine.capture(texts), engine.capture(texts)):  # also where a cache is warm
        for ids, states in zip(texts, found, strict=True):
            want = by_hand(np.asarray(ids))
            assert list(states) == [0, 2]
            for layer, got in states.items():
                np.testing.assert_allclose(got, want[layer], atol=1e-4)
    (steered,) = engine.capture([texts[0]], steering={1: vector(0)})
    want = by_hand(vectors={1: vector(0)[None]})
    np.testing.assert_allclose(steered[2], want[2], atol=1e-4)


def steered_greedy(model: ServedModel, prompt, steer: np.ndarray | None, count: int) -> list[int]:
    """Token after token, densely."""
    ids = list(prompt)
    table = np.zeros((1, 1, E), np.float32) if steer is None else steer[None, None]
    for _ in range(count):
        padded = np.zeros(32, np.int32)
        padded[: len(ids)] = ids
        rows = jnp.zeros(32, jnp.int32)
        hidden, _ = run(model, padded, steering=Steering((1,), jnp.asarray(table), rows))
        ids.append(int(model.logits(model.params, hidden[len(ids) - 1][None])[0].argmax()))
    return ids[len(prompt) :]


def test_every_request_is_steered_by_its_own_vector(engine, model):
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    vectors = [None, vector(1), vector(2), None, vector(1), vector(3)]  # rows are used again
    jobs = Run(engine)
    cached = {}
    for i, steer in enumerate(vectors):
        steering = None if steer is None else {1: steer}
        cached[i] = engine.add_request(str(i), IDS.tolist(), params, steering=steering)
    jobs.drain()
    want = [steered_greedy(model, IDS, steer, 6) for steer in vectors]
    assert [list(jobs.tokens(str(i))) for i in range(6)] == want
    assert len({tuple(tokens) for tokens in want}) == 4
    assert cached[4].num_cached_tokens == 8 and cached[5].num_cached_tokens == 0


def test_what_cannot_be_steered_or_captured_is_refused_by_name(engine, model):
    def add(steering):
        engine.add_request("r", [1, 2], SamplingParams(), steering=steering)

    with pytest.raises(RequestError, match=r"names layer 0; .*steering_layers=\(1,\)"):
        add({0: vector(0)})
    with pytest.raises(RequestError, match=r"must be 32 finite numbers, got shape \[3\]"):
        add({1: np.ones(3)})
    with pytest.raises(RequestError, match="finite numbers"):
        add({1: np.full(E, np.nan)})
    with pytest.raises(ModelLoadError, match=r"no tap behind layers \[7\]"):
        Engine(model, capture_layers=(7,), max_model_len=48, progress=SilentProgress())
    with pytest.raises(ConfigError, match=r"capture_layers must be different layer numbers"):
        EngineConfig(model="m", capture_layers=(1, 1))
