"""The brain of paged-jax: continuous batching and the block pool, in plain Python and NumPy."""

from scheduler.batch import (
    AttentionMetadata,
    Batch,
    PenaltyMetadata,
    SamplingMetadata,
    make_batch,
)
from scheduler.block_pool import BlockPool
from scheduler.buckets import Buckets, make_buckets
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestError
from scheduler.output import (
    BlockCopy,
    BlockMoves,
    Scheduled,
    SchedulerOutput,
    SequenceUpdate,
)
from scheduler.policy import ORDER_POLICIES, OrderPolicy
from scheduler.request import FinishReason, Request, Sequence, Status, derive_seed
from scheduler.sampling_params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step_log import ReplayError, StepLog, replay
from scheduler.step_record import StepRecord, StepTotals, record_step
from scheduler.structured_outputs import StructuredOutputs

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "ORDER_POLICIES",
    "AttentionMetadata",
    "Batch",
    "BlockCopy",
    "BlockMoves",
    "BlockPool",
    "Buckets",
    "FinishReason",
    "OrderPolicy",
    "PenaltyMetadata",
    "ReplayError",
    "Request",
    "RequestError",
    "SamplingMetadata",
    "SamplingParams",
    "Scheduled",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "Sequence",
    "SequenceUpdate",
    "Status",
    "StepLog",
    "StepRecord",
    "StepTotals",
    "StructuredOutputs",
    "derive_seed",
    "make_batch",
    "make_buckets",
    "record_step",
    "replay",
]
