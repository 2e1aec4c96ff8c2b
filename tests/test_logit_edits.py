"""Biases and masks on the device, and what is drawn from all of it together, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.logit_edits import add_biases, mask_tokens, no_edits, num_words
from paged_jax.penalties import TokenCounts, penalize
from paged_jax.sampling import _best, draw, logprobs_of
from scheduler import PenaltyMetadata, SamplingMetadata


def packed(allowed: np.ndarray) -> np.ndarray:
    """bool[R, V] as int32[R, W], a bit at a time."""
    words = np.zeros((len(allowed), num_words(allowed.shape[1])), np.int64)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= 1 << (token % 32)
    return words.astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("vocab_size", [32, 33, 95, 160])
def test_a_mask_hides_what_its_bits_do_not_allow(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(5, vocab_size)).astype(np.float32)
    allowed = rng.random(logits.shape) < 0.5
    edits = no_edits(5, vocab_size, 4)._replace(mask=packed(allowed))
    off = jax.jit(mask_tokens)(logits, edits)
    np.testing.assert_array_equal(off, logits)
    on = jax.jit(mask_tokens)(logits, edits._replace(has_mask=np.True_))
    np.testing.assert_array_equal(on, np.where(allowed, logits, -np.inf))


def test_biases_are_added_and_padding_changes_nothing():
    logits = np.full((2, 50), -0.0, np.float32)
    logits[0, 3] = 1.5
    edits = no_edits(2, 50, 4)
    edits.bias_ids[0, :2], edits.bias[0, :2] = [3, 49], [-100.0, 2.0]
    on = np.asarray(jax.jit(add_biases)(logits, edits._replace(has_bias=np.True_)))
    assert (on[0, 3], on[0, 49]) == (-98.5, 2.0)
    assert not on[1].any() and not on[0, 4:49].any()
    np.testing.assert_array_equal(jax.jit(add_biases)(logits, edits), logits)


@pytest.mark.parametrize("size", [30, 2560, 3001])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_best_are_those_of_a_sort(size, count):
    x = np.round(np.random.default_rng(size).normal(size=(6, size)), 1).astype(np.float32)  # ties
    x[1, 7:] = -np.inf
    top, ids = jax.jit(_best, static_argnums=1)(x, count)
    order = np.argsort(-x, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(top, np.take_along_axis(x, order, axis=1))


def test_a43_logprobs_are_those_of_log_softmax():
    logits = np.random.default_rng(3).normal(size=(4, 3000)).astype(np.float32) * 4
    tokens = np.array([0, 2999, 17, 5], np.int32)
    got = jax.jit(logprobs_of, static_argnums=2)(logits, tokens, 5)
    want = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
    np.testing.assert_allclose(got.chosen, want[np.arange(4), tokens], atol=1e-4)
    for row in range(4):
        np.testing.assert_allclose(got.top[row], want[row, got.top_ids[row]], atol=1e-4)
        assert (np.diff(got.top[row]) <= 0).all()


# Every knob against its exact distribution

V = 8
LOGITS = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -4.0], np.float32)
SAID = {1: 2, 4: 1}  # token: how often
IN_PROMPT = {0, 1}
DRAWS = 20_000
KNOBS = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all filters": {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    "presence": {"presence": 1.0},
    "frequency": {"frequency": 0.75},
    "repetition": {"repetition": 2.0},
    "bias": {"bias": {0: -1.5, 7: 3.0}},
    "mask": {"allowed": [1, 2, 5, 7]},
    "everything": {
        "temperature": 0.8,
        "top_p": 0.95,
        "presence": 0.3,
        "frequency": 0.2,
        "repetition": 1.3,
        "bias": {3: 1.0},
        "allowed": [0, 1, 3, 4, 5],
    },
}


def exact(knobs) -> np.ndarray:
    """The probability of each token, in float64 and with sorts."""
    x = LOGITS.astype(np.float64)
    for token, bias in knobs.get("bias", {}).items():
        x[token] += bias
    for token in IN_PROMPT | set(SAID):
        factor = knobs.get("repetition", 1.0)
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token, count in SAID.items():
        x[token] -= knobs.get("presence", 0.0) + count * knobs.get("frequency", 0.0)
    allowed = np.isin(np.arange(V), knobs.get("allowed", np.arange(V)))
    x = np.where(allowed, x, -np.inf) / knobs.get("temperature", 1.0)
    p = np.exp(x - x.max())
    p[p < knobs.get("min_p", 0.0) * p.max()] = 0.0
    order = np.argsort(-p, kind="stable")
    p[order[knobs.get("top_k", V) :]] = 0.0
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= knobs.get("top_p", 1.0) * p.sum()]] = 0.0
    return p / p.sum()


@jax.jit
def shaped(logits, counts, rows, penalties, edits, sampling):
    logits = penalize(add_biases(logits, edits), counts, rows, penalties)
    return draw(mask_tokens(logits, edits), sampling)


@pytest.mark.parametrize("knob", KNOBS)
def test_draws_follow_the_exact_distribution(knob):
    knobs = KNOBS[knob]
    seeds = np.stack([np.arange(DRAWS), np.full(DRAWS, 7)], axis=1).astype(np.uint32)

    def rows_of(name, default, dtype=np.float32):
        return np.full(DRAWS, knobs.get(name, default), dtype)

    sampling = SamplingMetadata(
        temperature=rows_of("temperature", 1.0),
        top_k=rows_of("top_k", 0, np.int32),
        top_p=rows_of("top_p", 1.0),
        min_p=rows_of("min_p", 0.0),
        seeds=seeds,
        positions=np.zeros(DRAWS, np.int32),
    )
    penalties = PenaltyMetadata(
        rows_of("presence", 0.0), rows_of("frequency", 0.0), rows_of("repetition", 1.0)
    )
    counts = TokenCounts(np.zeros((1, V), np.bool_), np.zeros((1, V), np.int32))
    counts.in_prompt[0, list(IN_PROMPT)] = True
    counts.in_output[0, list(SAID)] = list(SAID.values())
    edits = no_edits(DRAWS, V, 2)._replace(
        has_bias=np.asarray("bias" in knobs), has_mask=np.asarray("allowed" in knobs)
    )
    for i, (token, bias) in enumerate(knobs.get("bias", {}).items()):
        edits.bias_ids[:, i], edits.bias[:, i] = token, bias
    allowed = np.isin(np.arange(V), knobs.get("allowed", np.arange(V)))
    edits = edits._replace(mask=np.tile(packed(allowed[None]), (DRAWS, 1)))
    logits = jnp.broadcast_to(LOGITS, (DRAWS, V))
    tokens, kept = shaped(logits, counts, np.zeros(DRAWS, np.int32), penalties, edits, sampling)
    want = exact(knobs)
    possible = want > 0
    seen = np.bincount(np.asarray(tokens), minlength=V)
    assert not seen[~possible].any()
    expected = DRAWS * want[possible]
    chi_squared = ((seen[possible] - expected) ** 2 / expected).sum()
    assert chi_squared < 27.9  # of fair draws 0.1 % are above, with 9 degrees of freedom or fewer
    # What processed log-probabilities are made of is what was drawn from.
    processed = np.exp(np.asarray(logprobs_of(kept[:1], tokens[:1], V).top[0], np.float64))
    np.testing.assert_allclose(np.sort(processed), np.sort(want), atol=1e-5)
