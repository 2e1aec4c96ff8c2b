"""What a caller gets back: frozen values, text and tokens of each sample."""

from dataclasses import dataclass

__all__ = ["CompletionOutput", "RequestOutput"]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    `finish_reason` is None while it runs, then `stop`, `length`, `abort` or `error`;
    `stop_reason` is the stop string or stop token id that ended it, None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's samples: all of their text so far, or what is new since the last one.

    `LLM` returns the whole; `AsyncEngine.generate` yields what is new, only of the samples that
    have something new.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
