"""The sizes that step programs are compiled for; every step is padded up to one of them."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """Sorted sizes for decode rows (D), prefill tokens (C) and sampled rows (R).

    A step without prefill takes its D from `decodes`; one with prefill from `mixed_decodes`,
    which has few sizes since a chunk costs more than padded rows. `backbones()` is the table of
    step programs and `samples` that of the sampler's: warm-up and dispatch both read them.
    """

    decodes: tuple[int, ...]
    chunks: tuple[int, ...]
    mixed_decodes: tuple[int, ...]
    samples: tuple[int, ...]

    def __post_init__(self):
        for name in ("decodes", "chunks", "mixed_decodes", "samples"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be rising sizes, got {sizes}")

    def backbones(self) -> Iterator[tuple[int, int]]:
        """Every (D, C) that a step can be padded to, largest first."""
        for chunk in reversed(self.chunks):
            for decode in reversed(self.mixed_decodes):
                yield decode, chunk
        for decode in reversed(self.decodes):
            yield decode, 0

    def pick(self, num_decodes: int, num_chunk_tokens: int) -> tuple[int, int]:
        if num_chunk_tokens == 0:
            return _round_up(self.decodes, num_decodes), 0
        decode = _round_up(self.mixed_decodes, num_decodes)
        return decode, _round_up(self.chunks, num_chunk_tokens)

    def pick_samples(self, num_samples: int) -> int:
        return _round_up(self.samples, num_samples)


def _round_up(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]


def rising_sizes(smallest: int, largest: int, *, finer_from: int) -> tuple[int, ...]:
    """Sizes from `smallest` to `largest`: fourfold below `finer_from`, then doubling, then with
    one in the middle too. Every size is a program to compile; at the top, powers of two would
    waste up to half of a step.
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        if size >= 2 * finer_from and 3 * size // 2 < largest:
            sizes.append(3 * size // 2)
        size *= 2 if size >= finer_from else 4
    return (*sizes, largest)


def _mixed_decodes(max_num_seqs: int) -> tuple[int, ...]:
    """All rows, and a quarter of them where that is worth more programs: while few decode, their
    padding would be as long as a short chunk."""
    return (max_num_seqs // 4, max_num_seqs) if max_num_seqs >= 32 else (max_num_seqs,)


def make_buckets(*, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
    """Default sizes for these limits.

    A step's decodes and chunk together stay within `max_num_batched_tokens`, so the largest
    chunk is a bucket edge.
    """
    rows = rising_sizes(1, max_num_seqs, finer_from=16)
    smallest = min(16, max_num_batched_tokens)
    return Buckets(
        decodes=rows,
        chunks=rising_sizes(smallest, max_num_batched_tokens, finer_from=64),
        mixed_decodes=_mixed_decodes(max_num_seqs),
        samples=rows,
    )
