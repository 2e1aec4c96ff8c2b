"""Reads one tool call, a JSON object with a name and arguments, while it is being written."""

import json
from collections.abc import Iterator

from serve.tool_events import CallArguments, CallStart, Event

ARGUMENTS = ("arguments", "parameters")
SPACE = " \t\r\n"


class MalformedCallError(ValueError):
    """What is written is no tool call."""


class ValueReader:
    """Finds the end of one JSON value, without checking what is inside."""

    def __init__(self):
        self.text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def takes(self, letter: str) -> bool:
        """Whether the letter belongs to the value; if not, the value has ended before it."""
        if self.done or (not self._depth and not self._in_string and self._ends_before(letter)):
            return False
        self.text += letter
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
                self.done = not self._depth
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.done = not self._depth
        return True

    def _ends_before(self, letter: str) -> bool:
        """A bare word or number has no end of its own."""
        return bool(self.text) and letter in f",}}]{SPACE}"


class ArgumentsReader:
    """A call of which only the arguments are still to be read: `{...}`, told as they come."""

    def __init__(self, index: int):
        self._index = index
        self._value = ValueReader()
        self.done = False

    def feed(self, letter: str) -> Iterator[Event]:
        if not self._value.text and letter != "{":
            raise MalformedCallError
        self._value.takes(letter)
        yield CallArguments(self._index, letter)
        self.done = self._value.done


class CallReader:
    """`{"name": "f", "arguments": {...}}` letter by letter; `parameters` is another word for the
    arguments. Their text is told as it comes, once the name is known.
    """

    def __init__(self, index: int):
        self._index = index
        self._expects = "{"
        self._key: str | None = None
        self._value = ValueReader()
        self._held: list[str] = []  # arguments that came before the name
        self._told_arguments = False
        self.name: str | None = None
        self.done = False

    def feed(self, letter: str) -> Iterator[Event]:
        """What the letter makes known. MalformedCallError if it cannot stand here."""
        if self._expects == "value":
            if not self._value.text and letter in SPACE:
                return
            if self._value.takes(letter):
                if self._streams():
                    yield from self._arguments(letter)
                return
            yield from self._end_value()
            self._expects = ","
        if letter in SPACE and not (self._expects == "key" and self._value.text):
            return
        yield from self._structure(letter)

    def _structure(self, letter: str) -> Iterator[Event]:
        """Everything but values."""
        match self._expects, letter:
            case "{", "{":
                self._expects = "key"
            case "key", _ if letter == '"' or self._value.text:
                self._value.takes(letter)
                if self._value.done:
                    self._key, self._value = _string(self._value.text), ValueReader()
                    self._expects = ":"
            case ":", ":":
                self._expects = "value"
            case ",", ",":
                self._expects = "key"
            case ",", "}":
                if self.name is None:
                    raise MalformedCallError
                if not self._told_arguments:
                    yield CallArguments(self._index, "{}")
                self.done = True
            case _:
                raise MalformedCallError

    def _streams(self) -> bool:
        """Arguments written as an object are told letter by letter."""
        return self._key in ARGUMENTS and self._value.text[0] == "{"

    def _arguments(self, text: str) -> Iterator[Event]:
        if self.name is None:
            self._held.append(text)
            return
        self._told_arguments = True
        yield CallArguments(self._index, text)

    def _end_value(self) -> Iterator[Event]:
        text, self._value = self._value.text, ValueReader()
        if self._key == "name":
            self.name = _string(text)
            yield CallStart(self._index, self.name)
            if self._held:
                yield from self._arguments("".join(self._held))
        elif self._key in ARGUMENTS and not text.startswith("{"):
            yield from self._arguments(_string(text) if text.startswith('"') else text)


def _string(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        raise MalformedCallError from None
    if not isinstance(value, str) or not value:
        raise MalformedCallError
    return value
