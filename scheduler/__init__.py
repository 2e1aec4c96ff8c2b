"""The brain of paged-jax: continuous batching and the block pool, in plain Python and NumPy."""

from scheduler.batch import AttentionMetadata, Batch, SamplingMetadata, make_batch
from scheduler.block_pool import BlockPool
from scheduler.buckets import Buckets, make_buckets
from scheduler.config import SchedulerConfig
from scheduler.errors import RequestError
from scheduler.output import Scheduled, SchedulerOutput, SequenceUpdate
from scheduler.policy import ORDER_POLICIES, OrderPolicy
from scheduler.request import FinishReason, Request, Sequence, Status, derive_seed
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.step_record import StepRecord, StepTotals, record_step

__all__ = [
    "ORDER_POLICIES",
    "AttentionMetadata",
    "Batch",
    "BlockPool",
    "Buckets",
    "FinishReason",
    "OrderPolicy",
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
    "StepRecord",
    "StepTotals",
    "derive_seed",
    "make_batch",
    "make_buckets",
    "record_step",
]
