"""Batch rows: what the step program needs to know of each running sequence, as arrays."""

import heapq

import numpy as np

from scheduler.request import Sequence


class Rows:
    """`max_num_seqs` rows, each lent to one running sequence.

    Keeps the block tables and the sampling fields by row, so that a batch is gathered with one
    index an array. The lowest free row is lent first.
    """

    def __init__(self, max_num_seqs: int, num_groups: int, table_width: int):
        self.tables = np.zeros((num_groups, max_num_seqs, table_width), np.int32)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.seeds = np.zeros((max_num_seqs, 2), np.uint32)
        self.adapter_ids = np.zeros(max_num_seqs, np.int32)
        self._free = list(range(max_num_seqs))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def lend(self, sequence: Sequence) -> None:
        """Give the sequence a row and fill it; its blocks so far go into the table."""
        row = heapq.heappop(self._free)
        sequence.row = row
        self.tables[:, row] = 0
        for group, blocks in enumerate(sequence.blocks):
            self.tables[group, row, : len(blocks)] = blocks
        params = sequence.request.params
        self.temperature[row] = params.temperature
        self.top_k[row] = max(params.top_k, 0)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.seeds[row] = sequence.seed & 0xFFFFFFFF, sequence.seed >> 32
        self.adapter_ids[row] = sequence.request.adapter_id

    def take_back(self, sequence: Sequence) -> None:
        heapq.heappush(self._free, sequence.row)
        sequence.row = -1

    def check_invariants(self, running: list[Sequence]) -> None:
        lent = [s.row for s in running]
        assert sorted(lent + self._free) == list(range(len(self.temperature))), "rows are lost"
        for sequence in running:
            for group, blocks in enumerate(sequence.blocks):
                table = self.tables[group, sequence.row]
                assert table[: len(blocks)].tolist() == blocks, f"stale table of {sequence}"
                assert not table[len(blocks) :].any(), f"ids past the end of {sequence}"
