"""Server-sent events, and the bounded box between who makes them and who sends them."""

import asyncio

from serve.errors import SlowReaderError

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold the events back
}
DONE = b"data: [DONE]\n\n"


def event(data: bytes) -> bytes:
    """One event; `data` is JSON, so it has no line breaks."""
    return b"data: " + data + b"\n\n"


class Outbox:
    """Bytes that wait to be sent, `max_bytes` at most beside the latest piece.

    One task puts and closes, one gets, and anybody may fail it: then `put` raises the error at
    once, `get` when it has handed out what waits. The first error counts. Lives on the event loop.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None

    def put(self, piece: bytes) -> None:
        """Add a piece. SlowReaderError when what already waits leaves no room for it."""
        if self._error is not None:
            raise self._error
        if self._num_bytes and self._num_bytes + len(piece) > self._max_bytes:
            raise SlowReaderError(
                f"The stream was aborted: {self._num_bytes} bytes of it were waiting to be read."
            )
        self._pieces.append(piece)
        self._num_bytes += len(piece)
        self._changed.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._closed = True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()

    async def get(self) -> bytes:
        """Everything that waits, as soon as there is something; b"" at the end."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._closed:
                return b""
            self._changed.clear()
            await self._changed.wait()
        taken = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        return taken
