"""The web application: a value built from an engine, its routes, two tables and a lifespan."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.middleware import Middleware

from serve.endpoints import routes
from serve.engine import Engine
from serve.errors import EXCEPTION_HANDLERS
from serve.front import Front
from serve.options import DEFAULTS, ServeOptions
from serve.request_id import RequestIds


def create_app(
    engine: Engine, options: ServeOptions = DEFAULTS, *, owns_engine: bool = True
) -> Starlette:
    """An ASGI application that serves `engine`.

    owns_engine: start the engine when the application starts, in the background so that /health
    can tell how far it is, and shut it down at the end. With False it is left as it is; that also
    suits an application mounted inside another one, whose lifespan never runs.
    """
    return app_of(Front.of(engine, options, int(time.time())), owns_engine=owns_engine)


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
        routes=routes(front),
        middleware=[Middleware(RequestIds)],
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
