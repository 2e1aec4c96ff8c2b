"""The sampler against a sorted NumPy oracle, and the failures other engines have had."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax.sampling import _top_k, _top_p, sample
from scheduler import SamplingMetadata

_sample = jax.jit(sample)


def metadata(rows, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=None, positions=0):
    def fill(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (rows,)).copy()

    if seeds is None:
        seeds = np.stack([np.arange(rows), np.zeros(rows)], axis=1)
    return SamplingMetadata(
        temperature=fill(temperature, np.float32),
        top_k=fill(top_k, np.int32),
        top_p=fill(top_p, np.float32),
        min_p=fill(min_p, np.float32),
        seeds=np.asarray(seeds, np.uint32),
        positions=fill(positions, np.int32),
    )


def support(logits, draws=10_000, **fields):
    """The distinct tokens of many draws of one row of logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    return set(np.asarray(_sample(rows, metadata(draws, **fields))).tolist())


def sorted_prefix(scores, weights, wanted):
    """Oracle: by falling score, then rising id, until the weights reach `wanted`."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    kept, total = set(), 0.0
    for i in order:
        kept.add(i)
        total += weights[i]
        if total >= wanted:
            break
    return kept


def chosen(mask):
    return [set(np.flatnonzero(row).tolist()) for row in np.asarray(mask)]


def test_top_k_and_top_p_equal_a_sort():
    rng = np.random.default_rng(0)
    scores = np.round(rng.normal(size=(200, 37)), 1).astype(np.float32)  # rounded: many ties
    scores -= scores.max(axis=1, keepdims=True)
    keep = rng.random(scores.shape) < 0.8
    keep[np.arange(200), scores.argmax(axis=1)] = True
    top_k = rng.integers(1, 45, 200).astype(np.int32)
    top_p = rng.uniform(0.02, 0.98, 200).astype(np.float32)
    got_k = np.asarray(jax.jit(_top_k)(scores, keep, top_k)) & keep
    got_p = np.asarray(jax.jit(_top_p)(scores, keep, top_p)) & keep
    for i in range(200):
        kept = np.where(keep[i], 1.0, 0.0)
        mass = np.where(keep[i], np.exp(scores[i].astype(np.float64)), 0.0)
        expect_k = sorted_prefix(scores[i], kept, top_k[i])
        expect_p = sorted_prefix(scores[i], mass, top_p[i] * mass.sum() * (1 - 2e-6))
        assert chosen(got_k)[i] == {j for j in expect_k if keep[i, j]}
        assert chosen(got_p)[i] == {j for j in expect_p if keep[i, j]}


def test_draws_follow_the_probabilities():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    draws = 20_000
    rows = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities, jnp.float32)), (draws, 4))
    counts = np.bincount(np.asarray(_sample(rows, metadata(draws))), minlength=4)
    chi_squared = ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    assert chi_squared < 16.3  # 0.1 % of fair draws are above, with 3 degrees of freedom


def test_a30_a_seed_gives_the_same_tokens_whatever_the_neighbours():
    logits = jnp.zeros((5, 1000), jnp.float32)

    def tokens(row, rows, neighbour_temperature):
        out = []
        for position in range(16):
            seeds = [[7 + i, i] for i in range(rows)]
            seeds[row] = [42, 0]
            temperature = np.full(rows, neighbour_temperature)
            temperature[row] = 1.0
            fields = metadata(rows, temperature=temperature, seeds=seeds, positions=position)
            out.append(int(_sample(logits[:rows], fields)[row]))
        return out

    alone = tokens(0, 1, 1.0)
    assert tokens(0, 5, 1.0) == tokens(3, 5, 1.0) == tokens(3, 5, 0.0) == alone
    assert len(set(alone)) >= 12  # A31: the generator moves on


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a32_tiny_temperatures_are_greedy(temperature, dtype):
    rng = np.random.default_rng(1)
    logits = rng.permuted(np.tile(np.linspace(-60.0, 60.0, 100), (8, 1)), axis=1)
    logits = jnp.asarray(logits, jnp.dtype(dtype)).astype(jnp.float32)
    got = _sample(logits, metadata(8, temperature=temperature))
    assert np.asarray(got).tolist() == np.argmax(np.asarray(logits), axis=1).tolist()


def test_a33_top_k_past_the_vocabulary_is_no_limit():
    logits = np.linspace(0.0, 1.0, 12)
    everything = support(logits)
    assert everything == set(range(12))
    for top_k in (12, 13, 10**9):
        assert support(logits, top_k=top_k) == everything
    mixed = metadata(2, temperature=[0.0, 1.0], top_k=[0, 5])
    rows = jnp.asarray(np.tile(logits, (2, 1)), jnp.float32)
    got = np.asarray(_sample(rows, mixed))
    assert got[0] == 11 and got[1] >= 7


def test_a34_smallest_nucleus_is_the_best_token():
    logits = np.log([0.3, 0.4, 0.3])
    assert support(logits, top_p=0.0) == {1}
    assert support(logits, top_p=1e-9) == {1}
    assert support(logits, top_p=1.0) == {0, 1, 2}
    assert support(np.zeros(3), top_p=0.0) == {0}  # a tie goes to the lower id


def test_a35_nucleus_keeps_the_token_that_crosses_the_threshold():
    assert support(np.log([0.5, 0.41, 0.09]), top_p=0.9) == {0, 1}
    assert support(np.log([0.5, 0.25, 0.25]), top_p=0.5) == {0}
    assert support(np.log([0.5, 0.25, 0.25]), top_p=1.0) == {0, 1, 2}


def test_a36_top_k_keeps_exactly_k():
    logits = np.linspace(0.0, 1.1, 12)
    assert support(logits, temperature=5.0, top_k=1) == {11}
    assert support(logits, temperature=5.0, top_k=2) == {10, 11}


def test_min_p_is_relative_to_the_best():
    assert support(np.log([0.6, 0.31, 0.09]), min_p=0.5) == {0, 1}
    assert support(np.log([0.6, 0.31, 0.09]), min_p=1.0) == {0}


def test_rows_that_are_not_finite_are_reported_and_disturb_nobody():
    logits = np.random.default_rng(2).normal(size=(4, 50)).astype(np.float32)
    clean = np.asarray(_sample(jnp.asarray(logits), metadata(4)))
    logits[1] = np.nan
    logits[2, 7] = np.inf
    got = np.asarray(_sample(jnp.asarray(logits), metadata(4)))
    assert got.tolist() == [clean[0], -1, -1, clean[3]]
    logits[1:3] = -np.inf
    logits[1:3, 9] = 0.0  # masked tokens are no error
    assert np.asarray(_sample(jnp.asarray(logits), metadata(4)))[1:3].tolist() == [9, 9]
