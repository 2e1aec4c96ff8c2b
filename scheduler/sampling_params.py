"""What a request asks of the sampler: a frozen value, validated at birth."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from scheduler.checks import (
    refuse,
    require_bool,
    require_few,
    require_int,
    require_number,
    require_texts,
    require_token_ids,
)
from scheduler.errors import RequestError
from scheduler.structured_outputs import StructuredOutputs

MAX_NUM_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256
MAX_ALLOWED_TOKEN_IDS = 65536

LogprobsMode = Literal["raw", "processed"]


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
    min_tokens: int = field(
        default=0, metadata={"doc": "output tokens before anything may end the output"}
    )
    logit_bias: Mapping[int, float] | Mapping[str, float] | tuple[tuple[int, float], ...] | None = (
        field(
            default=None,
            metadata={"doc": "added to the logits of these token ids; -100 all but forbids one"},
        )
    )
    allowed_token_ids: tuple[int, ...] | list[int] | None = field(
        default=None, metadata={"doc": "the only token ids that may be drawn"}
    )
    bad_words: tuple[str, ...] | list[str] = field(
        default=(), metadata={"doc": "words whose last token is not drawn after the others"}
    )
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = field(
        default=None, metadata={"doc": "the form that the text must have"}
    )
    logprobs: int | None = field(
        default=None,
        metadata={"doc": "log-probabilities of each token, and of this many most likely ones"},
    )
    prompt_logprobs: int | None = field(
        default=None,
        metadata={"doc": "the same for the prompt, which is then computed anew"},
    )
    logprobs_mode: LogprobsMode = field(
        default="raw",
        metadata={"doc": "of the model's logits (raw), or of what was drawn from (processed)"},
    )
    ignore_eos: bool = field(default=False, metadata={"doc": "go on past end-of-sequence tokens"})
    include_stop_str_in_output: bool = field(
        default=False, metadata={"doc": "leave the stop string at the end of the text"}
    )
    skip_special_tokens: bool = field(
        default=True, metadata={"doc": "leave special tokens out of the text"}
    )

    def __post_init__(self):
        require_int("n", self.n, 1, MAX_NUM_SAMPLES)
        if self.best_of is not None:
            require_int("best_of", self.best_of, self.n, MAX_NUM_SAMPLES)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprobs_mode not in get_args(LogprobsMode):
            refuse("logprobs_mode", "raw or processed", self.logprobs_mode)
        require_number("temperature", self.temperature, 0.0, 1e6)
        require_int("top_k", self.top_k, -1)
        require_number("top_p", self.top_p, 0.0, 1.0)
        require_number("min_p", self.min_p, 0.0, 1.0)
        require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        require_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            require_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            require_int("max_tokens", self.max_tokens, 0)
        require_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
                param="min_tokens",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            require_bool(name, getattr(self, name))
        self._keep("stop", self._checked_stop())
        ids = require_token_ids("stop_token_ids", self.stop_token_ids, most=MAX_STOP_TOKEN_IDS)
        self._keep("stop_token_ids", ids)
        self._keep("logit_bias", _checked_bias(self.logit_bias))
        self._keep("allowed_token_ids", self._checked_allowed())
        words = require_texts(
            "bad_words", self.bad_words, most=MAX_BAD_WORDS, max_len=MAX_BAD_WORD_LEN
        )
        self._keep("bad_words", words)
        if self.structured_outputs is not None:
            self._keep("structured_outputs", StructuredOutputs.of(self.structured_outputs))
            if self.ignore_eos:
                raise RequestError(
                    "ignore_eos is not possible with structured_outputs: the end-of-sequence "
                    "token is how a text of a form ends",
                    param="ignore_eos",
                )

    def _keep(self, name: str, value: Any) -> None:
        """Replace a field by its checked form, which is not the caller's to change."""
        object.__setattr__(self, name, value)

    def _checked_stop(self) -> tuple[str, ...]:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, tuple | list):
            refuse("stop", "a string or a list of strings", self.stop)
        return require_texts("stop", stop, most=MAX_STOP_STRINGS, max_len=MAX_STOP_STRING_LEN)

    def _checked_allowed(self) -> tuple[int, ...] | None:
        if self.allowed_token_ids is None:
            return None
        ids = require_token_ids(
            "allowed_token_ids", self.allowed_token_ids, most=MAX_ALLOWED_TOKEN_IDS
        )
        if not ids:
            refuse("allowed_token_ids", "a list of at least one id", self.allowed_token_ids)
        return ids

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

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs of token id and bias."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias or ())

    @property
    def form(self) -> StructuredOutputs | None:
        """`structured_outputs`, checked."""
        return cast(StructuredOutputs | None, self.structured_outputs)

    @property
    def masks_tokens(self) -> bool:
        """Whether some tokens may not be drawn, now or later."""
        return bool(
            self.min_tokens
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.structured_outputs is not None
        )

    @property
    def masks_by_output(self) -> bool:
        """Whether which tokens may be drawn depends on those drawn before."""
        return bool(self.bad_words) or self.structured_outputs is not None

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in fields(cls))


def _checked_bias(bias: Any) -> tuple[tuple[int, float], ...] | None:
    """Pairs of token id and bias. JSON's keys are strings, so a decimal one is an id, too."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping | tuple | list):
        refuse("logit_bias", "an object of token ids and numbers", bias)
    require_few("logit_bias", "entries", bias, MAX_LOGIT_BIAS)
    pairs = []
    for pair in bias.items() if isinstance(bias, Mapping) else bias:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            refuse("logit_bias", "an object of token ids and numbers", pair)
        key, value = pair
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
            key = int(key)
        require_int("logit_bias", key, 0)
        require_number("logit_bias", value, -MAX_BIAS, MAX_BIAS)
        pairs.append((int(key), float(value)))
    return tuple(pairs)
