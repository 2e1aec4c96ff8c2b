"""What `schedule` decides and `update` reports: values between scheduler and engine."""

from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.block_pool import BlockPool
from scheduler.request import FinishReason, Sequence


class Scheduled(NamedTuple):
    """A sequence in a step: it computes positions `start` to `start + num_tokens`."""

    sequence: Sequence
    row: int
    start: int
    num_tokens: int


class BlockCopy(NamedTuple):
    """Copy one block's content in every layer of a group, before the step writes anything."""

    group: int
    source: int
    target: int


class BlockMoves(NamedTuple):
    """What is copied before a step, in this order: to the host, from the host, on the device."""

    swap_outs: tuple[BlockCopy, ...] = ()  # device block -> host block
    swap_ins: tuple[BlockCopy, ...] = ()  # host block -> device block
    copies: tuple[BlockCopy, ...] = ()  # device block -> device block


class Sampled(NamedTuple):
    """A row of the sampler: `batch_index` points into decodes + chunks."""

    sequence: Sequence
    row: int
    batch_index: int
    position: int


@dataclass(frozen=True)
class SchedulerOutput:
    """One step: who runs how many tokens, who samples, what is copied, who was preempted.

    Members of `decodes` compute one token each; those of `chunks` two or more.
    """

    step_id: int
    decodes: tuple[Scheduled, ...]
    chunks: tuple[Scheduled, ...]
    samples: tuple[Sampled, ...]
    moves: BlockMoves
    preempted: tuple[Sequence, ...] = ()
    started: tuple[Sequence, ...] = ()  # got their row in this step
    num_slots_held: int = 0  # rows that a static batch keeps until its longest member ends

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_chunk_tokens

    @property
    def num_chunk_tokens(self) -> int:
        return sum(s.num_tokens for s in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks and not any(self.moves)


class SequenceUpdate(NamedTuple):
    """What a finished step brought to a sequence: at most one token, and perhaps its end.

    `stop_reason` is the stop token id when one of the request's own ended the sequence;
    `logprobs` and, with a sequence's first update, `prompt_logprobs` are what the engine adds for
    a request that asks for them.
    """

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None
    stop_reason: int | None = None
    logprobs: object = None
    prompt_logprobs: object = None


@dataclass
class InFlight:
    """A dispatched step whose result the host has not read.

    `released` are blocks given back that the step may still write or copy: they stay held until
    its update.
    """

    step_id: int
    released: list[tuple[BlockPool, list[int]]] = field(default_factory=list)

    def release(self) -> None:
        for pool, blocks in self.released:
            pool.release(blocks)
