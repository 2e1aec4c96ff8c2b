"""The form that a text must have, whatever field asks for it."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from paged_jax import RequestError, StructuredOutputs
from serve.engine import Output, OutputStream
from serve.protocol import GenerationRequest

# The names of older clients, and what they are called now.
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
OWN = "structured_outputs"


def form_of(body: GenerationRequest) -> tuple[str, StructuredOutputs] | None:
    """The field that asks for a form, and the form. RequestError if several fields do."""
    asked: dict[str, dict[str, Any]] = {}
    if body.structured_outputs:
        asked[OWN] = body.structured_outputs
    for name, kind in GUIDED.items():
        if getattr(body, name) is not None:
            asked[name] = {kind: getattr(body, name)}
    if body.response_format is not None and (form := _of_response_format(body.response_format)):
        asked["response_format"] = form
    if len(asked) > 1:
        raise RequestError(
            f"{' and '.join(asked)} exclude each other: a text has one form", param=list(asked)[1]
        )
    for name, fields in asked.items():
        with renamed(name):
            return name, StructuredOutputs.of(fields)
    return None


def _of_response_format(given: dict[str, Any]) -> dict[str, Any] | None:
    match given:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise RequestError(
                "response_format.json_schema.schema must be a JSON schema, which is an object",
                param="response_format",
            )
    raise RequestError(
        f"response_format.type must be text, json_object or json_schema, got "
        f"{given.get('type')!r:.80}",
        param="response_format",
    )


@contextlib.contextmanager
def renamed(name: str):
    """An error that speaks of structured outputs speaks of the field that asked for them."""
    try:
        yield
    except RequestError as error:
        if name == OWN or error.param is None or not error.param.startswith(OWN):
            raise
        words = str(error).replace(error.param, name).replace(OWN, name)
        raise RequestError(words, param=name, code=error.code) from error


async def renaming(outputs: OutputStream, name: str) -> AsyncGenerator[Output]:
    """The same outputs, with errors in the client's own words."""
    with renamed(name):
        async with contextlib.aclosing(outputs) as stream:
            async for output in stream:
                yield output
