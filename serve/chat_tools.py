"""One choice's tool calls, in the shapes of a message and of its deltas."""

import secrets
import string
from collections.abc import Callable

from serve.protocol import (
    AssistantMessage,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from serve.tool_events import CallArguments, CallStart, Event, Said
from serve.tool_parsers import ToolParser

_LETTERS = string.ascii_letters + string.digits


def short_id() -> str:
    """Nine letters and digits, the only kind that Mistral's templates take."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def long_id() -> str:
    return "call_" + secrets.token_hex(12)


class Calls:
    """Takes the calls out of one choice's text. Without `parallel`, all but the first are left
    out."""

    def __init__(self, parser: ToolParser, make_id: Callable[[], str], *, parallel: bool):
        self._parser = parser
        self._make_id = make_id
        self._parallel = parallel

    def finish_reason(self, reason: str | None) -> str | None:
        """A message that ended with calls says so; one that was cut off says that."""
        return "tool_calls" if reason == "stop" and self._parser.num_calls else reason

    def message(self, text: str) -> AssistantMessage:
        """The whole message of a text."""
        said: list[str] = []
        names: list[str] = []
        arguments: list[str] = []
        for event in self._events(text, is_last=True):
            match event:
                case Said():
                    said.append(event.text)
                case CallStart():
                    names.append(event.name)
                    arguments.append("")
                case CallArguments():
                    arguments[event.index] += event.text
        content = "".join(said)
        if not names:
            return AssistantMessage(content=content)
        calls = [
            ToolCall(id=self._make_id(), function=FunctionCall(name=name, arguments=args))
            for name, args in zip(names, arguments, strict=True)
        ]
        return AssistantMessage(content=content or None, tool_calls=calls)

    def deltas(self, text: str, *, is_last: bool) -> list[Delta]:
        """What more of the text adds to the message."""
        return [self._delta(event) for event in self._events(text, is_last=is_last)]

    def _delta(self, event: Event) -> Delta:
        match event:
            case Said():
                return Delta(content=event.text)
            case CallStart():
                call = ToolCallDelta(
                    index=event.index,
                    id=self._make_id(),
                    type="function",
                    function=FunctionCallDelta(name=event.name, arguments=""),
                )
            case CallArguments():
                call = ToolCallDelta(
                    index=event.index, function=FunctionCallDelta(arguments=event.text)
                )
        return Delta(tool_calls=[call])

    def _events(self, text: str, *, is_last: bool) -> list[Event]:
        events = self._parser.push(text)
        if is_last:
            events += self._parser.finish()
        return [e for e in events if isinstance(e, Said) or self._parallel or e.index == 0]
