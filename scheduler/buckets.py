"""The sizes that step programs are compiled for; every step is padded up to one of them."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """Sorted sizes for decode rows (D), tokens of a step with prefill (C) and sampled rows (R).

    A step without prefill computes D tokens, C is 0. One with prefill computes C tokens, decodes
    and chunks together; it has room for every row, which costs nothing where the row is padding.
    `backbones()` is the table of step programs and `samples` that of the sampler's: warm-up and
    dispatch both read them.
    """

    decodes: tuple[int, ...]
    chunks: tuple[int, ...]
    samples: tuple[int, ...]

    def __post_init__(self):
        for name in ("decodes", "chunks", "samples"):
            sizes = getattr(self, name)
            if not sizes or list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be rising sizes, got {sizes}")

    def backbones(self) -> Iterator[tuple[int, int]]:
        """Every (D, C) that a step can be padded to, largest first."""
        for num_tokens in reversed(self.chunks):
            yield self.decodes[-1], num_tokens
        for rows in reversed(self.decodes):
            yield rows, 0

    def pick(self, num_decodes: int, num_chunk_tokens: int) -> tuple[int, int]:
        """The least (D, C) for so many decodes and tokens of chunks."""
        if num_chunk_tokens == 0:
            return _round_up(self.decodes, num_decodes), 0
        rows = _round_up(self.decodes[-1:], num_decodes)
        return rows, _round_up(self.chunks, num_decodes + num_chunk_tokens)

    def num_tokens(self, num_decodes: int, num_chunk_tokens: int) -> int:
        """How many are computed for so many, padding included."""
        rows, num_tokens = self.pick(num_decodes, num_chunk_tokens)
        return num_tokens or rows

    def pick_samples(self, num_samples: int) -> int:
        return _round_up(self.samples, num_samples)


def _round_up(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]


def _row_sizes(largest: int) -> tuple[int, ...]:
    """Sizes up to `largest`: fourfold up to 16, then doubling, from 32 on with one in the middle
    too. Every size is a program to compile; powers of two would waste up to half of a large step.
    """
    sizes = []
    size = 1
    while size < largest:
        sizes.append(size)
        if size >= 32 and 3 * size // 2 < largest:
            sizes.append(3 * size // 2)
        size *= 2 if size >= 16 else 4
    return (*sizes, largest)


def _chunk_sizes(largest: int) -> tuple[int, ...]:
    """Sizes up to `largest`: 16, 64, in steps of 32 up to 256, then four to a doubling. They are
    finer than rows are: a step with prefill takes about as long as it is padded to.
    """
    sizes = [16]
    size = 64
    while size < largest:
        sizes.append(size)
        size += max(32, (1 << size.bit_length()) // 8)
    return (*(size for size in sizes if size < largest), largest)


def make_buckets(*, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
    """Default sizes for these limits.

    A step's decodes and chunks together stay within `max_num_batched_tokens`, so that is the
    largest size.
    """
    rows = _row_sizes(max_num_seqs)
    return Buckets(
        decodes=rows,
        chunks=_chunk_sizes(max_num_batched_tokens),
        samples=rows,
    )
