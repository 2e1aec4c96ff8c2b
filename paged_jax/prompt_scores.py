"""The log-probabilities of a prompt's tokens, gathered over the steps that compute it."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from paged_jax.outputs import TokenLogprob
from paged_jax.sampling import Logprobs
from scheduler import FinishReason, Request, SchedulerOutput, SequenceUpdate

__all__ = ["PromptScores", "ScoredTokens", "find_scored", "scores_alone", "take_scores"]


class ScoredTokens(NamedTuple):
    """Prompt tokens that one step scores: where the hidden state before each lies, and whose
    token it is. A place is an index among the decodes, or (True) among the chunks' tokens."""

    places: list[tuple[bool, int]]
    targets: list[int]
    owners: list[tuple[str, int]]  # request id, position of the token


class PromptScores:
    """Of one request. Owned by the engine's thread."""

    def __init__(self, request: Request):
        num_tokens = len(request.prompt_token_ids)
        self._token_ids = request.prompt_token_ids
        self._num_top = request.params.prompt_logprobs or 0
        self._logprobs = np.zeros(num_tokens, np.float32)
        self._top: list[tuple[np.ndarray, np.ndarray] | None] = [None] * num_tokens

    def needs(self, position: int) -> bool:
        """Whether the prompt's token at `position` has no score yet. The first one gets none."""
        return 0 < position < len(self._token_ids) and self._top[position] is None

    def take(
        self, position: int, logprob: np.ndarray, top_ids: np.ndarray, top: np.ndarray
    ) -> None:
        self._logprobs[position] = logprob
        self._top[position] = (top_ids[: self._num_top], top[: self._num_top])

    def entries(self) -> tuple[TokenLogprob | None, ...]:
        """One for each token of the prompt; all but the first must have been taken."""
        entries: list[TokenLogprob | None] = []
        for token_id, logprob, best in zip(
            self._token_ids, self._logprobs.tolist(), self._top, strict=True
        ):
            if best is None:
                entries.append(None)
                continue
            top = dict(zip(best[0].tolist(), best[1].tolist(), strict=True))
            entries.append(TokenLogprob(token_id, logprob, top))
        assert all(entries[1:]), "a token of the prompt has no score"
        return tuple(entries)


def find_scored(output: SchedulerOutput, scores: dict[str, PromptScores]) -> ScoredTokens:
    """The prompt tokens that a step can score. A later sample's prompt is its elder's, too."""
    found = ScoredTokens([], [], [])
    at = 0
    for i, scheduled in enumerate((*output.decodes, *output.chunks)):
        is_chunk = i >= len(output.decodes)
        first = at if is_chunk else i
        at += scheduled.num_tokens if is_chunk else 0
        request = scheduled.sequence.request
        of_request = scores.get(request.request_id)
        if of_request is None or scheduled.sequence.index:
            continue
        for offset in range(scheduled.num_tokens):
            position = scheduled.start + offset + 1
            if of_request.needs(position):
                found.places.append((is_chunk, first + offset))
                found.targets.append(request.prompt_token_ids[position])
                found.owners.append((request.request_id, position))
    return found


def take_scores(
    scored: ScoredTokens, pieces: Sequence[Logprobs], scores: dict[str, PromptScores]
) -> None:
    """Hand a step's results, which this waits for, to the requests that still are there."""
    chosen, top_ids, top = (
        np.concatenate([np.asarray(getattr(piece, name)) for piece in pieces])
        for name in Logprobs._fields
    )
    for i, (request_id, position) in enumerate(scored.owners):
        if request_id in scores:
            scores[request_id].take(position, chosen[i], top_ids[i], top[i])


def scores_alone(update: SequenceUpdate) -> np.ndarray:
    """float32[n - 1] of a request that only scored its prompt of n tokens; NaN where the model's
    logits were not finite."""
    if update.finish_reason is FinishReason.ERROR:
        return np.full(update.sequence.num_prompt_tokens - 1, np.nan, np.float32)
    entries = cast(Sequence[TokenLogprob], update.prompt_logprobs)[1:]
    return np.array([entry.logprob for entry in entries], np.float32)
