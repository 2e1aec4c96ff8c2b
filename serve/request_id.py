"""The name of a request, given by the client or made here, and echoed on every response."""

import re
import uuid
from collections.abc import MutableMapping
from typing import Any

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_jax import RequestError
from serve.errors import error_response
from serve.logs import current_request_id

HEADER = "x-request-id"
MAX_LEN = 128
_PRINTABLE = re.compile(r"[\x20-\x7e]+")


def check_request_id(request_id: str, param: str) -> str:
    """The id, if it can be a header and a line in a log; else RequestError naming `param`."""
    if len(request_id) > MAX_LEN:
        raise RequestError(
            f"{param} has {len(request_id)} characters, at most {MAX_LEN} are allowed",
            param=param,
        )
    if not _PRINTABLE.fullmatch(request_id):
        raise RequestError(f"{param} must be made of printable ASCII characters", param=param)
    return request_id


class RequestIds:
    """Pure ASGI middleware: keeps the id in `scope["state"]`, echoes it, and counts by status.

    An endpoint that finds an id in the request's body calls `rename_request`.
    """

    def __init__(self, app: ASGIApp, responses: Counter):
        self.app = app
        self._responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        _name(state, uuid.uuid4().hex)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
                self._responses.labels(status=str(message["status"])).inc()
            await send(message)

        given = Headers(scope=scope).get(HEADER)
        try:
            if given is not None:
                _name(state, check_request_id(given, HEADER))
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_id)
        else:
            await self.app(scope, receive, send_with_id)


def rename_request(request: Request, request_id: str) -> str:
    """Name the request after its body, unless its header named it; returns its name."""
    checked = check_request_id(request_id, "request_id")
    if HEADER not in request.headers:
        _name(request.scope["state"], checked)
    return request.state.request_id


def _name(state: MutableMapping[str, Any], request_id: str) -> None:
    state["request_id"] = request_id
    current_request_id.set(request_id)
