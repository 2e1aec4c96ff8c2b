"""How a choice looks in a completion and in a chat, whole and in pieces."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from serve.chat_tools import Calls
from serve.engine import Choice, TokenLogprob
from serve.logprobs import CompletionLogprobsOf, TokenNames, chat_logprobs, prompt_logprobs
from serve.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    PromptLogprobs,
)


@dataclass
class Whole:
    """A choice as it grows out of the engine's outputs. One request's task owns it."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, new: Choice) -> None:
        self.texts.append(new.text)
        self.token_ids.extend(new.token_ids)
        self.logprobs.extend(new.logprobs or ())
        if new.finish_reason is not None:
            self.finish_reason = new.finish_reason
            self.stop_reason = new.stop_reason


class Format(Protocol):
    """Shapes the choices of one response. `index` counts the choices of all prompts together."""

    @property
    def object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...

    def saw_prompt(self, i: int, entries: Sequence[TokenLogprob | None]) -> None:
        """The log-probabilities of a prompt, which come before its choices."""

    def choice(self, index: int, whole: Whole) -> msgspec.Struct: ...

    def pieces(self, index: int, new: Choice, first: bool) -> Iterator[msgspec.Struct]:
        """The chunks that tell of `new`; `first` when nothing of this choice was told before."""

    def extras(self) -> dict[str, Any]:
        """Fields of the whole response, and of a choice's first chunk, beside its choices."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Which details a client wants: how many most likely tokens, or None for no logprobs."""

    names: TokenNames
    token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class CompletionFormat:
    """prompts: the token ids of each; echoes: its text, or None where they are not wanted.

    Every prompt has `per_prompt` choices.
    """

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self,
        prompts: Sequence[list[int]],
        per_prompt: int,
        asked: Asked,
        echoes: Sequence[str] | None,
    ):
        self._prompts = prompts
        self._per_prompt = per_prompt
        self._asked = asked
        self._echoes = echoes
        self._scores: dict[int, Sequence[TokenLogprob | None]] = {}
        self._logprobs: dict[int, CompletionLogprobsOf] = {}

    def saw_prompt(self, i: int, entries: Sequence[TokenLogprob | None]) -> None:
        self._scores[i] = entries

    def choice(self, index: int, whole: Whole) -> CompletionChoice:
        return self._choice(index, "".join(whole.texts), whole, first=True)

    def pieces(self, index: int, new: Choice, first: bool) -> Iterator[CompletionChoice]:
        told = self._choice(index, new.text, new, first)
        if told.text or told.token_ids or told.logprobs or new.finish_reason is not None:
            yield told

    def extras(self) -> dict[str, Any]:
        return {}

    def _choice(
        self, index: int, text: str, source: Choice | Whole, first: bool
    ) -> CompletionChoice:
        i = index // self._per_prompt
        if first and self._echoes is not None:
            text = self._echoes[i] + text
        prompt_ids: list[int] | UnsetType = UNSET
        new_ids: list[int] | UnsetType = UNSET
        if self._asked.token_ids:
            new_ids = list(source.token_ids)
            if first:
                prompt_ids = self._prompts[i]
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=self._logprobs_of(index, source, first),
            finish_reason=source.finish_reason,
            stop_reason=source.stop_reason,
            prompt_logprobs=self._prompt_logprobs(i) if first else UNSET,
            prompt_token_ids=prompt_ids,
            token_ids=new_ids,
        )

    def _logprobs_of(
        self, index: int, source: Choice | Whole, first: bool
    ) -> CompletionLogprobs | None:
        i, num_top = index // self._per_prompt, self._asked.logprobs
        if num_top is None:
            return None
        entries: list[TokenLogprob | None] = list(source.logprobs or ())
        if first and self._echoes is not None:
            entries[:0] = self._scores[i]
        if not entries:
            return None
        growing = self._logprobs.setdefault(index, CompletionLogprobsOf(self._asked.names, num_top))
        return growing.after(entries, first_token_id=self._prompts[i][0])

    def _prompt_logprobs(self, i: int) -> PromptLogprobs | UnsetType:
        if self._asked.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(self._scores[i], self._asked.names, self._asked.prompt_logprobs)


class ChatFormat:
    """prompt: the token ids of the one there is. make_calls: takes tool calls out of each choice's
    text, or None where the text is told as it is."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, prompt: list[int], asked: Asked, make_calls: Callable[[], Calls] | None = None
    ):
        self._prompt = prompt
        self._asked = asked
        self._make_calls = make_calls
        self._calls: dict[int, Calls] = {}
        self._scores: Sequence[TokenLogprob | None] | None = None

    def saw_prompt(self, i: int, entries: Sequence[TokenLogprob | None]) -> None:
        self._scores = entries

    def choice(self, index: int, whole: Whole) -> ChatChoice:
        text, finish_reason = "".join(whole.texts), whole.finish_reason
        message = AssistantMessage(content=text)
        if self._make_calls is not None:
            calls = self._make_calls()
            message = calls.message(text)
            finish_reason = calls.finish_reason(finish_reason)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs(whole.logprobs),
            finish_reason=finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=self._token_ids(whole),
        )

    def pieces(self, index: int, new: Choice, first: bool) -> Iterator[ChatChunkChoice]:
        if first:
            yield ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        deltas = self._deltas(index, new)
        token_ids, logprobs = self._token_ids(new), self._logprobs(new.logprobs or ())
        if not deltas and (token_ids or logprobs):
            deltas = [Delta(content="")]
        for delta in deltas:
            yield ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, token_ids=token_ids)
            token_ids, logprobs = UNSET, None
        if new.finish_reason is not None:
            yield ChatChunkChoice(
                index=index,
                delta=Delta(),
                finish_reason=self._finish_reason(index, new.finish_reason),
                stop_reason=new.stop_reason,
            )

    def _deltas(self, index: int, new: Choice) -> list[Delta]:
        if self._make_calls is None:
            return [Delta(content=new.text)] if new.text else []
        if index not in self._calls:
            self._calls[index] = self._make_calls()
        return self._calls[index].deltas(new.text, is_last=new.finish_reason is not None)

    def _finish_reason(self, index: int, reason: str) -> str | None:
        calls = self._calls.get(index)
        return reason if calls is None else calls.finish_reason(reason)

    def extras(self) -> dict[str, Any]:
        names, num_top = self._asked.names, self._asked.prompt_logprobs
        scores = self._scores
        return {
            "prompt_token_ids": self._prompt if self._asked.token_ids else None,
            "prompt_logprobs": None
            if num_top is None or scores is None
            else prompt_logprobs(scores, names, num_top),
        }

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self._asked.logprobs is None or not entries:
            return None
        return chat_logprobs(entries, self._asked.names, self._asked.logprobs)

    def _token_ids(self, source: Choice | Whole) -> list[int] | UnsetType:
        return list(source.token_ids) if self._asked.token_ids else UNSET
