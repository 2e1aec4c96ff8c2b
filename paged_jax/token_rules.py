"""Which tokens a request's samples may draw next, worked out on the host for every step."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from paged_jax.logit_edits import BITS, LogitEdits, no_edits, num_words
from scheduler import MAX_LOGIT_BIAS, Request, SchedulerOutput
from scheduler import Sequence as Sample

__all__ = ["FormState", "TokenRules", "make_edits"]


class FormState(Protocol):
    """How far one sample has come in the form that its text must have."""

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take in drawn tokens; False if they do not fit."""

    def mask(self) -> np.ndarray | None:
        """int32[W]: the tokens that may come next; None if that cannot be worked out."""


class TokenRules:
    """The rules of one request. Owned by the engine's thread.

    `bad_words` are token ids, several for a word; `form` has a state for each sample. Of what
    rules out everything together, first `min_tokens` and `bad_words` are left aside, then
    `allowed_token_ids`: an output can always go on.
    """

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        *,
        bad_words: Sequence[Sequence[int]] = (),
        form: Sequence[FormState] = (),
    ):
        params = request.params
        self.failed = False  # a form could not be followed
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._min_tokens = params.min_tokens
        self._vocab_size = vocab_size
        self._every = _packed(range(vocab_size), vocab_size)
        self._stops = _packed(sorted(request.stop_token_ids), vocab_size)
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else _packed(allowed, vocab_size)
        self._bad_words = tuple(tuple(word) for word in bad_words)
        self._form = tuple(form)
        self._num_taken = [0] * len(self._form)
        self.bias = params.biases

    def mask(self, sample: Sample, position: int) -> np.ndarray | None:
        """int32[W] for the token at `position`; None where every token may be drawn.

        The tokens before it must be known, unless all that counts is how many they are.
        """
        may = _both(self._allowed, self._form_mask(sample) if self._form else None)
        excluded = self._excluded(sample, position)
        if excluded is None:
            return may
        return _both(~excluded, self._every if may is None else may)

    def _form_mask(self, sample: Sample) -> np.ndarray:
        state, output = self._form[sample.index], sample.output_token_ids
        new = output[self._num_taken[sample.index] :]
        self._num_taken[sample.index] = len(output)
        mask = state.mask() if not new or state.advance(new) else None
        if mask is None:
            self.failed = True
            return np.zeros(num_words(self._vocab_size), np.int32)
        return mask

    def _excluded(self, sample: Sample, position: int) -> np.ndarray | None:
        """int32[W]: tokens that would end the output too early, or end a bad word."""
        too_early = position - self._num_prompt_tokens < self._min_tokens
        last = self._last_of_bad_words(sample)
        if not too_early and not last:
            return None
        excluded = _packed(last, self._vocab_size)
        return excluded | self._stops if too_early else excluded

    def _last_of_bad_words(self, sample: Sample) -> list[int]:
        if not self._bad_words:
            return []
        output = tuple(sample.output_token_ids)
        return [
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]
        ]


def make_edits(
    output: SchedulerOutput, rules_of: Mapping[str, TokenRules], rows: int, vocab_size: int
) -> LogitEdits | None:
    """The edits of a step's sampled rows, padded to `rows`; None if there are none."""
    edits, has_bias, has_mask = None, False, False
    for i, sampled in enumerate(output.samples):
        rules = rules_of.get(sampled.sequence.request.request_id)
        if rules is None:
            continue
        edits = edits or no_edits(rows, vocab_size, MAX_LOGIT_BIAS)
        if rules.bias:
            has_bias = True
            edits.bias_ids[i, : len(rules.bias)], edits.bias[i, : len(rules.bias)] = zip(
                *rules.bias, strict=True
            )
        mask = rules.mask(sampled.sequence, sampled.position)
        if mask is not None:
            has_mask = True
            edits.mask[i] = mask
    if edits is None:
        return None
    return edits._replace(has_bias=np.asarray(has_bias), has_mask=np.asarray(has_mask))


def _both(mask: np.ndarray | None, other: np.ndarray | None) -> np.ndarray | None:
    """What both allow; where that is nothing, what `other` does, or else `mask`."""
    if mask is None or other is None:
        return other if mask is None else mask
    both = mask & other
    return both if both.any() else other


def _packed(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32[W] with the bits of these tokens."""
    bits = np.zeros(num_words(vocab_size) * BITS, np.bool_)
    bits[np.asarray(token_ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
