"""The response to a generating request: work that ends when the client goes away."""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from serve import sse
from serve.deadline import Deadline, told_of
from serve.errors import TABLE, GenerationError, error_json, row_of
from serve.gate import Gate
from serve.sse import Outbox

logger = logging.getLogger(__name__)

Work = Callable[[Outbox], Awaitable[None]]


class Reply:
    """Runs `work` and sends what it puts into the outbox: a body at its end, or a stream of events.

    Nothing is submitted to the engine before this object is called, and when the call returns the
    work has ended: it is cancelled when the client disconnects, reads too slowly, or is still
    there when its own time or that of the drain is over. What goes wrong before the first byte is
    raised, so that it gets its own status; later it becomes the last event.
    """

    def __init__(
        self,
        work: Work,
        gate: Gate,
        *,
        stream: bool,
        max_unsent_bytes: int,
        deadline: Deadline | None,
        headers: Mapping[str, str],
    ):
        self._work = work
        self._gate = gate
        self._stream = stream
        self._max_unsent_bytes = max_unsent_bytes
        self._deadline = deadline
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outbox = Outbox(self._max_unsent_bytes if self._stream else sys.maxsize)
        tasks = [
            asyncio.create_task(_fill(outbox, self._work)),
            asyncio.create_task(_fail_on_disconnect(outbox, receive)),
        ]
        try:
            with self._gate.told_of_timeout(outbox.fail), told_of(self._deadline, outbox.fail):
                if self._stream:
                    await self._send_events(outbox, send)
                else:
                    await self._send_body(outbox, send)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_body(self, outbox: Outbox, send: Send) -> None:
        body = await outbox.get()
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(headers, send)
        await send({"type": "http.response.body", "body": body})

    async def _send_events(self, outbox: Outbox, send: Send) -> None:
        events = await outbox.get()
        await self._start(sse.HEADERS, send)
        try:
            while events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
                events = await outbox.get()
        except ClientDisconnect:
            return
        except Exception as error:
            if row_of(error) is TABLE[Exception]:
                logger.exception("A stream failed")
            events = sse.event(error_json(error))
            await send({"type": "http.response.body", "body": events, "more_body": True})
        await send({"type": "http.response.body", "body": sse.DONE})

    async def _start(self, headers: Mapping[str, str], send: Send) -> None:
        raw = MutableHeaders({**headers, **self._headers}).raw
        await send({"type": "http.response.start", "status": 200, "headers": raw})


async def _fill(outbox: Outbox, work: Work) -> None:
    try:
        await work(outbox)
    except asyncio.CancelledError:
        outbox.fail(GenerationError())  # cancelled from inside, or nobody is left to see it
        raise
    except Exception as error:
        outbox.fail(error)
    else:
        outbox.close()


async def _fail_on_disconnect(outbox: Outbox, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    outbox.fail(ClientDisconnect())
