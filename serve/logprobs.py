"""Log-probabilities as clients of completions and of chats expect them."""

import codecs
import itertools
import math
from collections.abc import Mapping, Sequence

from serve.engine import Tokenizer, TokenLogprob
from serve.protocol import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LOWEST = -9999.0  # stands for minus infinity, which JSON does not have


class TokenNames:
    """How tokens are written: as text, or by their ids where the client wants that."""

    def __init__(self, tokenizer: Tokenizer | None, by_id: bool):
        self._tokenizer = tokenizer
        self._by_id = by_id or tokenizer is None

    def bytes_of(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def of(self, token_id: int) -> str:
        """The token's text; parts of characters show their bytes, so that they differ."""
        if self._by_id:
            return f"token_id:{token_id}"
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


class CompletionLogprobsOf:
    """One choice's, as it grows: offsets count the characters of its text."""

    def __init__(self, names: TokenNames, num_top: int):
        self._names = names
        self._num_top = num_top
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def after(
        self, entries: Sequence[TokenLogprob | None], first_token_id: int | None = None
    ) -> CompletionLogprobs:
        """Of the tokens that are new. `first_token_id` is that of an entry without a logprob."""
        offsets, tokens = [], []
        top: list[dict[str, float] | None] = []
        for entry in entries:
            token_id = first_token_id if entry is None else entry.token_id
            assert token_id is not None, "only an echoed prompt's first token has no logprob"
            offsets.append(self._offset)
            tokens.append(self._names.of(token_id))
            self._offset += len(self._decoder.decode(self._names.bytes_of(token_id)))
            top.append(None if entry is None else self._top(entry))
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if e is None else _finite(e.logprob) for e in entries],
            top_logprobs=top,
            text_offset=offsets,
        )

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens, and the one that was drawn."""
        best = best_of(entry, self._num_top)
        named = {self._names.of(i): _finite(value) for i, value in best.items()}
        named.setdefault(self._names.of(entry.token_id), _finite(entry.logprob))
        return named


def best_of(entry: TokenLogprob, num_top: int) -> Mapping[int, float]:
    """As many of the most likely tokens as were asked for; there may be more."""
    return dict(itertools.islice(entry.top.items(), num_top))


def chat_logprobs(entries: Sequence[TokenLogprob], names: TokenNames, num_top: int) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=names.of(entry.token_id),
                logprob=_finite(entry.logprob),
                bytes=list(names.bytes_of(entry.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=names.of(i), logprob=_finite(value), bytes=list(names.bytes_of(i))
                    )
                    for i, value in best_of(entry, num_top).items()
                ],
            )
            for entry in entries
        ]
    )


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], names: TokenNames, num_top: int
) -> PromptLogprobs:
    """By token id: the prompt's own token, then the most likely ones."""

    def of(entry: TokenLogprob) -> dict[str, PromptLogprob]:
        by_id: Mapping[int, float] = {
            entry.token_id: entry.logprob,
            **best_of(entry, num_top),
        }
        return {
            str(i): PromptLogprob(logprob=_finite(value), decoded_token=names.of(i))
            for i, value in by_id.items()
        }

    return [None if entry is None else of(entry) for entry in entries]
