"""Drawing tokens on the device: greedy, temperature, min-p, top-k, top-p, with a key for each row.

The order is temperature, min-p, top-k, then top-p over what is left. Nothing is sorted: the
thresholds are found by bisection over the bits of a float, exact in 32 rounds. Ties at a
threshold go to the lower token ids.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

__all__ = ["Logprobs", "Sampling", "draw", "logprobs_of", "sample"]

MASS_TOLERANCE = 2e-6  # of a sum of float32 probabilities; 0.5 must count as reaching 0.5
GROUP = 64  # tokens; of 49152 there are then 768 groups to find the best among


@runtime_checkable
class Sampling(Protocol):
    """The arrays that `sample` reads; the scheduler's `SamplingMetadata` has this shape."""

    temperature: Float[Array, " R"]
    top_k: Int[Array, " R"]
    top_p: Float[Array, " R"]
    min_p: Float[Array, " R"]
    seeds: UInt[Array, "R 2"]
    positions: Int[Array, " R"]


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities: of a token, and of the most likely ones."""

    chosen: Float[Array, " R"]
    top_ids: Int[Array, "R N"]  # most likely first, ties by id
    top: Float[Array, "R N"]


def logprobs_of(logits: Float[Array, "R V"], tokens: Int[Array, " R"], num_top: int) -> Logprobs:
    """Log-probabilities of these tokens, and of the `num_top` most likely ones."""
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1)
    top, top_ids = _best(logits, min(num_top, logits.shape[1]))
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[:, None], axis=1)[:, 0]
    return Logprobs(chosen - total, top_ids, top - total[:, None])


def _best(x: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R N"], Int[Array, "R N"]]:
    """The largest entries of each row, falling, ties by id; what `lax.top_k` gives, in one pass.

    The `count` best lie in the `count` groups whose best is best, so that only those are sorted.
    """
    rows, size = x.shape
    if size < 2 * GROUP * count:
        top, ids = lax.top_k(x, count)
        return top, ids.astype(jnp.int32)
    num_groups = -(-size // GROUP)
    padded = jnp.pad(x, ((0, 0), (0, num_groups * GROUP - size)), constant_values=-jnp.inf)
    grouped = padded.reshape(rows, num_groups, GROUP)
    _, groups = lax.top_k(jnp.max(grouped, axis=2), count)
    groups = jnp.sort(groups, axis=1).astype(jnp.int32)
    candidates = jnp.take_along_axis(grouped, groups[:, :, None], axis=1)
    top, at = lax.top_k(candidates.reshape(rows, -1), count)
    at = at.astype(jnp.int32)
    return top, jnp.take_along_axis(groups, at // GROUP, axis=1) * GROUP + at % GROUP


def sample(logits: Float[Array, "R V"], sampling: Sampling) -> Int[Array, " R"]:
    """One token a row, -1 where the logits hold NaN or +inf, or nothing but -inf.

    A row's token depends on its own logits, fields, seed and position only. The key is the seed
    with the position folded in; the noise is Gumbel's, so that the largest sum is a draw.
    """
    return draw(logits, sampling)[0]


def draw(
    logits: Float[Array, "R V"], sampling: Sampling
) -> tuple[Int[Array, " R"], Float[Array, "R V"]]:
    """The tokens of `sample`, and the logits that they were drawn from: a greedy row's are as they
    came, those of the others are divided by the temperature and -inf where filtered out."""
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn, shaped = lax.cond(
        jnp.any(sampling.temperature > 0.0),
        lambda: _draw(logits, best, sampling),
        lambda: (best, logits),
    )
    return jnp.where(jnp.isfinite(jnp.max(logits, axis=-1)), drawn, -1), shaped


def _draw(
    logits: Float[Array, "R V"], best: Int[Array, " R"], sampling: Sampling
) -> tuple[Int[Array, " R"], Float[Array, "R V"]]:
    top = jnp.max(logits, axis=-1, keepdims=True)
    greedy = sampling.temperature <= 0.0
    temperature = jnp.where(greedy, 1.0, sampling.temperature)
    # At most 0, and exactly 0 for the best token: no temperature overflows, however small.
    scores = (logits - top) / temperature[:, None]
    keep = scores >= jnp.log(sampling.min_p)[:, None]
    keep = lax.cond(
        jnp.any(sampling.top_k > 0),
        lambda: keep & _top_k(scores, keep, sampling.top_k),
        lambda: keep,
    )
    keep = lax.cond(
        jnp.any(sampling.top_p < 1.0),
        lambda: keep & _top_p(scores, keep, sampling.top_p),
        lambda: keep,
    )
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(
        sampling.seeds, sampling.positions, logits.shape[1]
    )
    shaped = jnp.where(keep, scores, -jnp.inf)
    drawn = jnp.argmax(shaped + noise, axis=-1).astype(jnp.int32)
    return jnp.where(greedy, best, drawn), jnp.where(greedy[:, None], logits, shaped)


def _gumbel(seed: UInt[Array, " 2"], position: Int[Array, ""], size: int) -> Float[Array, " V"]:
    key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (size,), jnp.float32)


def _top_k(
    scores: Float[Array, "R V"], keep: Bool[Array, "R V"], top_k: Int[Array, " R"]
) -> Bool[Array, "R V"]:
    """The `top_k` best of the kept tokens; all of them where `top_k` is 0."""
    wanted = jnp.where(top_k > 0, top_k, scores.shape[1]).astype(jnp.float32)
    return _heaviest(scores, keep.astype(jnp.float32), wanted)


def _top_p(
    scores: Float[Array, "R V"], keep: Bool[Array, "R V"], top_p: Float[Array, " R"]
) -> Bool[Array, "R V"]:
    """The fewest best tokens whose share of the kept probability reaches `top_p`."""
    mass = jnp.where(keep, jnp.exp(scores), 0.0)
    wanted = top_p * jnp.sum(mass, axis=-1) * (1.0 - MASS_TOLERANCE)
    wanted = jnp.maximum(wanted, jnp.finfo(jnp.float32).tiny)  # the best token always stays
    return _heaviest(scores, mass, jnp.where(top_p < 1.0, wanted, jnp.inf))


def _heaviest(
    scores: Float[Array, "R V"], weights: Float[Array, "R V"], wanted: Float[Array, " R"]
) -> Bool[Array, "R V"]:
    """The shortest prefix, by falling score and rising token id, whose weights reach `wanted`.

    `wanted` is above 0. Everything is kept where all weights together do not reach it.
    """
    order = _ordered_bits(scores)
    threshold = _bisect(
        lambda bits: _total(weights, order >= bits[:, None]) >= wanted, scores.shape[0], 32
    )
    above = order > threshold[:, None]
    level = order == threshold[:, None]
    missing = wanted - _total(weights, above)
    ids = jnp.arange(scores.shape[1], dtype=jnp.uint32)[None, :]
    # The largest distance from the end at which the tied tokens up to there still suffice.
    last = jnp.uint32(scores.shape[1] - 1)
    num_bits = max(1, (scores.shape[1] - 1).bit_length())
    spared = _bisect(
        lambda n: (n <= last) & (_total(weights, level & (ids <= (last - n)[:, None])) >= missing),
        scores.shape[0],
        num_bits,
    )
    return above | (level & (ids <= (last - spared)[:, None]))


def _total(weights: Float[Array, "R V"], chosen: Bool[Array, "R V"]) -> Float[Array, " R"]:
    return jnp.sum(jnp.where(chosen, weights, 0.0), axis=-1)


def _bisect(holds, num_rows: int, num_bits: int) -> UInt[Array, " R"]:
    """The largest number of `num_bits` bits for which the falling predicate `holds`, or 0."""

    def set_bit(i: Array, found: Array) -> Array:
        bit = jnp.left_shift(jnp.uint32(1), (num_bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(found | bit), found | bit, found)

    return lax.fori_loop(0, num_bits, set_bit, jnp.zeros(num_rows, jnp.uint32))


def _ordered_bits(x: Float[Array, "R V"]) -> UInt[Array, "R V"]:
    """Unsigned integers in the order of the floats; -0 and +0 are one."""
    bits = lax.bitcast_convert_type(x + 0.0, jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits < sign, bits | sign, ~bits)
