"""How long a request may take: as long as it says itself, and no longer than the server allows."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starlette.requests import Request

from paged_jax import RequestError
from serve.errors import DeadlineError
from serve.options import ServeOptions
from serve.protocol import MAX_TIMEOUT_S, EngineRequest

HEADER = "x-request-timeout-s"


@dataclass(frozen=True)
class Deadline:
    """at: in seconds of `time.perf_counter()`. timeout_s: from the request's arrival to there."""

    at: float
    timeout_s: float


def deadline_of(
    request: Request, body: EngineRequest, options: ServeOptions, arrived: float
) -> Deadline | None:
    """The shortest of the body's, the header's and the server's time; None without any of them.

    RequestError names a header that is no positive number of seconds.
    """
    given = (body.timeout_s, _header_s(request), options.request_timeout_s)
    limits = [timeout_s for timeout_s in given if timeout_s is not None]
    return Deadline(arrived + min(limits), min(limits)) if limits else None


def _header_s(request: Request) -> float | None:
    text = request.headers.get(HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError(
            f"The header {HEADER} must be a number above 0 and at most {MAX_TIMEOUT_S}",
            param=HEADER,
        )
    return timeout_s


@contextlib.contextmanager
def told_of(deadline: Deadline | None, tell: Callable[[Exception], None]) -> Iterator[None]:
    """Have `tell` called with a DeadlineError if the block still runs at the deadline."""
    if deadline is None:
        yield
        return
    error = DeadlineError(
        f"The request was ended after {deadline.timeout_s:g} s, the time that it had."
    )
    left_s = max(0.0, deadline.at - time.perf_counter())
    timer = asyncio.get_running_loop().call_later(left_s, tell, error)
    try:
        yield
    finally:
        timer.cancel()
