"""How a choice looks in a completion and in a chat, whole and in pieces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from serve.engine import Choice
from serve.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    CompletionChoice,
    Delta,
)


@dataclass
class Whole:
    """A choice as it grows out of the engine's outputs. One request's task owns it."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, new: Choice) -> None:
        self.texts.append(new.text)
        self.token_ids.extend(new.token_ids)
        if new.finish_reason is not None:
            self.finish_reason = new.finish_reason
            self.stop_reason = new.stop_reason


class Format(Protocol):
    """Shapes choices. `index` counts the choices of all prompts together."""

    @property
    def object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...

    def choice(self, index: int, whole: Whole) -> msgspec.Struct: ...

    def pieces(self, index: int, new: Choice, first: bool) -> Iterator[msgspec.Struct]:
        """The chunks that tell of `new`; `first` when nothing of this choice was told before."""

    def extras(self) -> dict[str, Any]:
        """Fields of the whole response, and of a choice's first chunk, beside its choices."""


@dataclass(frozen=True)
class CompletionFormat:
    """prompt_token_ids and echoes: one for each choice, or None where they are not wanted."""

    prompt_token_ids: Sequence[list[int]] | None
    echoes: Sequence[str] | None
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def choice(self, index: int, whole: Whole) -> CompletionChoice:
        return self._choice(index, "".join(whole.texts), whole, first=True)

    def pieces(self, index: int, new: Choice, first: bool) -> Iterator[CompletionChoice]:
        told = self._choice(index, new.text, new, first)
        if told.text or told.token_ids or new.finish_reason is not None:
            yield told

    def extras(self) -> dict[str, Any]:
        return {}

    def _choice(
        self, index: int, text: str, source: Choice | Whole, first: bool
    ) -> CompletionChoice:
        if first and self.echoes is not None:
            text = self.echoes[index] + text
        prompt_ids: list[int] | UnsetType = UNSET
        new_ids: list[int] | UnsetType = UNSET
        if self.prompt_token_ids is not None:
            new_ids = list(source.token_ids)
            if first:
                prompt_ids = self.prompt_token_ids[index]
        return CompletionChoice(
            index=index,
            text=text,
            finish_reason=source.finish_reason,
            stop_reason=source.stop_reason,
            prompt_token_ids=prompt_ids,
            token_ids=new_ids,
        )


@dataclass(frozen=True)
class ChatFormat:
    """prompt_token_ids: those of the one prompt, or None where they are not wanted."""

    prompt_token_ids: list[int] | None
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def choice(self, index: int, whole: Whole) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content="".join(whole.texts)),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=self._token_ids(whole),
        )

    def pieces(self, index: int, new: Choice, first: bool) -> Iterator[ChatChunkChoice]:
        if first:
            yield ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        token_ids = self._token_ids(new)
        if new.text or token_ids:
            yield ChatChunkChoice(index=index, delta=Delta(content=new.text), token_ids=token_ids)
        if new.finish_reason is not None:
            yield ChatChunkChoice(
                index=index,
                delta=Delta(),
                finish_reason=new.finish_reason,
                stop_reason=new.stop_reason,
            )

    def extras(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_token_ids}

    def _token_ids(self, source: Choice | Whole) -> list[int] | UnsetType:
        return UNSET if self.prompt_token_ids is None else list(source.token_ids)
