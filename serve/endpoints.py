"""The routes, as a list."""

import functools
from collections.abc import Awaitable, Callable

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from serve.completions import create_chat_completion, create_completion
from serve.front import Front
from serve.gate import GateKeeper
from serve.models import get_model, list_models
from serve.status import health, metrics, ping, version
from serve.tokens import detokenize, tokenize

Endpoint = Callable[[Front, Request], Awaitable[ASGIApp]]


def routes(front: Front) -> list[BaseRoute]:
    """Every endpoint of the server. Those behind the gate answer 503 until the engine is ready."""

    def route(
        path: str, endpoint: Endpoint, *methods: str, gated: bool, queues: bool = False
    ) -> Route:
        keeper = Middleware(GateKeeper, gate=front.gate, queues=queues)
        return Route(
            path,
            functools.partial(endpoint, front),
            methods=methods,
            name=endpoint.__name__,
            middleware=[keeper] if gated else None,
        )

    return [
        route("/v1/completions", create_completion, "POST", gated=True, queues=True),
        route("/v1/chat/completions", create_chat_completion, "POST", gated=True, queues=True),
        route("/v1/models", list_models, "GET", gated=True),
        route("/v1/models/{model:path}", get_model, "GET", gated=True),
        route("/tokenize", tokenize, "POST", gated=True),
        route("/detokenize", detokenize, "POST", gated=True),
        route("/health", health, "GET", gated=False),
        route("/ping", ping, "GET", "POST", gated=False),
        route("/live", ping, "GET", gated=False),
        route("/version", version, "GET", gated=False),
        route("/metrics", metrics, "GET", gated=False),
    ]
