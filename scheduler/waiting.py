"""The queue of waiting sequences, in the order policy's order."""

import heapq

from scheduler.request import Sequence, Status

_Entry = tuple[tuple[float, int], int, Sequence]


class WaitingQueue:
    """A heap with lazy deletion: pushing in order and removing cost O(1), popping O(log n).

    A sequence is in the queue at most once; removing marks it, and its entry is dropped when it
    comes to the front.
    """

    def __init__(self):
        self._heap: list[_Entry] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self):
        return iter(self._members)

    def push(self, sequence: Sequence) -> None:
        assert sequence.status is Status.WAITING
        assert sequence not in self._members
        heapq.heappush(self._heap, (sequence.request.order_key, sequence.index, sequence))
        self._members.add(sequence)

    def peek(self) -> Sequence | None:
        """The sequence to serve next, left in the queue."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence in self._members:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        sequence = self.peek()
        assert sequence is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        self._members.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self._members.discard(sequence)
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[2] in self._members]
            heapq.heapify(self._heap)
