"""What requests ask for beyond plain sampling: rules for their tokens, log-probabilities of those
and of their prompts."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from paged_jax.errors import RequestError
from paged_jax.grammar import Form, Grammars
from paged_jax.logit_edits import LogitEdits
from paged_jax.model_runner import Wants
from paged_jax.outputs import TokenLogprob
from paged_jax.prompt_scores import PromptScores, ScoredTokens, find_scored
from paged_jax.sampling import Logprobs
from paged_jax.token_rules import TokenRules, make_edits
from paged_jax.tokenizer import Tokenizer
from scheduler import FinishReason, Request, SamplingParams, SchedulerOutput, SequenceUpdate

__all__ = [
    "Asked",
    "Prepared",
    "awaits_a_token",
    "bad_word_ids",
    "needs_full_sampler",
    "prepare",
    "wants_of",
    "with_logprobs",
]


class Prepared(NamedTuple):
    """What can be made of a request's parameters before the engine has it, on any thread."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    form: Form | None = None


class Asked:
    """By request, for as long as the scheduler knows it. Owned by the engine's thread."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self.rules: dict[str, TokenRules] = {}
        self.scores: dict[str, PromptScores] = {}

    def add(self, request: Request, prepared: Prepared) -> None:
        params, form = request.params, prepared.form
        if params.masks_tokens or params.biases:
            self.rules[request.request_id] = TokenRules(
                request,
                self._vocab_size,
                bad_words=prepared.bad_words,
                form=() if form is None else [form.start() for _ in request.sequences],
            )
        if params.prompt_logprobs is not None:
            self.scores[request.request_id] = PromptScores(request)

    def keep_only(self, live: Collection[str]) -> None:
        """Forget the requests that have ended."""
        for by_request in (self.rules, self.scores):
            for request_id in [r for r in by_request if r not in live]:
                del by_request[request_id]

    def scored(self, output: SchedulerOutput) -> ScoredTokens | None:
        """The prompt tokens that a step scores, if there are any."""
        if not self.scores:
            return None
        found = find_scored(output, self.scores)
        return found if found.targets else None

    def with_scores(self, update: SequenceUpdate) -> SequenceUpdate:
        """Add the prompt's scores to the first sample's first update; drop a token nobody wants."""
        request = update.sequence.request
        if update.finish_reason is FinishReason.ERROR:
            return update
        if update.sequence.index == 0:
            scores = self.scores.pop(request.request_id, None)
            if scores is not None:
                update = update._replace(prompt_logprobs=scores.entries())
        if request.params.max_tokens != 0:
            return update
        return SequenceUpdate(
            update.sequence, None, FinishReason.LENGTH, prompt_logprobs=update.prompt_logprobs
        )

    def edits(self, output: SchedulerOutput, rows: int) -> LogitEdits | None:
        if not self.rules:
            return None
        return make_edits(output, self.rules, rows, self._vocab_size)

    def failed(self, request_id: str) -> bool:
        """Whether the form that the request's text must have could not be followed."""
        return request_id in self.rules and self.rules[request_id].failed


def needs_full_sampler(params: SamplingParams) -> bool:
    """Whether the plain sampler does not do for this request."""
    return bool(
        params.needs_logprobs or params.has_penalties or params.masks_tokens or params.biases
    )


def wants_of(output: SchedulerOutput, rows: int) -> Wants:
    """What the full sampler has to do for the rows of a step, padded to `rows`."""
    asked = [sampled.sequence.request.params for sampled in output.samples]
    processed = np.zeros(rows, np.bool_)
    processed[: len(asked)] = [p.logprobs_mode == "processed" for p in asked]
    return Wants(
        penalties=np.asarray(any(p.has_penalties for p in asked)),
        logprobs=np.asarray(any(p.needs_logprobs for p in asked)),
        processed=processed,
    )


def prepare(
    params: SamplingParams, tokenizer: Tokenizer | None, grammars: Grammars | None
) -> Prepared:
    """`grammars` must be there for a request with structured outputs. RequestError names what
    is wrong with either."""
    words = bad_word_ids(params.bad_words, tokenizer) if params.bad_words else ()
    wanted = params.form
    if wanted is None:
        return Prepared(words)
    assert grammars is not None
    return Prepared(words, grammars.compile(wanted))


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens, as at the start of a text and as after a space."""
    if tokenizer is None:
        raise RequestError(
            "bad_words need a tokenizer, and this engine runs without one", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            try:
                ids = tokenizer.encode(text, add_special_tokens=False)
            except RequestError as error:
                raise RequestError(
                    "bad_words hold half a surrogate pair", param="bad_words"
                ) from error
            if ids:
                found[tuple(ids)] = None
    return tuple(found)


def awaits_a_token(output: SchedulerOutput) -> bool:
    """Whether what a row may draw depends on a token that is not known to the host yet."""
    return any(
        s.sequence.num_in_flight > 1 and s.sequence.request.params.masks_by_output
        for s in output.samples
    )


def with_logprobs(
    updates: list[SequenceUpdate], output: SchedulerOutput, logprobs: Logprobs
) -> list[SequenceUpdate]:
    """Add to each update what its request asked for."""
    chosen, top_ids, top = (np.asarray(x) for x in logprobs)
    row_of = {sampled.sequence: i for i, sampled in enumerate(output.samples)}
    added = []
    for update in updates:
        params = update.sequence.request.params
        if params.needs_logprobs and update.token_id is not None:
            i, n = row_of[update.sequence], params.logprobs or 0
            pairs = zip(top_ids[i, :n].tolist(), top[i, :n].tolist(), strict=True)
            best = {token_id: value for token_id, value in pairs if value > -np.inf}
            entry = TokenLogprob(update.token_id, float(chosen[i]), best)
            update = update._replace(logprobs=entry)
        added.append(update)
    return added
