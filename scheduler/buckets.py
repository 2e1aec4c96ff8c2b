"""The sizes that step programs are compiled for; every step is padded up to one of them."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Buckets:
    """Sorted sizes for decode rows (D), prefill tokens (C) and sampled rows (R).

    D and C start with 0: a step without decodes, or without prefill. The table of programs is
    `programs()` for the backbone and `samples` for the sampler; warm-up and dispatch read both.
    """

    decodes: tuple[int, ...]
    chunks: tuple[int, ...]
    samples: tuple[int, ...]

    def __post_init__(self):
        for name in ("decodes", "chunks", "samples"):
            sizes = getattr(self, name)
            if list(sizes) != sorted(set(sizes)):
                raise ValueError(f"{name} must be rising, got {sizes}")
        if self.decodes[0] != 0 or self.chunks[0] != 0:
            raise ValueError("decodes and chunks must begin with 0")

    def programs(self) -> Iterator[tuple[int, int]]:
        """Every (D, C) that a step can be padded to, largest first."""
        for chunk in reversed(self.chunks):
            for decode in reversed(self.decodes):
                if decode or chunk:
                    yield decode, chunk

    def pick(self, num_decodes: int, num_chunk_tokens: int) -> tuple[int, int]:
        return _round_up(self.decodes, num_decodes), _round_up(self.chunks, num_chunk_tokens)

    def pick_samples(self, num_samples: int) -> int:
        return _round_up(self.samples, num_samples)


def _round_up(sizes: tuple[int, ...], size: int) -> int:
    return sizes[bisect.bisect_left(sizes, size)]


def rising_sizes(smallest: int, largest: int, *, finer_above: int) -> tuple[int, ...]:
    """Sizes from `smallest` to `largest`: doubling up to `finer_above`, then in steps of a half.

    Powers of two at the top would waste up to half of the step.
    """
    sizes = []
    size = smallest
    while size < largest:
        sizes.append(size)
        if size >= finer_above and 3 * size // 2 < largest:
            sizes.append(3 * size // 2)
        size *= 2
    return (*sizes, largest)


def make_buckets(*, max_num_seqs: int, max_num_batched_tokens: int) -> Buckets:
    """Default sizes for these limits."""
    rows = rising_sizes(1, max_num_seqs, finer_above=16)
    chunks = rising_sizes(min(16, max_num_batched_tokens), max_num_batched_tokens, finer_above=64)
    return Buckets(decodes=(0, *rows), chunks=(0, *chunks), samples=rows)
