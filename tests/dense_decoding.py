"""What a request must produce: one sequence at a time, float32, no cache, no batch, no chunks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax.attention import dense
from paged_jax.models import ServedModel

LEAD = 1e-3  # by which the best must win at every step, so that rounding explains no difference


@dataclass(frozen=True)
class Decoded:
    """`lead` is the smallest distance between the best and the second best token of any step."""

    token_ids: tuple[int, ...]
    lead: float

    @property
    def is_clear(self) -> bool:
        return self.lead > LEAD


class DenseDecoder:
    """Decodes by running the whole sequence anew for each token. Sequences up to `length`."""

    def __init__(self, model: ServedModel, length: int):
        self.vocab_size = model.vocab_size
        self._length = length

        @jax.jit
        def run(params, ids, last):
            positions = jnp.arange(length, dtype=jnp.int32)
            hidden = model.apply(params, ids, positions, dense(jnp.zeros_like(ids)))
            return model.logits(params, hidden[last][None])[0]

        self._run = lambda ids, last: np.asarray(run(model.params, ids, last))

    def greedy(self, prompt: Sequence[int], count: int) -> Decoded:
        return self._decode(prompt, count, lambda logits, position: logits)

    def sampled(self, prompt: Sequence[int], count: int, seed: int) -> Decoded:
        """Temperature 1: the best of logits and Gumbel noise, whose key is seed and position."""
        return self._decode(
            prompt,
            count,
            lambda logits, position: logits + gumbel(seed, position, self.vocab_size),
        )

    def _decode(
        self, prompt: Sequence[int], count: int, score: Callable[[np.ndarray, int], np.ndarray]
    ) -> Decoded:
        assert len(prompt) + count <= self._length + 1
        ids = np.zeros(self._length + 1, np.int32)
        ids[: len(prompt)] = prompt
        lead = np.inf
        for position in range(len(prompt), len(prompt) + count):
            scores = score(self._run(ids[:-1].copy(), np.int32(position - 1)), position)
            second, best = np.argsort(scores)[-2:]
            lead = min(lead, float(scores[best] - scores[second]))
            ids[position] = best
        return Decoded(tuple(ids[len(prompt) : len(prompt) + count].tolist()), lead)


@jax.jit
def _noise(words, position, like):
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return jax.random.gumbel(key, like.shape, jnp.float32)


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """float32[V]: the noise of the token at `position`."""
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return np.asarray(_noise(words, np.int32(position), np.zeros(size, np.float32)))
