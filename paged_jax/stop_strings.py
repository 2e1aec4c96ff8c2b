"""Finds stop strings in a text that grows, one character at a time (Aho and Corasick, 1975)."""

from collections import deque
from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """An automaton whose state is the longest end of the text that begins a stop string.

    The first stop string to be complete wins, and of those that are complete at the same
    character the longest, so that the result does not depend on how the text is cut in pieces.
    """

    def __init__(self, stops: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]  # state 0 is the empty text
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop string that the state ends with
        for stop in stops:
            self._add(stop)
        self._fallback = [0] * len(self._next)  # the longest state that is a proper end of this one
        self._link()
        self._state = 0

    @property
    def num_held(self) -> int:
        """How many characters at the text's end may still become a stop string."""
        return self._depth[self._state]

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read on; returns (characters read, stop string) as soon as one is complete."""
        state = self._state
        for index, letter in enumerate(text):
            while state and letter not in self._next[state]:
                state = self._fallback[state]
            state = self._next[state].get(letter, 0)
            if (stop := self._stop[state]) is not None:
                self._state = state
                return index + 1, stop
        self._state = state
        return None

    def _add(self, stop: str) -> None:
        state = 0
        for letter in stop:
            if letter not in self._next[state]:
                self._next[state][letter] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = self._next[state][letter]
        self._stop[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for letter, longer in self._next[state].items():
                end = self._fallback[state]
                while end and letter not in self._next[end]:
                    end = self._fallback[end]
                end = self._next[end].get(letter, 0)
                self._fallback[longer] = end
                if self._stop[longer] is None:
                    self._stop[longer] = self._stop[end]
                queue.append(longer)
