"""The messages of a conversation, before the model's template sees them."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from paged_jax import RequestError

MAX_MESSAGES = 8192

# Parts of a message that ask for something which is not to be had here.
_REFUSED_PARTS = ("audio", "function_call")


def checked_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with its text in one string and without what is null, but for its content.

    Keys that are not known here are for the template. RequestError names the part that is wrong.
    """
    if not messages:
        raise RequestError("messages is empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages holds {len(messages)} messages, at most {MAX_MESSAGES} are allowed",
            param="messages",
        )
    return [_checked(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked(where: str, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string", param=f"{where}.role")
    for name in _REFUSED_PARTS:
        if message.get(name):
            raise RequestError(
                f"{where}.{name} is not supported by this server",
                param=f"{where}.{name}",
                code="unsupported_field",
            )
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_texts(where, content))
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of parts", param=f"{where}.content"
        )
    rest = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in rest:
        rest["tool_calls"] = _calls(f"{where}.tool_calls", rest["tool_calls"])
    return rest | {"content": content}


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as an object, which is what templates want to see."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list of calls", param=where)
    return [_call(f"{where}[{j}]", call) for j, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    match call:
        case {"type": "function", "function": {"name": str(), "arguments": str() | dict()}}:
            function = call["function"]
        case _:
            raise RequestError(
                f"{where} must be an object with the type function, a name and arguments",
                param=where,
            )
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{where}.function.arguments must be a JSON object in a string",
                param=f"{where}.function.arguments",
            )
    return call | {"function": function | {"arguments": arguments}}


def _texts(where: str, parts: list[Any]) -> Iterable[str]:
    for j, part in enumerate(parts):
        at = f"{where}.content[{j}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RequestError(f"{at} is no text part, the only kind supported", param=at)
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{at}.text must be a string", param=f"{at}.text")
        yield part["text"]
