"""KV blocks in host memory: where swapped sequences and evicted prefixes wait."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import jax

__all__ = ["PARCEL_SIZES", "HostBlocks", "Parcel", "split_into_parcels"]

PARCEL_SIZES = (1, 8)  # blocks that move together; each size is a program to compile


class Parcel(NamedTuple):
    """Blocks of one group that went to the host together; axes [M, L, ...] of each array.

    Its memory is free again when the last of its blocks has been replaced.
    """

    arrays: tuple[jax.Array, ...]


class HostBlocks:
    """Which parcel holds which host block. Ids are the scheduler's; a reused id replaces."""

    def __init__(self):
        self._places: dict[tuple[int, int], tuple[Parcel, int]] = {}

    def put(self, group: int, host_ids: Sequence[int], parcel: Parcel) -> None:
        for i, host_id in enumerate(host_ids):
            self._places[group, host_id] = (parcel, i)

    def find(
        self, group: int, pairs: Iterable[tuple[int, int]]
    ) -> Iterator[tuple[Parcel, list[int]]]:
        """The parcels that hold these (host block, device block) pairs.

        With each comes the device block of every block in it, 0 (the null block) where a block
        is not wanted. A parcel comes again for a block that several sequences want at once.
        """
        wanted: dict[tuple[int, int], tuple[Parcel, list[int]]] = {}
        num_times: Counter[int] = Counter()
        for host_id, block_id in pairs:
            parcel, i = self._places[group, host_id]
            size = parcel.arrays[0].shape[0]
            key = (id(parcel), num_times[host_id])
            targets = wanted.setdefault(key, (parcel, [0] * size))[1]
            targets[i] = block_id
            num_times[host_id] += 1
        yield from wanted.values()


def split_into_parcels(pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Cut into parcels; a rest of half a parcel or more travels as one, padded, others alone."""
    small, large = PARCEL_SIZES
    start = 0
    while start < len(pairs):
        size = large if len(pairs) - start >= large // 2 else small
        yield pairs[start : start + size]
        start += size
