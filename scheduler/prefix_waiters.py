"""Sequences that wait for a block another one is about to compute, instead of computing it too."""

from collections.abc import Iterable, Iterator

from scheduler.request import Sequence


class PrefixWaiters:
    """Who announced which block digests, and who waits for them."""

    def __init__(self):
        self._computing: dict[bytes, Sequence] = {}
        self._parked: dict[bytes, list[Sequence]] = {}
        self._digest_of_parked: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        return len(self._digest_of_parked)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._digest_of_parked)

    def announce(self, sequence: Sequence, digests: Iterable[bytes]) -> None:
        """The sequence runs now and will compute these blocks; the first to say so does."""
        for digest in digests:
            self._computing.setdefault(digest, sequence)

    def park(self, sequence: Sequence, digest: bytes) -> bool:
        """Let a waiting sequence wait for a block, if somebody is about to compute it."""
        if digest not in self._computing:
            return False
        self._parked.setdefault(digest, []).append(sequence)
        self._digest_of_parked[sequence] = digest
        return True

    def unpark(self, sequence: Sequence) -> bool:
        """Take a sequence out; False if it was not here."""
        digest = self._digest_of_parked.pop(sequence, None)
        if digest is None:
            return False
        self._parked[digest].remove(sequence)
        if not self._parked[digest]:
            del self._parked[digest]
        return True

    def settle(self, sequence: Sequence, digests: Iterable[bytes]) -> list[Sequence]:
        """These blocks of the sequence are computed, or it stopped: who waited for them."""
        woken: list[Sequence] = []
        for digest in digests:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]
                woken += self._parked.pop(digest, ())
        for one in woken:
            del self._digest_of_parked[one]
        return woken

    def check_invariants(self, running: list[Sequence]) -> None:
        assert set(self._computing.values()) <= set(running), "an announced block is forgotten"
        assert self._parked.keys() <= self._computing.keys(), "a parked sequence is forgotten"
        parked = [s for group in self._parked.values() for s in group]
        assert sorted(map(id, parked)) == sorted(map(id, self._digest_of_parked))
