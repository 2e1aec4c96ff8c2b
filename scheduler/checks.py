"""Checks of a request's fields: each raises `RequestError` that names the field and its limit."""

import numbers
from collections.abc import Iterable
from typing import Any, NoReturn

from scheduler.errors import RequestError

MAX_INT32 = 2**31 - 1
MAX_SHOWN = 80  # characters of a wrong value in a message


def show(value: object) -> str:
    """The value as it was written, or its beginning."""
    try:
        shown = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge integer"
    return shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."


def refuse(field_name: str, rule: str, value: object) -> NoReturn:
    raise RequestError(f"{field_name} must be {rule}, got {show(value)}", param=field_name)


def require_int(field_name: str, value: Any, low: int, high: int = MAX_INT32) -> None:
    is_int: bool = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_int:
        refuse(field_name, "an integer", value)
    if not low <= value <= high:
        refuse(field_name, f"between {low} and {high}", value)


def require_number(field_name: str, value: Any, low: float, high: float) -> None:
    is_number: bool = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or value != value:
        refuse(field_name, "a finite number", value)
    if not low <= value <= high:
        refuse(field_name, f"between {low} and {high}", value)


def require_bool(field_name: str, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(field_name, "true or false", value)


def require_few(field_name: str, what: str, value: Any, most: int) -> None:
    if len(value) > most:
        raise RequestError(
            f"{field_name} holds {len(value)} {what}, at most {most} are allowed",
            param=field_name,
        )


def require_texts(
    field_name: str, value: Any, *, most: int, max_len: int, of_text: str = "strings"
) -> tuple[str, ...]:
    """A list of non-empty strings, as a tuple."""
    if not isinstance(value, tuple | list):
        refuse(field_name, "a list of strings", value)
    require_few(field_name, of_text, value, most)
    for text in value:
        if not isinstance(text, str) or not text:
            refuse(field_name, "made of non-empty strings", text)
        if len(text) > max_len:
            raise RequestError(
                f"{field_name} holds a string of {len(text)} characters, "
                f"at most {max_len} are allowed",
                param=field_name,
            )
    return tuple(value)


def require_token_ids(field_name: str, value: Any, *, most: int) -> tuple[int, ...]:
    """A list of token ids, as a tuple; that they are below the vocabulary's size is not known."""
    if not isinstance(value, tuple | list):
        refuse(field_name, "a list of token ids", value)
    require_few(field_name, "ids", value, most)
    return tuple(_token_ids(field_name, value))


def _token_ids(field_name: str, value: Iterable[Any]) -> Iterable[int]:
    for token_id in value:
        require_int(field_name, token_id, 0)
        yield int(token_id)
