"""`paged-jax bench host`: what the scheduler itself costs, without a model and without JAX.

A step is schedule + make_batch + update. It must not grow with the queue or with the pool, and
adding and aborting a request must cost the same however many there are.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from paged_jax.bench.drive import greedy
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import Table, show
from scheduler import (
    Buckets,
    Request,
    Scheduler,
    SchedulerConfig,
    make_batch,
    make_buckets,
    record_step,
)

__all__ = ["add_and_abort", "run_host", "running_scheduler", "scheduler_cost", "timed_step"]

CONTEXT_LEN, BLOCK_SIZE = 1000, 16
PARTS = ("schedule", "make_batch", "record", "update")
TOKENS_A_STEP = 2048
ROOM_TO_GROW = 1000  # output tokens: nobody ends while it is measured
# (running, waiting, blocks); the smallest pool that holds 256 sequences, and one far larger.
BIG, SMALL = 256, 8
CASES = (
    (BIG, 0, 32_001),
    (BIG, 1_000, 32_001),
    (BIG, 10_000, 32_001),
    (SMALL, 0, 1_001),
    (SMALL, 0, 100_001),
)
QUEUES = (0, 1_000, 10_000)


def run_host(*, steps: int, json_path: str | None) -> int:
    """Measure, print and write; returns the exit code."""
    require_writable(json_path)
    about = environment()
    costs = [
        scheduler_cost(running, waiting, blocks, steps=steps) for running, waiting, blocks in CASES
    ]
    queues = [add_and_abort(waiting) for waiting in QUEUES]
    title = f"The scheduler's own time a step, sequences of {CONTEXT_LEN} tokens, medians in ms"
    show(_cost_table(costs, title))
    show(_queue_table(queues))
    write_json(json_path, {"environment": about, "steps": costs, "queue": queues})
    return 0


def scheduler_cost(
    num_running: int, num_waiting: int, num_blocks: int, *, steps: int
) -> dict[str, Any]:
    """Milliseconds of the parts of a decode step, medians over `steps`, and of all together.

    `step_ms` is schedule + make_batch + update; `record_ms`, what the engine's metrics take, is
    told apart.
    """
    scheduler, buckets = running_scheduler(num_running, num_waiting, num_blocks)
    taken = [timed_step(scheduler, buckets) for _ in range(steps)]
    parts = {
        f"{part}_ms": 1000 * statistics.median(column)
        for part, column in zip(PARTS, zip(*taken, strict=True), strict=True)
    }
    whole = [sum(times) - times[PARTS.index("record")] for times in taken]
    return {
        "num_running": num_running,
        "num_waiting": num_waiting,
        "num_blocks": num_blocks,
        "step_ms": 1000 * statistics.median(whole),
        "step_p99_ms": 1000 * statistics.quantiles(whole, n=100)[98],
        **parts,
    }


def running_scheduler(
    num_running: int, num_waiting: int, num_blocks: int
) -> tuple[Scheduler, Buckets]:
    """A scheduler whose every slot decodes, with a queue behind, and its step sizes."""
    config = _config(num_running, num_blocks)
    scheduler = Scheduler(config)
    for i in range(num_running):
        scheduler.add(_request(i, CONTEXT_LEN))
    while scheduler.num_waiting or any(
        s.num_computed_tokens < CONTEXT_LEN for s in scheduler.running
    ):
        output = scheduler.schedule()
        scheduler.update(output, [0] * len(output.samples))
    for i in range(num_waiting):
        scheduler.add(_request(num_running + i, 100))
    buckets = make_buckets(
        max_num_seqs=num_running, max_num_batched_tokens=config.max_num_batched_tokens
    )
    return scheduler, buckets


def _config(num_running: int, num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_blocks=(num_blocks,),
        max_model_len=CONTEXT_LEN + ROOM_TO_GROW,
        max_num_seqs=num_running,
        max_num_batched_tokens=TOKENS_A_STEP,
    )


def _request(number: int, num_tokens: int) -> Request:
    """No two share a block: the first token differs."""
    return Request(
        f"r{number}",
        [number, *range(1, num_tokens)],
        greedy(ROOM_TO_GROW),
        seed=0,
        max_total_tokens=num_tokens + ROOM_TO_GROW,
    )


def timed_step(scheduler: Scheduler, buckets: Buckets) -> tuple[float, ...]:
    """Seconds of each of PARTS."""
    times = [time.perf_counter()]
    output = scheduler.schedule()
    times.append(time.perf_counter())
    num_decodes, num_chunk_tokens = buckets.pick(len(output.decodes), output.num_chunk_tokens)
    make_batch(
        output,
        scheduler.rows,
        block_size=BLOCK_SIZE,
        num_decode_rows=num_decodes,
        num_chunk_rows=scheduler.config.max_num_chunks,
        num_chunk_tokens=num_chunk_tokens,
        num_sample_rows=buckets.pick_samples(len(output.samples)),
    )
    times.append(time.perf_counter())
    record_step(scheduler, output)
    times.append(time.perf_counter())
    scheduler.update(output, [0] * len(output.samples))
    times.append(time.perf_counter())
    return tuple(b - a for a, b in itertools.pairwise(times))


def add_and_abort(num_waiting: int, *, count: int = 200) -> dict[str, Any]:
    """Microseconds that adding and aborting one request take while so many wait; medians."""
    scheduler = Scheduler(_config(SMALL, 1_001))
    for i in range(num_waiting):
        scheduler.add(_request(i, 100))
    requests = [_request(num_waiting + i, 100) for i in range(count)]
    ids = [request.request_id for request in requests]
    return {
        "num_waiting": num_waiting,
        "add_us": 1e6 * statistics.median(_times(scheduler.add, requests)),
        "abort_us": 1e6 * statistics.median(_times(scheduler.abort, ids)),
    }


def _times(call: Callable[[Any], Any], arguments: Sequence[Any]) -> list[float]:
    """Seconds of one call with each of the arguments."""
    seconds = []
    for argument in arguments:
        began = time.perf_counter()
        call(argument)
        seconds.append(time.perf_counter() - began)
    return seconds


def _cost_table(costs: Sequence[dict[str, Any]], title: str) -> Table:
    names = ("step_ms", "step_p99_ms", "schedule_ms", "make_batch_ms", "update_ms", "record_ms")
    rows = tuple(
        (
            f"{one['num_running']:,}",
            f"{one['num_waiting']:,}",
            f"{one['num_blocks'] - 1:,}",
            *(f"{one[name]:.3f}" for name in names),
        )
        for one in costs
    )
    columns = (
        "running",
        "waiting",
        "blocks",
        "step",
        "its p99",
        "schedule",
        "make_batch",
        "update",
        "and the record",
    )
    return Table(title, columns, rows)


def _queue_table(queues: Sequence[dict[str, Any]]) -> Table:
    rows = tuple(
        (f"{one['num_waiting']:,}", f"{one['add_us']:.1f}", f"{one['abort_us']:.1f}")
        for one in queues
    )
    columns = ("waiting", "adding a request", "aborting it")
    return Table("What one request more costs, medians in microseconds", columns, rows)
