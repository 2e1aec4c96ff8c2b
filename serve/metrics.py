"""What Prometheus may ask: counts and times of the requests beside the engine's own numbers.

Names, labels and buckets of the shared set are those that routers and dashboards already read.
"""

import asyncio
import functools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from paged_jax import RequestError, SamplingParams
from serve.engine import Choice, Engine, Output
from serve.engine_numbers import OWN_PREFIX, SERVING, EngineNumbers, labels_of
from serve.errors import ABORTS
from serve.gate import Gate
from serve.tracing import Work

LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")

# fmt: off
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)
BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
WHOLE_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
# fmt: on
NUM_TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
NUM_CHOICES = (1, 2, 5, 10, 20)


class Series(NamedTuple):
    """The series of one model, with their labels filled in."""

    time_to_first_token: Histogram
    inter_token_latency: Histogram
    time_per_output_token: Histogram
    e2e_latency: Histogram
    queue_time: Histogram
    prefill_time: Histogram
    decode_time: Histogram
    inference_time: Histogram
    prompt_tokens: Histogram
    generation_tokens: Histogram
    max_num_generation_tokens: Histogram
    params_n: Histogram
    params_max_tokens: Histogram
    finished: Callable[..., Counter]  # by keyword: finished_reason


class Metrics:
    """One engine's metrics in a registry of their own. Lives on the event loop."""

    def __init__(self, engine: Engine, gate: Gate, prefix: str):
        self._engine = engine
        self._gate = gate
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self.unknown_fields = Counter(
            f"{OWN_PREFIX}:unknown_fields",
            "Request fields that nobody knew and that were left aside.",
            registry=self._registry,
        )
        self.responses = Counter(
            f"{OWN_PREFIX}:responses",
            "HTTP responses by their status; probes and scrapes among them.",
            ["status"],
            registry=self._registry,
        )
        self._registry.register(EngineNumbers(engine, gate, prefix))

    def watch(self, params: SamplingParams, num_prompt_tokens: int, arrived: float) -> "Watch":
        """Follow one request that arrived when `time.perf_counter()` was `arrived`."""
        name = self._engine.model_name
        return Watch(self._series, name, params, num_prompt_tokens, arrived)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        if self._gate.state in SERVING:
            _ = self._series  # show zeros before the first request
        return generate_latest(self._registry)

    @functools.cached_property
    def _series(self) -> Series:
        labels = labels_of(self._engine)

        def histogram(name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
            whole = Histogram(
                f"{self._prefix}:{name}", doc, LABELS, buckets=buckets, registry=self._registry
            )
            return whole.labels(**labels)

        finished = Counter(
            f"{self._prefix}:request_success",
            "Choices that ended, by their reason; `abort` is a client that left.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in FINISHED_REASONS:
            finished.labels(**labels, finished_reason=reason)  # show a zero from the start
        return Series(
            histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_S),
            histogram(
                "inter_token_latency_seconds",
                "Output to output of a choice.",
                BETWEEN_TOKENS_S,
            ),
            histogram(
                "request_time_per_output_token_seconds",
                "Mean time per token of a choice, after what came first.",
                BETWEEN_TOKENS_S,
            ),
            histogram("e2e_request_latency_seconds", "Arrival to last token.", WHOLE_REQUEST_S),
            histogram("request_queue_time_seconds", "Until it first ran.", WHOLE_REQUEST_S),
            histogram("request_prefill_time_seconds", "From there to a token.", WHOLE_REQUEST_S),
            histogram("request_decode_time_seconds", "First to last token.", WHOLE_REQUEST_S),
            histogram("request_inference_time_seconds", "Since it first ran.", WHOLE_REQUEST_S),
            histogram("request_prompt_tokens", "Prompt tokens of a request.", NUM_TOKENS),
            histogram(
                "request_generation_tokens", "Output tokens of all samples together.", NUM_TOKENS
            ),
            histogram(
                "request_max_num_generation_tokens",
                "Output tokens of the longest choice.",
                NUM_TOKENS,
            ),
            histogram("request_params_n", "Choices asked for.", NUM_CHOICES),
            histogram("request_params_max_tokens", "Output tokens asked for.", NUM_TOKENS),
            functools.partial(finished.labels, **labels),
        )


@dataclass
class _Pace:
    """When the tokens of one choice came."""

    num_tokens: int = 0
    num_first_tokens: int = 0  # in the first output that had any
    first: float = 0.0
    latest: float = 0.0

    def came(self, num_new: int, now: float) -> None:
        if not self.num_tokens:
            self.first, self.num_first_tokens = now, num_new
        self.num_tokens += num_new
        self.latest = now

    @property
    def mean(self) -> float | None:
        """Seconds per token after the first output; None if nothing came after it."""
        num_later = self.num_tokens - self.num_first_tokens
        return (self.latest - self.first) / num_later if num_later else None


class Watch:
    """Follows one request through the engine; who watches calls `saw` and `ended`."""

    def __init__(
        self,
        series: Series,
        model_name: str,
        params: SamplingParams,
        num_prompt_tokens: int,
        arrived: float,
    ):
        self._series = series
        self._model_name = model_name
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived = arrived
        self._num_open = params.n
        self._finish_reasons: list[str] = []
        self._num_tokens = 0
        self._paces: defaultdict[int, _Pace] = defaultdict(_Pace)
        self._submitted = time.perf_counter()
        self._queue_s = 0.0
        self._first: float | None = None  # when a token first came

    def saw(self, output: Output) -> None:
        now = time.perf_counter()
        if output.num_generated_tokens and self._first is None:
            self._first, self._queue_s = now, output.queue_s
            self._series.time_to_first_token.observe(now - self._arrived)
        self._num_tokens = output.num_generated_tokens
        for choice in output.outputs:
            self._saw_choice(choice, now)

    def _saw_choice(self, choice: Choice, now: float) -> None:
        pace = self._paces[choice.index]
        if choice.token_ids:
            if pace.num_tokens:
                self._series.inter_token_latency.observe(now - pace.latest)
            pace.came(len(choice.token_ids), now)
        if choice.finish_reason is not None:
            self._finish_reasons.append(choice.finish_reason)
            self._series.finished(finished_reason=choice.finish_reason).inc()
            self._num_open -= 1
            if not self._num_open and choice.finish_reason in ("stop", "length"):
                self._completed(now)

    def ended(self, reason: str) -> None:
        """The rest of the request ended without an output that says so."""
        self._series.finished(finished_reason=reason).inc(self._num_open)
        self._num_open = 0

    def work(self, request_id: str, error: BaseException | None) -> Work:
        """What was seen, for a trace; error: what ended it early."""
        return Work(
            request_id=request_id,
            model=self._model_name,
            params=self._params,
            num_prompt_tokens=self._num_prompt_tokens,
            num_tokens=self._num_tokens,
            arrived=self._arrived,
            first=self._first,
            queue_s=self._queue_s,
            finish_reasons=tuple(self._finish_reasons),
            error=error,
            aborted=isinstance(error, (asyncio.CancelledError, RequestError, *ABORTS)),
        )

    def _completed(self, now: float) -> None:
        series = self._series
        series.e2e_latency.observe(now - self._arrived)
        if self._first is not None:
            began = self._submitted + self._queue_s
            series.queue_time.observe(self._queue_s)
            series.prefill_time.observe(max(0.0, self._first - began))
            series.decode_time.observe(now - self._first)
            series.inference_time.observe(max(0.0, now - began))
        series.prompt_tokens.observe(self._num_prompt_tokens)
        series.generation_tokens.observe(self._num_tokens)
        series.max_num_generation_tokens.observe(max(p.num_tokens for p in self._paces.values()))
        series.params_n.observe(self._params.n)
        if self._params.max_tokens is not None:
            series.params_max_tokens.observe(self._params.max_tokens)
        for pace in self._paces.values():
            if pace.mean is not None:
                series.time_per_output_token.observe(pace.mean)
