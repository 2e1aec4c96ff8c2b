"""The scheduler alone: every step is decided, none is computed.

Steps, occupancy, padding and blocks are those of the engine; there are no times.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence

from paged_jax.bench.beds import Measured, described
from paged_jax.bench.drive import drive
from paged_jax.bench.figures import scheduling_figures
from paged_jax.bench.trace import Trace
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError, RequestError
from paged_jax.plan import DEFAULT_BATCHED_TOKENS, MAX_NUM_CHUNKS
from scheduler import (
    ORDER_POLICIES,
    Buckets,
    OrderPolicy,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceUpdate,
    StepRecord,
    make_buckets,
    record_step,
)

__all__ = ["SimulatedBed", "Simulation"]

TOKEN = 0  # what the model that is not there always says
IDLE_S = 0.001  # that pass while a static batch waits to fill


class SimulatedBed:
    """Simulations of the engine's configurations; sizes left open are those of a CPU."""

    name = "simulated"

    @contextlib.contextmanager
    def engine(self, config: EngineConfig) -> Iterator["PreparedSimulation"]:
        """`config` names max_model_len and num_blocks: there is no model to ask."""
        if config.kv_offload or config.preemption_mode == "swap":
            raise ConfigError(
                "a simulation does not know how many bytes a block has, so that kv_offload and "
                "preemption_mode=swap need a model"
            )
        assert config.max_model_len is not None and config.num_blocks is not None
        batched = config.max_num_batched_tokens or max(
            config.max_num_seqs, DEFAULT_BATCHED_TOKENS["cpu"]
        )
        scheduler_config = SchedulerConfig(
            block_size=config.block_size,
            num_blocks=(config.num_blocks,),
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=batched,
            max_num_chunks=MAX_NUM_CHUNKS,
            enable_prefix_caching=config.enable_prefix_caching,
            prefill=config.prefill,
            batching=config.batching,
            allocation=config.allocation,
        )
        yield PreparedSimulation(config, scheduler_config)


class PreparedSimulation:
    """What a trace is run on; each time on a new scheduler."""

    def __init__(self, config: EngineConfig, scheduler_config: SchedulerConfig):
        self._config = config
        self._scheduler_config = scheduler_config

    def measure(self, trace: Trace, *, label: str, arrivals: bool = False) -> Measured:
        """Schedule the trace to its end, everything at once."""
        del label
        if arrivals:
            raise ConfigError("a simulated step takes no time, so that arrivals mean nothing")
        config = self._scheduler_config
        simulation = Simulation(
            config,
            make_buckets(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
            ),
            order=ORDER_POLICIES[self._config.scheduling_policy](),
            lag=1 if self._config.overlap else 0,
        )
        run = drive(simulation, trace.requests)
        figures = {
            **scheduling_figures(run, config),
            "simulated": True,
            "config": described(self._config, config),
        }
        return Measured(run, figures)


class Simulation:
    """An engine without a model. `lag` is the number of steps dispatched ahead of an update."""

    def __init__(self, config: SchedulerConfig, buckets: Buckets, *, order: OrderPolicy, lag: int):
        self._config = config
        self._buckets = buckets
        self._lag = lag
        self._now = 0.0
        self.scheduler = Scheduler(config, order, clock=lambda: self._now)
        self.records: deque[StepRecord] = deque(maxlen=1)
        self._pending: deque[tuple[SchedulerOutput, StepRecord]] = deque()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._pending)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> Request:
        """Queue a request; RequestError if it can never be served."""
        assert params.max_tokens is not None
        num_tokens = len(prompt_token_ids) + params.max_tokens
        if num_tokens > self._config.max_model_len:
            raise RequestError(
                f"{num_tokens} tokens, where max_model_len is {self._config.max_model_len}",
                param="max_tokens",
            )
        limit = min(num_tokens, self._config.capacity_tokens + 1)
        request = Request(request_id, prompt_token_ids, params, seed=0, max_total_tokens=limit)
        self.scheduler.add(request)
        return request

    def step(self) -> list[SequenceUpdate]:
        """Schedule a step, and take in one that came before it, as the engine does."""
        output = self.scheduler.schedule()
        if not output.is_empty:
            padding = self._num_padded_tokens(output)
            record = record_step(self.scheduler, output, num_padded_tokens=padding)
            self._pending.append((output, record))
        elif not self._pending:
            self._now += IDLE_S
        if len(self._pending) > self._lag or (output.is_empty and self._pending):
            output, record = self._pending.popleft()
            self.records.append(record)
            return self.scheduler.update(output, [TOKEN] * len(output.samples))
        return []

    def _num_padded_tokens(self, output: SchedulerOutput) -> int:
        if not output.num_tokens:
            return 0
        num_decodes = len(output.decodes)
        if num_decodes and not output.chunks and self._config.batching == "static":
            num_decodes = max(num_decodes, output.num_slots_held)  # ended members still compute
        return self._buckets.num_tokens(num_decodes, output.num_chunk_tokens) - output.num_tokens
