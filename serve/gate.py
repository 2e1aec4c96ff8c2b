"""Who may come in: readiness, the requests inside, and how they end when the server drains."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from paged_jax import EngineDeadError, PagedJaxError
from serve.engine import Engine, EngineState
from serve.errors import DrainTimeoutError, NotReadyError, PausedError, QueueFullError
from serve.options import DEFAULTS, ServeOptions

Pause = Literal["paused", "asleep"]
State = EngineState | Pause | Literal["hung"]

logger = logging.getLogger(__name__)


class Gate:
    """Counts the requests inside, bounds those that wait, and closes for good at the end.

    Lives on the event loop; nothing in it may be called from another thread.
    """

    def __init__(self, engine: Engine, options: ServeOptions = DEFAULTS):
        self._engine = engine
        self._options = options
        self._closed = False
        self._num_samples = 0
        self.num_inside = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._pauses: set[Pause] = set()
        self._on_timeout: set[Callable[[Exception], None]] = set()
        self.failure: Exception | None = None  # why the engine could not start

    @property
    def state(self) -> State:
        """What the engine says, unless it cannot say it: it failed to start, or hangs in a step."""
        if self.failure is not None or self._engine.state == "dead":
            return "dead"
        if self._engine.step_age_s > self._options.step_timeout_s:
            return "hung"
        if self._closed:
            return "draining"
        if self._engine.state == "ready" and self._pauses:
            return "asleep" if "asleep" in self._pauses else "paused"
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
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    def check_room(self) -> None:
        """QueueFullError if so many samples are inside that no further one may wait."""
        room = self._engine.stats().max_num_seqs + self._options.max_queued
        if self._num_samples >= room:
            raise QueueFullError(
                f"The queue is full: {self._num_samples} samples run or wait, and at most "
                f"{self._options.max_queued} may wait here. Try again later."
            )

    @contextlib.contextmanager
    def queue(self, num_samples: int) -> Iterator[None]:
        """Take the places of a request's samples. Raises QueueFullError where none is left.

        The last request to come in may bring more samples than there are places, or a large one
        would never be served.
        """
        self.check_room()
        self._num_samples += num_samples
        try:
            yield
        finally:
            self._num_samples -= num_samples

    @contextlib.contextmanager
    def told_of_timeout(self, tell: Callable[[Exception], None]) -> Iterator[None]:
        """Have `tell` called with a DrainTimeoutError should the drain run out of time."""
        self._on_timeout.add(tell)
        try:
            yield
        finally:
            self._on_timeout.discard(tell)

    def pause(self, why: Pause) -> None:
        """Let nobody in until `resume` is called for the same reason."""
        self._pauses.add(why)

    def resume(self, why: Pause) -> None:
        self._pauses.discard(why)

    async def until_empty(self) -> None:
        """Returns when nobody is inside."""
        await self._empty.wait()

    def stop_those_inside(self, error: Exception | None = None) -> None:
        """Tell the running requests to stop, by default because the server is paused."""
        for tell in tuple(self._on_timeout):
            tell(error or PausedError())

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True

    async def drain(self, timeout_s: float) -> None:
        """Close, and wait for those inside; whoever is left at the end is told to stop."""
        self.close()
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            logger.warning("%d requests were cut off after %g s", self.num_inside, timeout_s)
            self.stop_those_inside(DrainTimeoutError())


class GateKeeper:
    """Pure ASGI middleware of the routes that need a ready engine.

    queues: turn requests away while the queue is full, before anything of them is read.
    """

    def __init__(self, app: ASGIApp, gate: Gate, *, queues: bool):
        self.app = app
        self.gate = gate
        self.queues = queues

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.gate.visit():
            if self.queues:
                self.gate.check_room()
            await self.app(scope, receive, send)
