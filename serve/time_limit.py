"""Work that must not take long: in a thread of its own, which is stopped when it does.

A chat template comes with the model and a conversation from anybody: together they can loop for
hours. Python has no way to end a thread, but it can raise an exception inside one.
"""

import asyncio
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class _Stopped(BaseException):
    """Raised inside the work; no `except Exception` of a template's filters catches it."""


async def within(limit_s: float, work: Callable[[], Result]) -> Result:
    """What `work` returns or raises; TimeoutError after `limit_s` seconds.

    The work is stopped at its next line of Python. What never comes to one, a single call into C,
    goes on in its thread, and no result of it is heard of.
    """
    run = _Run(work, asyncio.get_running_loop())
    run.start()
    try:
        return await asyncio.wait_for(run.future, limit_s)
    finally:
        run.stop()


class _Run(threading.Thread, Generic[Result]):
    def __init__(self, work: Callable[[], Result], loop: asyncio.AbstractEventLoop):
        super().__init__(name="paged-jax limited work", daemon=True)
        self.future: asyncio.Future[Result] = loop.create_future()
        self._work = work
        self._loop = loop
        self._works = True
        self._lock = (
            threading.Lock()
        )  # held while it is decided whether there is still work to stop

    def run(self) -> None:
        # Whenever the exception comes, between which lines whatever, it ends here.
        with contextlib.suppress(_Stopped):
            outcome: Callable[[], None]
            try:
                outcome = functools.partial(self.future.set_result, self._work())
            except Exception as error:
                outcome = functools.partial(self.future.set_exception, error)
            with self._lock:
                self._works = False
            with contextlib.suppress(RuntimeError):  # the event loop may be gone
                self._loop.call_soon_threadsafe(self._tell, outcome)

    def _tell(self, outcome: Callable[[], None]) -> None:
        if not self.future.done():
            outcome()

    def stop(self) -> None:
        """Raise `_Stopped` in the work, if it still goes on."""
        with self._lock:
            if self._works and self.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.ident), ctypes.py_object(_Stopped)
                )
