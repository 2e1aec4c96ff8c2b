"""The engine's figures: what it counts itself, and the whole as an operator sees it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from paged_jax.compiling import Compiling
from paged_jax.config import EngineConfig
from scheduler import Scheduler, StepTotals

__all__ = ["EngineCounters", "EngineStats", "make_stats"]


@dataclass(frozen=True)
class EngineStats:
    """The engine as an operator sees it. Counters only rise; gauges are of the last step.

    `num_blocks` includes the null block, `num_host_blocks` are those that can be used. The
    device's blocks are those of the layers with full attention, where there are some: they are
    what runs out; layers with a sliding window have few of their own.
    `num_swaps` counts sequences, `num_swap_outs`, `num_swap_ins` and `num_copies` blocks.
    `params_number` counts the updates of the weights; the bytes are those on each
    device now.
    `steps_by_size` says how many steps computed at most that many tokens.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    block_size: int
    blocks_in_use: int
    blocks_cached: int
    max_num_seqs: int
    num_steps: int
    num_requests: int
    prompt_tokens: int
    generation_tokens: int
    scheduled_tokens: int
    padded_tokens: int
    preemptions: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    compiles: int
    compile_s: float
    late_compiles: int
    mean_occupancy: float
    mean_block_utilization: float
    host_s: float
    device_s: float
    num_swaps: int
    num_swap_outs: int
    num_swap_ins: int
    num_copies: int
    num_host_blocks: int
    host_blocks_in_use: int
    host_blocks_cached: int
    compile_cache_hits: int
    params_number: int
    weight_bytes: int
    kv_cache_bytes: int
    steps_by_kind: Mapping[str, int]
    steps_by_size: Mapping[int, int]
    num_failed_steps: int

    @classmethod
    def empty(cls, config: EngineConfig) -> Self:
        """The figures of an engine that has done nothing yet."""
        zeros: dict[str, Any] = dict.fromkeys((f.name for f in dataclasses.fields(cls)), 0)
        none = StepTotals()
        return cls(
            **zeros
            | {
                "block_size": config.block_size,
                "steps_by_kind": none.steps_by_kind,
                "steps_by_size": none.steps_by_size,
            }
        )

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pool's blocks that are held; cached ones count as free."""
        return self.blocks_in_use / max(1, self.num_blocks - 1)


@dataclass
class EngineCounters:
    """What nobody but the engine counts. They only rise; its thread owns them."""

    num_requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    params_number: int = 0
    num_failed_steps: int = 0


def make_stats(
    config: EngineConfig,
    scheduler: Scheduler,
    totals: StepTotals,
    counters: EngineCounters,
    compiling: Compiling,
    *,
    weight_bytes: int,
    kv_cache_bytes: int,
) -> EngineStats:
    """Gathered from those who know; frozen, so that any thread may look at it."""
    windows = scheduler.config.windows
    pool = scheduler.pools[windows.index(None) if None in windows else 0]
    host_pools = scheduler.blocks.host_pools
    return EngineStats(
        **dataclasses.asdict(counters),
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting,
        num_blocks=pool.num_blocks,
        block_size=config.block_size,
        blocks_in_use=pool.num_referenced,
        blocks_cached=pool.num_cached,
        max_num_seqs=config.max_num_seqs,
        num_steps=totals.num_steps,
        scheduled_tokens=totals.num_tokens,
        padded_tokens=totals.num_padded_tokens,
        preemptions=scheduler.num_preemptions,
        prefix_lookup_tokens=scheduler.num_lookup_tokens,
        prefix_hit_tokens=scheduler.num_hit_tokens,
        compiles=compiling.counter.num_compiles,
        compile_s=compiling.counter.compile_s,
        late_compiles=compiling.num_late,
        mean_occupancy=totals.mean_occupancy,
        mean_block_utilization=totals.mean_block_utilization,
        host_s=totals.host_s,
        device_s=totals.device_s,
        num_swaps=scheduler.num_swaps,
        num_swap_outs=totals.num_swap_outs,
        num_swap_ins=totals.num_swap_ins,
        num_copies=totals.num_copies,
        num_host_blocks=sum(pool.num_blocks - 1 for pool in host_pools),
        host_blocks_in_use=sum(pool.num_referenced for pool in host_pools),
        host_blocks_cached=sum(pool.num_cached for pool in host_pools),
        compile_cache_hits=compiling.counter.num_cache_hits,
        weight_bytes=weight_bytes,
        kv_cache_bytes=kv_cache_bytes,
        steps_by_kind=dict(totals.steps_by_kind),
        steps_by_size=totals.steps_by_size,
    )
