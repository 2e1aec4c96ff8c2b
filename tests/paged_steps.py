"""Steps of a paged batch, laid out by hand: which tokens run, and where their blocks lie."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# One size for every step, so that one program runs them all. Padding is always there.
MAX_BLOCKS = 8  # of one sequence, B
DECODE_ROWS = 4  # D
CHUNK_ROWS = 4
CHUNK_TOKENS = 24  # C
NUM_ROWS = DECODE_ROWS + CHUNK_ROWS  # S
NUM_TOKENS = DECODE_ROWS + CHUNK_TOKENS  # T


class Row(NamedTuple):
    """`count` tokens of a sequence, from position `start` on."""

    sequence: int
    start: int
    count: int

    def positions(self) -> range:
        return range(self.start, self.start + self.count)


class Rows(NamedTuple):
    """What one step runs: rows of one token, then chunks."""

    decodes: tuple[Row, ...]
    chunks: tuple[Row, ...]

    @classmethod
    def prefill(cls, *lengths: int) -> "Rows":
        return cls((), tuple(Row(i, 0, length) for i, length in enumerate(lengths)))

    def all(self) -> tuple[Row, ...]:
        return self.decodes + self.chunks


class Attn(NamedTuple):
    """AttentionMetadata, as the scheduler fills it."""

    slot_mapping: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    query_start_loc: np.ndarray
    num_decodes: np.ndarray
    num_seqs: np.ndarray


class PagedStep(NamedTuple):
    """A step's metadata, and where its real tokens stand among the padded ones."""

    attn: Attn
    token_places: np.ndarray  # of the tokens of `Rows.all()`, in order
    positions: np.ndarray  # [T], 0 for padding

    def spread(self, real: np.ndarray) -> np.ndarray:
        """Put one value a real token at its place among T; padding is 0."""
        padded = np.zeros((NUM_TOKENS, *real.shape[1:]), real.dtype)
        padded[self.token_places] = real
        return padded


def random_rows(lengths: Sequence[int], *, seed: int) -> Iterator[Rows]:
    """Steps that run every sequence to its end in chunks of random size, some of one token."""
    rng = np.random.default_rng(seed)
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        rows = []
        for sequence, length in enumerate(lengths):
            count = min(int(rng.choice([0, 1, 1, 2, 5])), length - done[sequence])
            if count:
                rows.append(Row(sequence, done[sequence], count))
                done[sequence] += count
        if rows:
            one = tuple(row for row in rows if row.count == 1)
            yield Rows(one, tuple(row for row in rows if row.count > 1))


def paged_step(rows: Rows, *, num_groups: int, block_size: int) -> PagedStep:
    """Lay out one step. Sequence s owns blocks `1 + s * MAX_BLOCKS ...`, shuffled by group."""
    num_chunk_tokens = sum(row.count for row in rows.chunks)
    assert len(rows.decodes) < DECODE_ROWS
    assert len(rows.chunks) < CHUNK_ROWS
    assert num_chunk_tokens < CHUNK_TOKENS

    block_tables = np.zeros((num_groups, NUM_ROWS, MAX_BLOCKS), np.int32)
    slot_mapping = np.zeros((num_groups, NUM_TOKENS), np.int32)
    seq_lens = np.zeros(NUM_ROWS, np.int32)
    query_start_loc = np.full(NUM_ROWS + 1, DECODE_ROWS + num_chunk_tokens, np.int32)
    query_start_loc[: DECODE_ROWS + 1] = np.arange(DECODE_ROWS + 1)
    positions = np.zeros(NUM_TOKENS, np.int32)
    token_places = []

    ends = itertools.accumulate((row.count for row in rows.chunks), initial=DECODE_ROWS)
    starts = [*range(len(rows.decodes)), *list(ends)[:-1]]
    row_numbers = [*range(len(rows.decodes)), *range(DECODE_ROWS, DECODE_ROWS + len(rows.chunks))]
    for row, number, start in zip(rows.all(), row_numbers, starts, strict=True):
        places = np.arange(start, start + row.count)
        query_start_loc[number] = start
        seq_lens[number] = row.start + row.count
        positions[places] = row.positions()
        token_places.extend(places)
        for group in range(num_groups):
            table = _blocks(row.sequence, group)
            block_tables[group, number] = table
            at = positions[places]
            slot_mapping[group, places] = table[at // block_size] * block_size + at % block_size
    num_decodes, num_seqs = len(rows.decodes), len(rows.all())
    attn = Attn(
        slot_mapping,
        block_tables,
        seq_lens,
        query_start_loc,
        np.int32(num_decodes),
        np.int32(num_seqs),
    )
    return PagedStep(attn, np.array(token_places), positions)


def _blocks(sequence: int, group: int) -> np.ndarray:
    """int32[MAX_BLOCKS]: the sequence's blocks in a group, in no tidy order."""
    own = 1 + sequence * MAX_BLOCKS + np.arange(MAX_BLOCKS)
    return np.random.default_rng([sequence, group]).permutation(own).astype(np.int32)
