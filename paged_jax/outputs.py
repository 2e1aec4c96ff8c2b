"""What a caller gets back: frozen values, text and tokens of each sample."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CompletionOutput", "RequestOutput", "TokenLogprob"]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability, by default the raw one: before penalties,
    biases, masks, temperature and filters. With `logprobs_mode="processed"` it is after them: of
    what the token was drawn from; a greedy token is drawn without temperature and filters.

    `top` holds as many of the most likely tokens as were asked for, most likely first.
    """

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    `finish_reason` is None while it runs, then `stop`, `length`, `abort` or `error`;
    `stop_reason` is the stop string or stop token id that ended it, None for end-of-sequence.
    `logprobs` has an entry a token, where they were asked for; `cumulative_logprob` is the sum
    over all tokens so far.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's samples: all of their text so far, or what is new since the last one.

    `LLM` returns the whole; `AsyncEngine.generate` yields what is new, only of the samples that
    have something new. `num_generated_tokens` counts the tokens so far of all samples, with
    `best_of` also of those that are not returned; `queue_s` is how long it waited to run.
    `prompt_logprobs` has an entry for each token of the prompt, None for the first; of the outputs
    that tell what is new, the first one holds it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    queue_s: float = 0.0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
