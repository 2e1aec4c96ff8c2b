"""What a request must produce: one sequence at a time, float32, no cache, no batch, no chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from paged_jax import SamplingParams
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
        return self.decode(prompt, SamplingParams(temperature=0.0, max_tokens=count))

    def sampled(self, prompt: Sequence[int], count: int, seed: int) -> Decoded:
        return self.decode(prompt, SamplingParams(max_tokens=count), seed)

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """float32[V]: of the token after these."""
        ids = np.zeros(self._length, np.int32)
        ids[: len(token_ids)] = token_ids
        logits = self._run(ids, np.int32(len(token_ids) - 1))
        shifted = logits - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    def decode(self, prompt: Sequence[int], params: SamplingParams, seed: int = 0) -> Decoded:
        """`max_tokens` tokens, past any end. Honours temperature 0 and 1, and penalties.

        At temperature 1 it is the best of logits and Gumbel noise, whose key is seed and position.
        """
        count = params.max_tokens
        assert count is not None and len(prompt) + count <= self._length + 1
        assert params.temperature in (0.0, 1.0)
        ids = np.zeros(self._length + 1, np.int32)
        ids[: len(prompt)] = prompt
        lead = np.inf
        for position in range(len(prompt), len(prompt) + count):
            logits = self._run(ids[:-1].copy(), np.int32(position - 1))
            scores = penalized(logits, prompt, ids[len(prompt) : position], params)
            if params.temperature:
                scores = scores + gumbel(seed, position, self.vocab_size)
            second, best = np.argsort(scores)[-2:]
            lead = min(lead, float(scores[best] - scores[second]))
            ids[position] = best
        return Decoded(tuple(ids[len(prompt) : len(prompt) + count].tolist()), lead)


def penalized(
    logits: np.ndarray, prompt: Sequence[int], output: np.ndarray, params: SamplingParams
) -> np.ndarray:
    scores = logits.copy()
    for token in {*prompt, *output.tolist()}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in output.tolist():
        scores[token] -= params.frequency_penalty
    for token in set(output.tolist()):
        scores[token] -= params.presence_penalty
    return scores


@jax.jit
def _noise(words, position, like):
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), position)
    return jax.random.gumbel(key, like.shape, jnp.float32)


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """float32[V]: the noise of the token at `position`."""
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    return np.asarray(_noise(words, np.int32(position), np.zeros(size, np.float32)))
