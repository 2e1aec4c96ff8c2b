"""Says what is going on while a user waits: one plain line each, or a bar on a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Protocol, TextIO

__all__ = ["ConsoleProgress", "Progress", "SilentProgress"]

Advance = Callable[[int], None]


class Progress(Protocol):
    """Where slow work reports to; passed in, never looked up."""

    def say(self, text: str) -> None:
        """One line."""

    def track(
        self, text: str, total: int, *, unit: str = ""
    ) -> contextlib.AbstractContextManager[Advance]:
        """A context that yields `advance(amount)`; the amounts add up to `total`.

        `unit` is "B" for bytes, else a word that follows the numbers, or nothing.
        """


class SilentProgress:
    """Reports nothing."""

    def say(self, text: str) -> None:
        pass

    @contextlib.contextmanager
    def track(self, text: str, total: int, *, unit: str = "") -> Iterator[Advance]:
        yield lambda amount: None


class ConsoleProgress:
    """Lines on `stream` (standard error if None), and a rich bar where that is a terminal."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream

    @property
    def stream(self) -> TextIO:
        # Looked up late: standard error may be replaced after this object is made.
        return sys.stderr if self._stream is None else self._stream

    def say(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    @contextlib.contextmanager
    def track(self, text: str, total: int, *, unit: str = "") -> Iterator[Advance]:
        if not self.stream.isatty():
            self.say(text)
            yield lambda amount: None
            return
        from rich import progress
        from rich.console import Console

        counts = (
            progress.DownloadColumn() if unit == "B" else progress.MofNCompleteColumn(),
            *([progress.TextColumn(unit)] if unit not in ("", "B") else []),
        )
        bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            *counts,
            progress.TimeElapsedColumn(),
            console=Console(file=self.stream),
            redirect_stdout=False,  # what a program prints there is not ours to move
        )
        with bar:
            task = bar.add_task(text, total=total)
            yield lambda amount: bar.advance(task, amount)
