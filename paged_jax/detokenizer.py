"""The text of one sequence as its tokens come, ended by its stop strings."""

from collections.abc import Sequence

from paged_jax.stop_strings import StopStrings
from paged_jax.tokenizer import Tokenizer
from scheduler import SamplingParams

__all__ = ["Detokenizer"]


class Detokenizer:
    """Owns the text of one sequence.

    What `push` and `finish` return, joined, is `text`, and does not depend on how the tokens are
    divided over the calls. Text that could be the beginning of a stop string is held back until
    that is decided; nothing of a stop string is ever returned, unless the parameters include it.
    Stop strings are looked for behind the first `min_tokens` tokens. After one everything is
    dropped. `prompt_token_ids` are the tokens before the first.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ):
        self._stream = tokenizer.decode_stream(
            skip_special_tokens=params.skip_special_tokens, after=prompt_token_ids
        )
        self._stops = StopStrings(params.stop) if params.stop else None
        self._includes_stop = params.include_stop_str_in_output
        self._num_before_stops = params.min_tokens
        self._held = ""
        self._shown: list[str] = []
        self._stop_reason: str | None = None

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop_reason

    @property
    def text(self) -> str:
        """Everything returned so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is safe to show after these tokens."""
        if self._stop_reason is not None:
            return ""
        num_free = min(self._num_before_stops, len(token_ids))
        if not num_free:
            return self._show(self._stream.push(token_ids))
        self._num_before_stops -= num_free
        free = self._stream.push(token_ids[:num_free])
        self._shown.append(free)
        return free + self._show(self._stream.push(token_ids[num_free:]))

    def finish(self) -> str:
        """The text that was still held back: no more tokens come."""
        if self._stop_reason is not None:
            return ""
        shown = self._show(self._stream.finish())
        rest, self._held = self._held, ""
        self._shown.append(rest)
        return shown + rest

    def _show(self, new: str) -> str:
        text = self._held + new
        match = self._stops.feed(new) if self._stops else None
        if match is not None:
            num_read, self._stop_reason = match
            end = len(self._held) + num_read
            if not self._includes_stop:
                end -= len(self._stop_reason)
            text, self._held = text[:end], ""
        elif self._stops is not None and not self._includes_stop:
            end = len(text) - self._stops.num_held
            text, self._held = text[:end], text[end:]
        self._shown.append(text)
        return text
