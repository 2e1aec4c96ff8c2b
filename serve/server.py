"""The server process: one port, one worker, one engine, and an orderly end."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from paged_jax import EngineConfig
from serve.app import app_of
from serve.engine import Engine
from serve.front import Front
from serve.gate import Gate
from serve.logs import set_up_logs
from serve.options import DEFAULTS, ServeOptions
from serve.tracing import export_traces

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than load balancers keep an idle connection, which is 60 by habit
LAST_GASP_S = 2  # for connections that are still open when the drain is over
WATCH_S = 0.2


def run_server(
    engine: Engine | EngineConfig,
    options: ServeOptions = DEFAULTS,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0, or 1 when the engine failed.

    The port is bound at once and /health tells how far the engine is. A first signal closes the
    door and lets running requests finish for `options.drain_timeout_s`; a second one cuts them off.
    """
    set_up_logs(options.log_format)
    endpoint = options.otlp_traces_endpoint
    tracer_provider = None if endpoint is None else export_traces(endpoint)
    try:
        listener = _listen(host, port)
    except OSError as error:
        logger.error("Cannot listen on %s:%d: %s", host, port, error.strerror or error)
        return 1
    logger.info("Listening on http://%s:%d", host, listener.getsockname()[1])
    front = Front.of(_engine_of(engine), options, int(time.time()), tracer_provider)
    config = uvicorn.Config(
        app_of(front, owns_engine=True),
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=options.access_log,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_GASP_S,
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(_serve(config, listener, front))
    if tracer_provider is not None:
        tracer_provider.shutdown()  # sends what is left
    return 1 if _engine_failed(front.gate, options) else 0


def _engine_of(engine: Engine | EngineConfig) -> Engine:
    if not isinstance(engine, EngineConfig):
        return engine
    from paged_jax import AsyncEngine  # loads JAX, which takes seconds

    return AsyncEngine(engine)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server, but that it hands signals on: its own answer is to stop listening."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], object]):
        super().__init__(config)
        self._on_signal = on_signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()


async def _serve(config: uvicorn.Config, listener: socket.socket, front: Front) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[None] = asyncio.Queue()
    server = _Server(config, lambda: loop.call_soon_threadsafe(signals.put_nowait, None))
    endings = [
        asyncio.create_task(_drain_on_signal(signals, front)),
        asyncio.create_task(_watch_engine(front)),
    ]

    async def end() -> None:
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True

    ending = asyncio.create_task(end())
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in (ending, *endings):
            task.cancel()
        await asyncio.gather(ending, *endings, return_exceptions=True)


async def _drain_on_signal(signals: asyncio.Queue[None], front: Front) -> None:
    """Returns when the door is closed and everybody has left or was told to."""
    await signals.get()
    logger.info("Draining: no new requests; a second signal ends the running ones")
    draining = asyncio.create_task(front.gate.drain(front.options.drain_timeout_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        draining.cancel()
        await front.gate.drain(0)
    again.cancel()


async def _watch_engine(front: Front) -> None:
    """Returns when the engine failed in a way that ends the server."""
    while True:
        if _engine_failed(front.gate, front.options):
            return
        await asyncio.sleep(WATCH_S)


def _engine_failed(gate: Gate, options: ServeOptions) -> bool:
    return gate.failure is not None or (options.exit_when_dead and gate.state == "dead")
