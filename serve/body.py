"""The body of a request: read within a bound, decoded, null taken as absent."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from paged_jax import RequestError
from serve.errors import BodyTooLargeError, DeadlineError

BODY_TIMEOUT_S = 60.0  # who sends nothing must not keep a drain from ending
LARGE = 2**18  # bytes; decoding more than this would hold up the other streams


async def read_object(
    request: Request, max_bytes: int, *, may_be_empty: bool = False
) -> dict[str, Any]:
    """The JSON object of the body, without the fields that are null.

    may_be_empty: no body at all is an empty object.

    Raises BodyTooLargeError before more than `max_bytes` are kept, DeadlineError when it does not
    come, and RequestError for what is no JSON object: also for text with half of a surrogate
    pair, which no encoding can carry.
    """
    body = await _read(request, max_bytes)
    if may_be_empty and not body.strip():
        return {}
    if len(body) > LARGE:
        return await asyncio.to_thread(_decoded, body)
    return _decoded(body)


def _decoded(body: bytes) -> dict[str, Any]:
    if not body.strip():
        raise RequestError("The request has no body; a JSON object is expected")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object", code="invalid_json")
    return {name: item for name, item in value.items() if item is not None}


async def _read(request: Request, max_bytes: int) -> bytes:
    if _declared_len(request) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
    except TimeoutError:
        raise DeadlineError(f"The body did not come within {BODY_TIMEOUT_S:g} s.") from None
    return b"".join(chunks)


def _declared_len(request: Request) -> int:
    declared = request.headers.get("content-length", "0")
    return int(declared) if declared.isdecimal() else 0


def _too_large(max_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is longer than {max_bytes} bytes", code="request_too_large")
