"""Whether an engine can serve a request at all, asked before it is queued."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paged_jax.adapters import Adapters
from paged_jax.config import EngineConfig
from paged_jax.errors import RequestError
from paged_jax.steering import check_steering
from scheduler import SamplingParams

__all__ = ["RequestChecks"]

MAX_SHOWN = 80  # characters of a name in a message


class RequestChecks:
    """The limits of one engine. Reads only what never changes, so any thread may ask.

    `check_fits` raises for a prompt of so many tokens that the pool can never hold.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int,
        hidden_size: int,
        max_model_len: int,
        heeds_priority: bool,
        adapters: Adapters,
        check_fits: Callable[[int], None],
    ):
        self._config = config
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._max_model_len = max_model_len
        self._heeds_priority = heeds_priority
        self._adapters = adapters
        self._check_fits = check_fits

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str | None = None,
        steering: Mapping[int, Any] | None = None,
    ) -> None:
        """Raise RequestError, naming the field and the limit, if this could not be served."""
        self._check_priority(priority)
        _check_text("tenant", tenant)
        _check_text("cache_salt", cache_salt)
        self._check_adapter(adapter)
        check_steering(steering or {}, self._config.steering_layers, self._hidden_size)
        self._check_length(len(prompt_token_ids), params)
        self._check_token_ids("prompt", prompt_token_ids)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        self._check_token_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_token_ids("logit_bias", (token_id for token_id, _ in params.biases))

    def _check_priority(self, priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}", param="priority")
        if not -(2**31) <= priority < 2**31:
            raise RequestError(
                f"priority must be between {-(2**31)} and {2**31 - 1}, got {priority}",
                param="priority",
            )
        if priority and not self._heeds_priority:
            raise RequestError(
                f"priority is {priority}, but the scheduling policy here is "
                f"{self._config.scheduling_policy!r}, which does not look at it: leave it out, or "
                "start the engine with scheduling_policy='priority'",
                param="priority",
            )

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and self._adapters.find(name) is None:
            known = ", ".join(self._adapters.names) or "none"
            raise RequestError(
                f"no adapter {str(name)[:MAX_SHOWN]!r} is loaded; there are: {known}",
                param="adapter",
            )

    def _check_length(self, num_tokens: int, params: SamplingParams) -> None:
        if not num_tokens:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        if num_tokens + max_tokens > self._max_model_len:
            wanted = "at least 1" if params.max_tokens is None else f"{max_tokens}"
            raise RequestError(
                f"this model's maximum context length is {self._max_model_len} tokens, but the "
                f"prompt has {num_tokens} and max_tokens asks for {wanted} more",
                param="prompt" if num_tokens >= self._max_model_len else "max_tokens",
                code="context_length_exceeded",
            )
        self._check_fits(num_tokens)

    def _check_token_ids(self, param: str, token_ids: Iterable[Any]) -> None:
        for token_id in token_ids:
            is_int = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self._vocab_size:
                raise RequestError(
                    f"{param} holds {token_id!r}, which is no token id: they are integers from 0 "
                    f"to {self._vocab_size - 1}",
                    param=param,
                )


def _check_text(param: str, text: Any) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{param} must be a string, got {text!r}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds half a surrogate pair", param=param) from None
