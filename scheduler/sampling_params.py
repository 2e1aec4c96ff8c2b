"""What a request asks of the sampler: a frozen value, validated at birth."""

import numbers
from dataclasses import dataclass, field, fields
from typing import Any

from scheduler.errors import RequestError

MAX_NUM_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_INT32 = 2**31 - 1
MAX_SHOWN = 80  # characters of a wrong value in a message


def _show(value: object) -> str:
    """The value as it was written, or its beginning."""
    try:
        shown = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge integer"
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


def _refuse(field_name: str, rule: str, value: object) -> None:
    raise RequestError(f"{field_name} must be {rule}, got {_show(value)}", param=field_name)


def _require_int(field_name: str, value: Any, low: int, high: int = MAX_INT32) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        _refuse(field_name, "an integer", value)
    if not low <= value <= high:
        _refuse(field_name, f"between {low} and {high}", value)


def _require_number(field_name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or value != value:
        _refuse(field_name, "a finite number", value)
    if not low <= value <= high:
        _refuse(field_name, f"between {low} and {high}", value)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling fields under their usual names; a bad value raises `RequestError` naming it."""

    n: int = field(default=1, metadata={"doc": "samples of the prompt"})
    best_of: int | None = field(
        default=None, metadata={"doc": "samples to draw; the n most likely ones are returned"}
    )
    temperature: float = field(
        default=1.0, metadata={"doc": "0 is greedy; otherwise logits are divided by it"}
    )
    top_k: int = field(
        default=0, metadata={"doc": "keep the k most likely tokens; 0 or -1 keeps all"}
    )
    top_p: float = field(
        default=1.0, metadata={"doc": "keep the smallest set whose probability reaches p"}
    )
    min_p: float = field(
        default=0.0, metadata={"doc": "drop tokens less likely than min_p times the best"}
    )
    presence_penalty: float = field(
        default=0.0, metadata={"doc": "taken off the logit of every token in the output"}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"doc": "taken off for each time the token is in the output"}
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"doc": "divides the logits of tokens in prompt and output"}
    )
    seed: int | None = field(
        default=None, metadata={"doc": "fixes the random numbers of this request"}
    )
    max_tokens: int | None = field(
        default=16, metadata={"doc": "output tokens at most; None runs to the context's end"}
    )
    stop: str | tuple[str, ...] | list[str] = field(
        default=(), metadata={"doc": "strings that end the text"}
    )
    stop_token_ids: tuple[int, ...] | list[int] = field(
        default=(), metadata={"doc": "token ids that end the output"}
    )
    logprobs: int | None = field(
        default=None,
        metadata={"doc": "log-probabilities of each token, and of this many most likely ones"},
    )
    ignore_eos: bool = field(default=False, metadata={"doc": "go on past end-of-sequence tokens"})
    include_stop_str_in_output: bool = field(
        default=False, metadata={"doc": "leave the stop string at the end of the text"}
    )
    skip_special_tokens: bool = field(
        default=True, metadata={"doc": "leave special tokens out of the text"}
    )

    def __post_init__(self):
        _require_int("n", self.n, 1, MAX_NUM_SAMPLES)
        if self.best_of is not None:
            _require_int("best_of", self.best_of, self.n, MAX_NUM_SAMPLES)
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _require_number("temperature", self.temperature, 0.0, 1e6)
        _require_int("top_k", self.top_k, -1)
        _require_number("top_p", self.top_p, 0.0, 1.0)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _require_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _require_int("max_tokens", self.max_tokens, 0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "true or false", getattr(self, name))
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_token_ids())

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list):
            _refuse("stop", "a string or a list of strings", self.stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop holds {len(stop)} strings, at most {MAX_STOP_STRINGS} are allowed",
                param="stop",
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                _refuse("stop", "made of non-empty strings", text)
            if len(text) > MAX_STOP_STRING_LEN:
                raise RequestError(
                    f"stop holds a string of {len(text)} characters, "
                    f"at most {MAX_STOP_STRING_LEN} are allowed",
                    param="stop",
                )
        return tuple(stop)

    def _checked_stop_token_ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids
        if not isinstance(ids, tuple | list):
            _refuse("stop_token_ids", "a list of token ids", ids)
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids holds {len(ids)} ids, at most {MAX_STOP_TOKEN_IDS} are allowed",
                param="stop_token_ids",
            )
        for token_id in ids:
            _require_int("stop_token_ids", token_id, 0)
        return tuple(ids)

    @property
    def num_samples(self) -> int:
        """Sequences that the request runs."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_logprobs(self) -> bool:
        return self.logprobs is not None or self.num_samples > self.n

    @property
    def has_penalties(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))
