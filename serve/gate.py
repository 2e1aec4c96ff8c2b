"""Who may come in: readiness, the requests inside, and how they end when the server drains."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax import EngineDeadError, PagedJaxError
from serve.engine import Engine, EngineState
from serve.errors import DrainTimeoutError, NotReadyError

logger = logging.getLogger(__name__)


class Gate:
    """Counts the requests inside, and closes for good when the server is told to end.

    Lives on the event loop; nothing in it may be called from another thread.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._closed = False
        self._num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._on_timeout: set[Callable[[Exception], None]] = set()
        self.failure: Exception | None = None  # why the engine could not start

    @property
    def state(self) -> EngineState:
        if self.failure is not None:
            return "dead"
        if self._closed and self._engine.state != "dead":
            return "draining"
        return self._engine.state

    async def start_engine(self) -> None:
        """Start the engine; a failure is logged and kept, for `state` to tell."""
        try:
            await self._engine.start()
        except PagedJaxError as error:  # its message is meant for the user
            self.failure = error
            logger.error("The engine could not start: %s", error)
        except Exception as error:
            self.failure = error
            logger.exception("The engine could not start")

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Be inside for the length of the block.

        Raises NotReadyError while the gate is not open, EngineDeadError when it never will be.
        """
        state = self.state
        if state == "dead":
            raise EngineDeadError
        if state != "ready":
            raise NotReadyError(f"The server takes no requests now: it is {state}.")
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    @contextlib.contextmanager
    def told_of_timeout(self, tell: Callable[[Exception], None]) -> Iterator[None]:
        """Have `tell` called with a DrainTimeoutError should the drain run out of time."""
        self._on_timeout.add(tell)
        try:
            yield
        finally:
            self._on_timeout.discard(tell)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True

    async def drain(self, timeout_s: float) -> None:
        """Close, and wait for those inside; whoever is left at the end is told to stop."""
        self.close()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests were cut off after %g s", self._num_inside, timeout_s)
            for tell in tuple(self._on_timeout):
                tell(DrainTimeoutError())


class GateKeeper:
    """Pure ASGI middleware of the routes that need a ready engine."""

    def __init__(self, app: ASGIApp, gate: Gate):
        self.app = app
        self.gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.gate.visit():
            await self.app(scope, receive, send)
