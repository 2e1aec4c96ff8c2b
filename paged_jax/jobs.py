"""The prompts of `paged-jax generate`, from flags or from a file of JSON lines."""

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paged_jax.errors import RequestError
from scheduler import SamplingParams

__all__ = ["Job", "Message", "read_jobs", "text_job"]

Message = dict[str, Any]
PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages")
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclass(frozen=True)
class Job:
    """One prompt and how to answer it; exactly one of the three is given.

    `sampling` holds the fields that were asked for, each of them valid; `place` says where the
    prompt came from, for messages about it.
    """

    place: str
    sampling: Mapping[str, Any]
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """The sampling parameters, with defaults for the fields that were not asked for."""
        return SamplingParams(**{**defaults, **self.sampling})

    @property
    def shown(self) -> str:
        """The prompt as a person would recognise it."""
        if self.messages is not None:
            return str(self.messages[-1]["content"])
        return self.prompt if self.prompt is not None else f"{self.prompt_token_ids}"


def read_jobs(
    lines: Iterable[bytes], name: str, sampling: Mapping[str, Any], *, chat: bool = False
) -> Iterator[Job]:
    """Jobs from JSON lines such as {"prompt": "Hello", "max_tokens": 5}; empty lines are skipped.

    `sampling` holds the sampling fields of lines that do not give their own; with `chat`, a
    `prompt` is what a user says. A RequestError names the file and the line of what is wrong.
    """
    for number, line in enumerate(lines, start=1):
        place = f"{name}, line {number}"
        try:
            if text := line.decode().strip():
                yield _job(json.loads(text), place, sampling, chat)
        except UnicodeDecodeError as error:
            raise RequestError(f"{place}: not UTF-8 at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise RequestError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise RequestError(f"{place}: nested too deeply") from error
        except RequestError as error:
            raise RequestError(f"{place}: {error}", param=error.param, code=error.code) from error


def _job(body: Any, place: str, sampling: Mapping[str, Any], chat: bool) -> Job:
    if not isinstance(body, dict):
        raise RequestError(f'expected an object such as {{"prompt": "..."}}, got {body!r:.60}')
    for field in body:
        if field not in (*PROMPT_FIELDS, *SAMPLING_FIELDS):
            near = difflib.get_close_matches(field, [*PROMPT_FIELDS, *SAMPLING_FIELDS], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RequestError(f"unknown field {field!r}{hint}", param=field)
    given = [field for field in PROMPT_FIELDS if field in body]
    if len(given) != 1:
        raise RequestError(
            f"give one of {', '.join(PROMPT_FIELDS)}; got {' and '.join(given) or 'none'}"
        )
    own = {field: body[field] for field in SAMPLING_FIELDS if field in body}
    sampling = {**sampling, **own}
    SamplingParams(**sampling)  # refuses what is wrong with them
    if "messages" in body:
        return Job(place, sampling, messages=_messages(body["messages"]))
    if "prompt_token_ids" in body:
        return Job(place, sampling, prompt_token_ids=_token_ids(body["prompt_token_ids"]))
    return text_job(_text(body["prompt"]), place, sampling, chat=chat)


def text_job(prompt: str, place: str, sampling: Mapping[str, Any], *, chat: bool) -> Job:
    """A job for a text; with `chat` it is what a user says."""
    if chat:
        return Job(place, sampling, messages=({"role": "user", "content": prompt},))
    return Job(place, sampling, prompt=prompt)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"prompt must be a string, got {value!r:.60}", param="prompt")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not is_ids or not value:
        raise RequestError(
            f"prompt_token_ids must be a list of one or more integers, got {value!r:.60}",
            param="prompt_token_ids",
        )
    return tuple(value)


def _messages(value: Any) -> tuple[Message, ...]:
    is_messages = isinstance(value, list) and all(
        isinstance(message, dict) and {"role", "content"} <= set(message) for message in value
    )
    if not is_messages or not value:
        raise RequestError(
            'messages must be a list of one or more objects such as {"role": "user", "content": '
            f'"..."}}, got {value!r:.60}',
            param="messages",
        )
    return tuple(value)
