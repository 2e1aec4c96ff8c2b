"""Where traces are run, as the comparisons see it: with a model, or with the scheduler alone."""

import contextlib
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

from paged_jax.bench.drive import Run
from paged_jax.bench.trace import Trace
from paged_jax.config import EngineConfig
from scheduler import SchedulerConfig

__all__ = ["Bed", "Measured", "Prepared", "described", "sized_for"]


class Measured(NamedTuple):
    """One run and what is said of it."""

    run: Run
    figures: dict[str, Any]


class Prepared(Protocol):
    """An engine that has nothing more to compile; may be measured several times."""

    def measure(self, trace: Trace, *, label: str, arrivals: bool = False) -> Measured: ...


class Bed(Protocol):
    """Prepares engines, one after the other."""

    name: str

    def engine(self, config: EngineConfig) -> contextlib.AbstractContextManager[Prepared]:
        """An engine of this configuration, gone when the context is left."""
        ...


def sized_for(config: EngineConfig, trace: Trace) -> EngineConfig:
    """The configuration with what it leaves open: sequences as long as the trace's longest, and
    a pool in which every slot could hold one of them, its margin for the running included.
    """
    max_model_len = config.max_model_len or trace.longest
    num_blocks = config.num_blocks
    if num_blocks is None:
        usable = config.max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = math.ceil(usable / (1 - SchedulerConfig.watermark)) + 1
    return dataclasses.replace(config, max_model_len=max_model_len, num_blocks=num_blocks)


def described(config: EngineConfig, effective: SchedulerConfig) -> dict[str, Any]:
    """The configuration as it came out: with the sizes that it had left open."""
    return {
        **dataclasses.asdict(config),
        "max_model_len": effective.max_model_len,
        "num_blocks": effective.num_blocks[0],
        "max_num_batched_tokens": effective.max_num_batched_tokens,
    }
