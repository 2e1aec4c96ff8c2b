"""Beam search: the most likely continuations, found breadth first.

Each round asks the engine for the most likely next tokens of every beam. Beams share what they
have in common through the prefix cache, so a round computes at most a block of each beam.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paged_jax.errors import RequestError
from paged_jax.outputs import RequestOutput
from scheduler import MAX_LOGPROBS, FinishReason, SamplingParams

if TYPE_CHECKING:  # the parameters are made before a model is there, where imports must be light
    from paged_jax.tokenizer import Tokenizer

__all__ = ["Beam", "BeamSearch", "BeamSearchOutput", "BeamSearchParams"]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """`beam_width` continuations of at most `max_tokens` tokens.

    The score is the sum of log-probabilities over `length ** length_penalty`. A beam ends at an
    end-of-sequence token unless `ignore_eos`. RequestError names a bad field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self):
        widest = MAX_LOGPROBS // 2
        if not isinstance(self.beam_width, int) or not 1 <= self.beam_width <= widest:
            raise RequestError(
                f"beam_width must be between 1 and {widest}, got {self.beam_width!r}",
                param="beam_width",
            )
        if not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise RequestError(
                f"max_tokens must be at least 1, got {self.max_tokens!r}", param="max_tokens"
            )


@dataclass(frozen=True)
class Beam:
    """A continuation; `cumulative_logprob` is the sum over its tokens.

    `finish_reason` is `stop`, `length`, or `error` when the model gave no finite logits.
    """

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: str | None = None
    text: str = ""


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best continuations of one prompt, best first.

    `num_cached_tokens` counts the prompt's tokens that were in the prefix cache at the start.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    beams: tuple[Beam, ...]
    num_cached_tokens: int = 0


class BeamSearch:
    """The search for one prompt, without an engine: `pending` asks, `advance` takes the answers."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        params: BeamSearchParams,
        *,
        eos_token_ids: frozenset[int],
    ):
        self.params = params
        self._prompt = tuple(prompt_token_ids)
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._live = [Beam((), 0.0)]
        self._ended: list[Beam] = []
        self._num_cached_tokens: int | None = None

    @property
    def request_params(self) -> SamplingParams:
        """What each round asks of the engine for a beam."""
        return SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=2 * self.params.beam_width, ignore_eos=True
        )

    def pending(self) -> list[tuple[int, ...]]:
        """Token ids of the beams whose next tokens are wanted; empty when the search is over."""
        return [self._prompt + beam.token_ids for beam in self._live]

    def advance(self, answers: Sequence[RequestOutput]) -> None:
        """Extend the beams by the most likely next tokens of each, and keep the best.

        `answers[i]` is the whole answer to `pending()[i]` with `request_params`. One that ended in
        an error ends the search.
        """
        if self._num_cached_tokens is None:
            self._num_cached_tokens = answers[0].num_cached_tokens
        if any(answer.outputs[0].finish_reason == FinishReason.ERROR for answer in answers):
            self._ended = [replace(beam, finish_reason="error") for beam in self._live]
            self._live = []
            return
        grown = [
            self._extend(beam, token_id, logprob)
            for beam, answer in zip(self._live, answers, strict=True)
            for entry in answer.outputs[0].logprobs or ()
            for token_id, logprob in entry.top.items()
        ]
        grown.sort(key=lambda beam: -beam.cumulative_logprob)
        best = grown[: 2 * self.params.beam_width]
        self._ended += [beam for beam in best if beam.finish_reason is not None]
        live = [beam for beam in best if beam.finish_reason is None]
        self._live = live[: self.params.beam_width]

    def _extend(self, beam: Beam, token_id: int, logprob: float) -> Beam:
        token_ids = (*beam.token_ids, token_id)
        reason = None
        if token_id in self._eos:
            reason = "stop"
        elif len(token_ids) >= self.params.max_tokens:
            reason = "length"
        return Beam(token_ids, beam.cumulative_logprob + logprob, reason)

    def _score(self, beam: Beam) -> float:
        length = max(1, len(beam.token_ids))
        return beam.cumulative_logprob / length**self.params.length_penalty

    def output(self, prompt: str | None, tokenizer: "Tokenizer | None") -> BeamSearchOutput:
        """The best finished beams, best first, with their texts if there is a tokenizer."""
        ranked = sorted(self._ended, key=lambda beam: -self._score(beam))
        beams = ranked[: self.params.beam_width]
        if tokenizer is not None:
            beams = [replace(beam, text=tokenizer.decode(beam.token_ids)) for beam in beams]
        return BeamSearchOutput(prompt, self._prompt, tuple(beams), self._num_cached_tokens or 0)
