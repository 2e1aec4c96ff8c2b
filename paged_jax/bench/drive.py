"""Runs a trace through an engine, or what stands in for one, and notes what happened when."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paged_jax.bench.trace import TraceRequest
from paged_jax.errors import RequestError
from scheduler import (
    FinishReason,
    Request,
    SamplingParams,
    Scheduler,
    SequenceUpdate,
    StepRecord,
)

__all__ = ["Driven", "Run", "Served", "drive", "greedy"]


class Driven(Protocol):
    """The part of an engine that a trace needs: `paged_jax.Engine` and `Simulation` have it."""

    scheduler: Scheduler
    records: deque[StepRecord]

    @property
    def has_unfinished(self) -> bool: ...

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> Request: ...

    def step(self) -> list[SequenceUpdate]: ...


@dataclass
class Served:
    """One request as it was served; times in seconds since it arrived, steps since the start."""

    num_prompt_tokens: int
    arrival_s: float
    num_output_tokens: int = 0
    first_s: float = 0.0
    first_step: int = 0
    last_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A whole trace, served. `static_batches` holds the members of each batch that a static
    scheduler formed, as indices into `requests`; the counters are those of this run alone.
    """

    seconds: float
    records: tuple[StepRecord, ...]
    requests: tuple[Served, ...]
    static_batches: tuple[tuple[int, ...], ...]
    num_preemptions: int
    num_lookup_tokens: int
    num_hit_tokens: int


def greedy(max_tokens: int) -> SamplingParams:
    """Always the likeliest token, up to the limit: every engine then does the same work."""
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)


def drive(
    engine: Driven,
    requests: Sequence[TraceRequest],
    *,
    arrivals: bool = False,
    advance: Callable[[int], None] = lambda amount: None,
) -> Run:
    """Serve the requests, all at once or when they arrive; `advance` hears of the output tokens.

    The engine has nothing else to do. Raises RequestError if it refuses a request or ends one
    before its last token: nothing would have been measured.
    """
    scheduler = engine.scheduler
    before = (scheduler.num_preemptions, scheduler.num_lookup_tokens, scheduler.num_hit_tokens)
    served = [Served(r.num_prompt_tokens, r.arrival_s if arrivals else 0.0) for r in requests]
    index_of: dict[str, int] = {}
    due = deque(enumerate(requests))
    records: list[StepRecord] = []
    batches = _StaticBatches(scheduler)
    last_step_id = engine.records[-1].step_id if engine.records else -1

    began = time.perf_counter()
    while due or engine.has_unfinished:
        now = time.perf_counter() - began
        while due and (not arrivals or due[0][1].arrival_s <= now):
            index, request = due.popleft()
            index_of[f"bench-{index}"] = index
            _add(engine, index, request)
        if not engine.has_unfinished:
            time.sleep(max(0.0, due[0][1].arrival_s - now))
            continue
        batches.before_step()
        updates = engine.step()
        batches.after_step(updates)
        if engine.records and engine.records[-1].step_id != last_step_id:
            records.append(engine.records[-1])
            last_step_id = records[-1].step_id
        now = time.perf_counter() - began
        for update in updates:
            _note(served[index_of[update.sequence.request.request_id]], update, now, len(records))
        advance(sum(update.token_id is not None for update in updates))
    seconds = time.perf_counter() - began

    for request, one in zip(requests, served, strict=True):
        if one.num_output_tokens != request.max_tokens:
            raise RequestError(
                f"request {request.id} of the trace ended after {one.num_output_tokens} of "
                f"{request.max_tokens} tokens: the KV cache or max_model_len is too small for it"
            )
    after = (scheduler.num_preemptions, scheduler.num_lookup_tokens, scheduler.num_hit_tokens)
    return Run(
        seconds,
        tuple(records),
        tuple(served),
        batches.members(index_of),
        *(b - a for a, b in zip(before, after, strict=True)),
    )


def _add(engine: Driven, index: int, request: TraceRequest) -> None:
    params = greedy(request.max_tokens)
    try:
        engine.add_request(f"bench-{index}", request.prompt_token_ids, params)
    except RequestError as error:
        raise RequestError(f"request {request.id} of the trace: {error}") from error


def _note(one: Served, update: SequenceUpdate, now: float, num_steps: int) -> None:
    if update.finish_reason is FinishReason.ERROR:
        request_id = update.sequence.request.request_id
        raise RequestError(f"{request_id} ended with an error: its logits were not finite")
    if update.token_id is None:
        return
    at = now - one.arrival_s
    if one.num_output_tokens:
        one.gaps_s.append(at - one.last_s)
    else:
        one.first_s, one.first_step = at, num_steps
    one.last_s = at
    one.num_output_tokens += 1


class _StaticBatches:
    """Which requests a static scheduler served together, seen from outside.

    A batch begins when somebody is admitted while nobody runs.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler
        self._watching = scheduler.config.batching == "static"
        self._nobody_ran = True
        self._seen: set[str] = set()
        self._batches: list[list[str]] = []

    def before_step(self) -> None:
        if self._watching:
            self._nobody_ran = not self._scheduler.running

    def after_step(self, updates: Sequence[SequenceUpdate]) -> None:
        """A member whose only token came at once has left again, but is in the updates."""
        if not self._watching:
            return
        sequences = [*self._scheduler.running, *(update.sequence for update in updates)]
        admitted = {sequence.request.request_id for sequence in sequences} - self._seen
        if admitted:
            if self._nobody_ran:
                self._batches.append([])
            self._batches[-1] += sorted(admitted)
            self._seen |= admitted

    def members(self, index_of: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(index_of[request_id] for request_id in b) for b in self._batches)
