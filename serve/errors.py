"""What went wrong, as a client sees it: one table from exception to status, type and code."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from paged_jax import EngineDeadError, PagedJaxError, RequestError

MAX_MESSAGE_LEN = 1000


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""


class BodyTooLargeError(RequestError):
    """The request's body is longer than the server takes."""


class InvalidKeyError(Exception):
    """The request bears none of the operator's API keys."""


class QueueFullError(Exception):
    """More requests wait than the operator allows."""


class DeadlineError(Exception):
    """The request took longer than it was given."""


class NotReadyError(Exception):
    """No new work now: the engine loads, compiles, hangs, drains or is paused."""


class DrainTimeoutError(Exception):
    """The server ends before the request did."""


class PausedError(Exception):
    """The operator paused the server and ended what ran."""


class SlowReaderError(Exception):
    """The client reads its stream more slowly than it grows."""


class GenerationError(Exception):
    """The engine gave this one request up."""


# What ends a request although the engine is well.
ABORTS = (ClientDisconnect, DeadlineError, DrainTimeoutError, PausedError, SlowReaderError)


@dataclass(frozen=True)
class Row:
    """How one kind of exception is answered; `message` None shows the exception's own words."""

    status: int
    type: str
    code: str | None = None
    message: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable"
SERVER = "server_error"
SOON = {"retry-after": "5"}
SHORTLY = {"retry-after": "1"}
NEVER = {"x-should-retry": "false"}  # else the openai client tries every 5xx again

# Looked up along the exception's class and its bases, so `Exception` answers for the rest.
TABLE: dict[type[Exception], Row] = {
    RequestError: Row(400, INVALID),
    UnknownModelError: Row(404, INVALID),
    BodyTooLargeError: Row(413, INVALID),
    InvalidKeyError: Row(401, INVALID, "invalid_api_key", headers={"www-authenticate": "Bearer"}),
    QueueFullError: Row(429, "rate_limit_error", "rate_limit_exceeded", headers=SHORTLY),
    DeadlineError: Row(408, "timeout", "deadline_exceeded", headers=NEVER),
    ClientDisconnect: Row(499, INVALID, "client_disconnected", "The client went away."),
    SlowReaderError: Row(499, INVALID, "slow_reader"),
    NotReadyError: Row(503, UNAVAILABLE, "not_ready", headers=SOON),
    DrainTimeoutError: Row(
        503, UNAVAILABLE, "shutting_down", "The server shut down before this was done.", SOON
    ),
    PausedError: Row(
        503, UNAVAILABLE, "paused", "The server was paused before this was done.", SOON
    ),
    PagedJaxError: Row(400, INVALID, "not_possible"),  # what an operator asked for
    EngineDeadError: Row(
        503, SERVER, "engine_dead", "The engine has stopped after an error.", NEVER
    ),
    GenerationError: Row(
        500, SERVER, "generation_failed", "The engine could not finish this request.", NEVER
    ),
    Exception: Row(500, SERVER, "internal_error", "Something went wrong in the server.", NEVER),
}
_ROUTING_CODES = {404: "not_found", 405: "method_not_allowed"}


def row_of(error: Exception) -> Row:
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers or {}
        return Row(status, INVALID, _ROUTING_CODES.get(status), error.detail, headers)
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_json(error: Exception) -> bytes:
    """The error in OpenAI's shape; says no more than the table lets it."""
    row = row_of(error)
    message, param, code = row.message or str(error), None, row.code
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    if len(message) > MAX_MESSAGE_LEN:
        message = message[:MAX_MESSAGE_LEN] + "…"
    told = {"message": message, "type": row.type, "param": param, "code": code}
    return msgspec.json.encode({"error": told})


def error_response(error: Exception) -> Response:
    row = row_of(error)
    return Response(
        error_json(error),
        status_code=row.status,
        headers=dict(row.headers),
        media_type="application/json",
    )


async def answer_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for every row of the table."""
    response = error_response(error)
    # The handler of `Exception` runs outside of the middleware that names requests.
    response.headers["x-request-id"] = request.state.request_id
    return response


EXCEPTION_HANDLERS = dict.fromkeys((HTTPException, *TABLE), answer_error)
