"""What `schedule` decides and `update` reports: values between scheduler and engine."""

from dataclasses import dataclass, field
from typing import NamedTuple

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
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_chunk_tokens

    @property
    def num_chunk_tokens(self) -> int:
        return sum(s.num_tokens for s in self.chunks)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks


class SequenceUpdate(NamedTuple):
    """What a finished step brought to a sequence: at most one token, and perhaps its end.

    `stop_reason` is the stop token id when one of the request's own ended the sequence.
    """

    sequence: Sequence
    token_id: int | None
    finish_reason: FinishReason | None
    stop_reason: int | None = None


@dataclass
class InFlight:
    """A dispatched step whose result the host has not read; blocks it may write stay held."""

    output: SchedulerOutput
    released: list[tuple[int, list[int]]] = field(default_factory=list)
