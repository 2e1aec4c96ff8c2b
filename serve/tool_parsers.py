"""Tool calls in the words of the model families, found in a text as it grows.

hermes       <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>   Hermes, Qwen
llama3_json  {"name": "f", "parameters": {...}}                            Llama 3
mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}]               Mistral, also
             [TOOL_CALLS]f{...} and [TOOL_CALLS]f[ARGS]{...}
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from serve.call_reader import SPACE, ArgumentsReader, CallReader, MalformedCallError
from serve.tool_events import CallArguments, CallStart, Event, Said


class Reader(Protocol):
    """Reads calls behind a marker."""

    done: bool

    def feed(self, letter: str) -> Iterator[Event]: ...


class ToolParser:
    """Text in, events out, of one message. What they tell does not depend on how it is cut.

    `marker` begins calls, whose text goes to a reader made by `read_calls(index of the first)`; a
    message that begins with the `opener` needs no marker. What was taken for a call and is
    none, is text after all, unless its name was told already: then it is left out.
    """

    def __init__(
        self,
        marker: str,
        read_calls: Callable[[int], Reader],
        *,
        end: str = "",
        opener: str = "",
        separators: str = "",
    ):
        self._marker = marker
        self._read_calls = read_calls
        self._end = end
        self._opener = opener
        self._separators = separators + SPACE
        self._reader: Reader | None = None
        self._told_start = False  # of the call that is being read
        self._held = ""  # may be the beginning of a marker, or is a call without a name so far
        self._is_first = True  # nothing but space so far
        self._awaits_end = False
        self.num_calls = 0

    def push(self, text: str) -> list[Event]:
        return _merged([event for letter in text for event in self._feed(letter)])

    def finish(self) -> list[Event]:
        """What was held back: no more text comes."""
        held, self._held = self._held, ""
        if self._reader is not None and self._told_start:
            return []
        is_rest = self._awaits_end or (self.num_calls and not held.strip(self._separators))
        return [Said(held)] if held and not is_rest else []

    def _feed(self, letter: str) -> Iterator[Event]:
        if self._reader is not None:
            yield from self._read(letter)
        else:
            self._held += letter
            yield from self._look()

    def _read(self, letter: str) -> Iterator[Event]:
        assert self._reader is not None
        self._held += letter
        try:
            for event in self._reader.feed(letter):
                if isinstance(event, CallStart):
                    self.num_calls = event.index + 1
                    self._told_start = True
                yield event
        except MalformedCallError:
            text = "" if self._told_start else self._held
            self._reader, self._held, self._is_first = None, "", False
            if text:
                yield Said(text)
            return
        if self._reader.done:
            self._reader, self._held = None, ""
            self._awaits_end = bool(self._end)

    def _look(self) -> Iterator[Event]:
        """Outside of calls: is this the end of the last one, a marker, or text?"""
        if self._awaits_end:
            rest = self._held.lstrip(SPACE)
            if self._end.startswith(rest):
                if rest == self._end:
                    self._held, self._awaits_end = "", False
                return
            self._awaits_end = False
        if self._held.endswith(self._marker):
            before = self._held.removesuffix(self._marker)
            if before.strip(self._separators if self.num_calls else SPACE):
                yield Said(before)
            self._begin(self._marker)
            return
        opened = self._is_first or self.num_calls > 0
        if opened and self._opener and self._held.strip(self._separators) == self._opener:
            letter = self._held[-1]
            self._begin("")
            yield from self._read(letter)
            return
        end = len(self._held) - _num_held(self._held, self._marker)
        if opened and not self._held[:end].strip(self._separators):
            return  # space before or between calls says nothing
        said, self._held = self._held[:end], self._held[end:]
        if said:
            self._is_first = False
            yield Said(said)

    def _begin(self, held: str) -> None:
        self._reader = self._read_calls(self.num_calls)
        self._held, self._told_start = held, False


def _num_held(text: str, marker: str) -> int:
    """How many letters at the text's end may begin the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


def _merged(events: Sequence[Event]) -> list[Event]:
    """Neighbours of a kind in one."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if isinstance(event, Said) and isinstance(last, Said):
            merged[-1] = Said(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and event.index == last.index
        ):
            merged[-1] = CallArguments(event.index, last.text + event.text)
        else:
            merged.append(event)
    return merged


class MistralReader:
    """What stands behind `[TOOL_CALLS]`: an array of calls, or a name and its arguments."""

    def __init__(self, index: int):
        self._index = index
        self._reader: CallReader | ArgumentsReader | None = None
        self._name = ""
        self._in_array = False
        self.done = False

    def feed(self, letter: str) -> Iterator[Event]:
        if self._reader is not None:
            yield from self._reader.feed(letter)
            if self._reader.done:
                self._index += 1
                self._reader = None
                self.done = not self._in_array
        elif self._in_array:
            if letter == "{":
                self._reader = CallReader(self._index)
                yield from self._reader.feed(letter)
            elif letter == "]":
                self.done = True
            elif letter not in "," + SPACE:
                raise MalformedCallError
        elif letter == "[" and not self._name.strip():
            self._in_array = True
        elif letter == "{":
            name = self._name.strip().removesuffix("[ARGS]")
            if not name:
                raise MalformedCallError
            yield CallStart(self._index, name)
            self._reader = ArgumentsReader(self._index)
            yield from self._reader.feed(letter)
        else:
            self._name += letter
            if len(self._name) > 256:
                raise MalformedCallError


def _hermes() -> ToolParser:
    return ToolParser("<tool_call>", CallReader, end="</tool_call>")


def _llama3_json() -> ToolParser:
    return ToolParser("<|python_tag|>", CallReader, opener="{", separators=";")


def _mistral() -> ToolParser:
    return ToolParser("[TOOL_CALLS]", MistralReader)


PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}
