"""Who may come in at all: requests that bear one of the operator's keys."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.errors import InvalidKeyError, error_response
from serve.root_path import path_of

# What a load balancer and Prometheus ask, neither of which has a key: exactly these, so that
# no other spelling of another path passes for one of them.
PUBLIC = frozenset({"/health", "/live", "/metrics", "/ping"})


class ApiKeys:
    """Pure ASGI middleware: refuses what bears none of the keys, handshakes included.

    Comparing takes the same time whatever is given: digests are compared, and all of them.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str]):
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = InvalidKeyError("Incorrect API key: send Authorization: Bearer KEY.")
            await error_response(refusal)(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if scope["type"] == "http" and path_of(scope) in PUBLIC:
            return True
        kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return kind.lower() == "bearer" and any(found)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
