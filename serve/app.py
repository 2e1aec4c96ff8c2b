"""The web application: a value built from an engine, its routes, two tables and a lifespan."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from serve.api_keys import ApiKeys
from serve.endpoints import operations_of, routes
from serve.engine import Engine
from serve.errors import EXCEPTION_HANDLERS
from serve.fields import IGNORED_HEADER
from serve.front import Front, json_response
from serve.load_report import LoadReports
from serve.openapi import describe
from serve.options import DEFAULTS, ServeOptions
from serve.request_id import HEADER, RequestIds
from serve.root_path import RootPath


def create_app(
    engine: Engine,
    options: ServeOptions = DEFAULTS,
    *,
    owns_engine: bool = True,
    tracer_provider: Any = None,
) -> Starlette:
    """An ASGI application that serves `engine`.

    owns_engine: start the engine when the application starts, in the background so that /health
    can tell how far it is, and shut it down at the end. With False it is left as it is; that also
    suits an application mounted inside another one, whose lifespan never runs.
    tracer_provider: OpenTelemetry's, to make spans with.
    """
    front = Front.of(engine, options, int(time.time()), tracer_provider)
    return app_of(front, owns_engine=owns_engine)


def app_of(front: Front, *, owns_engine: bool) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if not owns_engine:
            yield
            return
        starting = asyncio.create_task(front.gate.start_engine())
        try:
            yield
        finally:
            front.gate.close()
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await front.engine.shutdown(drain_s=0.0)

    return Starlette(
        routes=_routes(front),
        middleware=_middleware(front),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )


def _routes(front: Front) -> list[BaseRoute]:
    operations = operations_of(front.options)

    async def openapi(request: Request) -> Response:
        description = describe(
            operations,
            front.engine.model_name,  # not known for sure before it is loaded
            strict_fields=front.options.strict_fields,
            with_keys=bool(front.options.api_key),
        )
        return json_response(description)

    return [*routes(front, operations), Route("/openapi.json", openapi)]


def _middleware(front: Front) -> list[Middleware]:
    """The outermost first. None of it is a BaseHTTPMiddleware: that kind hides disconnects."""
    options = front.options
    stack = [Middleware(RequestIds, responses=front.metrics.responses)]
    if options.root_path:
        stack.append(Middleware(RootPath, root_path=options.root_path))
    if options.cors_origin:  # before the keys: a browser asks for leave without one
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=options.cors_origin,
                allow_methods=("GET", "POST"),
                allow_headers=("*",),
                expose_headers=(HEADER, IGNORED_HEADER, "retry-after"),
            )
        )
    if options.api_key:
        stack.append(Middleware(ApiKeys, keys=options.api_key))
    stack.append(Middleware(LoadReports, engine=front.engine))
    return stack
