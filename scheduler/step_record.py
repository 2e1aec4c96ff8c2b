"""What one step did, as a frozen value: the operator's metrics and replays read these."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from scheduler.output import SchedulerOutput
from scheduler.scheduler import Scheduler

STEP_KINDS = ("decode", "prefill", "mixed", "move")
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens


@dataclass(frozen=True)
class StepRecord:
    """One step. Rows and tokens as scheduled; blocks and queue as they were after scheduling.

    `num_slots` is `max_num_seqs`, `num_padded_tokens` what the program computed beside the real
    ones; `capacity_tokens` and `wasted_tokens` speak of the blocks that running sequences hold.
    """

    step_id: int
    num_decodes: int
    num_chunks: int
    num_tokens: int
    num_padded_tokens: int
    num_sampled: int
    num_slots: int
    num_running: int
    num_waiting: int
    blocks_referenced: int
    blocks_cached: int
    blocks_free: int
    capacity_tokens: int
    wasted_tokens: int
    num_preempted: int
    num_copies: int
    num_swap_outs: int
    num_swap_ins: int
    host_s: float = 0.0
    device_s: float = 0.0

    @property
    def kind(self) -> str:
        """`decode`: one-token rows only; `prefill`: chunks only; `mixed`; `move`: only copies."""
        if self.num_chunks:
            return "mixed" if self.num_decodes else "prefill"
        return "decode" if self.num_decodes else "move"

    @property
    def occupancy(self) -> float:
        """Share of the slots that do work in this step."""
        return (self.num_decodes + self.num_chunks) / self.num_slots

    @property
    def block_utilization(self) -> float:
        """Share of the token slots in held blocks that hold a token."""
        if not self.capacity_tokens:
            return 1.0
        return 1.0 - self.wasted_tokens / self.capacity_tokens


def record_step(
    scheduler: Scheduler,
    output: SchedulerOutput,
    *,
    num_padded_tokens: int = 0,
    host_s: float = 0.0,
    device_s: float = 0.0,
) -> StepRecord:
    """The record of a step that was just scheduled."""
    capacity = sum(s.capacity for s in scheduler.running)
    used = sum(s.num_computed_tokens for s in scheduler.running)
    pools = scheduler.pools
    return StepRecord(
        step_id=output.step_id,
        num_decodes=len(output.decodes),
        num_chunks=len(output.chunks),
        num_tokens=output.num_tokens,
        num_padded_tokens=num_padded_tokens,
        num_sampled=len(output.samples),
        num_slots=scheduler.config.max_num_seqs,
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        blocks_referenced=sum(pool.num_referenced for pool in pools),
        blocks_cached=sum(pool.num_cached for pool in pools),
        blocks_free=sum(pool.num_available - pool.num_cached for pool in pools),
        capacity_tokens=capacity,
        wasted_tokens=capacity - used,
        num_preempted=len(output.preempted),
        num_copies=len(output.moves.copies),
        num_swap_outs=len(output.moves.swap_outs),
        num_swap_ins=len(output.moves.swap_ins),
        host_s=host_s,
        device_s=device_s,
    )


class StepTotals:
    """Running sums over step records; means are over steps."""

    def __init__(self):
        self.num_steps = 0
        self.num_tokens = 0
        self.num_padded_tokens = 0
        self.num_preempted = 0
        self.num_copies = 0
        self.num_swap_outs = 0
        self.num_swap_ins = 0
        self.steps_by_kind = dict.fromkeys(STEP_KINDS, 0)
        self._steps_by_size = [0] * (len(STEP_SIZES) + 1)
        self.host_s = 0.0
        self.device_s = 0.0
        self._occupancy = 0.0
        self._block_utilization = 0.0

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_tokens += record.num_tokens
        self.num_padded_tokens += record.num_padded_tokens
        self.num_preempted += record.num_preempted
        self.num_copies += record.num_copies
        self.num_swap_outs += record.num_swap_outs
        self.num_swap_ins += record.num_swap_ins
        self.steps_by_kind[record.kind] += 1
        self._steps_by_size[bisect_left(STEP_SIZES, record.num_tokens)] += 1
        self.host_s += record.host_s
        self.device_s += record.device_s
        self._occupancy += record.occupancy
        self._block_utilization += record.block_utilization

    @property
    def steps_by_size(self) -> Mapping[int, int]:
        """For each of STEP_SIZES how many steps computed at most that many tokens."""
        return dict(zip(STEP_SIZES, accumulate(self._steps_by_size), strict=False))

    @property
    def mean_occupancy(self) -> float:
        return self._occupancy / max(1, self.num_steps)

    @property
    def mean_block_utilization(self) -> float:
        return self._block_utilization / max(1, self.num_steps)
