"""What Prometheus may ask: counts and times of the requests, and the engine's own numbers.

Names, labels and buckets of the shared set are those that routers and dashboards already read.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paged_jax import SamplingParams
from serve.engine import Engine, Output, Stats
from serve.gate import Gate

OWN_PREFIX = "paged_jax"
LABELS = ("model_name", "engine")
STATES = ("loading", "compiling", "ready", "draining", "dead")
SERVING = ("ready", "draining")  # the states in which there is something to count
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
    prompt_tokens: Histogram
    generation_tokens: Histogram
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
        self._registry.register(_EngineNumbers(engine, gate, prefix))

    def watch(self, params: SamplingParams, num_prompt_tokens: int, arrived: float) -> "Watch":
        """Follow one request that arrived when `time.perf_counter()` was `arrived`."""
        return Watch(self._series, params, num_prompt_tokens, arrived)

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
            histogram("inter_token_latency_seconds", "Output to output.", BETWEEN_TOKENS_S),
            histogram(
                "request_time_per_output_token_seconds",
                "Mean time per token after the first.",
                BETWEEN_TOKENS_S,
            ),
            histogram("e2e_request_latency_seconds", "Arrival to last token.", WHOLE_REQUEST_S),
            histogram("request_prompt_tokens", "Prompt tokens of a request.", NUM_TOKENS),
            histogram("request_generation_tokens", "Output tokens of a request.", NUM_TOKENS),
            histogram("request_params_n", "Choices asked for.", NUM_CHOICES),
            histogram("request_params_max_tokens", "Output tokens asked for.", NUM_TOKENS),
            functools.partial(finished.labels, **labels),
        )


class Watch:
    """Follows one request through the engine; who watches calls `saw` or `ended`, nothing else."""

    def __init__(
        self, series: Series, params: SamplingParams, num_prompt_tokens: int, arrived: float
    ):
        self._series = series
        self._params = params
        self._num_prompt_tokens = num_prompt_tokens
        self._arrived = arrived
        self._num_open = num_choices(params)
        self._num_tokens = 0
        self._first = self._latest = 0.0

    def saw(self, output: Output) -> None:
        now = time.perf_counter()
        num_new = sum(len(choice.token_ids) for choice in output.outputs)
        if num_new:
            if self._num_tokens:
                self._series.inter_token_latency.observe(now - self._latest)
            else:
                self._series.time_to_first_token.observe(now - self._arrived)
                self._first = now
            self._num_tokens += num_new
            self._latest = now
        for choice in output.outputs:
            if choice.finish_reason is not None:
                self._series.finished(finished_reason=choice.finish_reason).inc()
                self._num_open -= 1
                if not self._num_open and choice.finish_reason in ("stop", "length"):
                    self._completed(now)

    def ended(self, reason: str) -> None:
        """The rest of the request ended without an output that says so."""
        self._series.finished(finished_reason=reason).inc(self._num_open)
        self._num_open = 0

    def _completed(self, now: float) -> None:
        series = self._series
        series.e2e_latency.observe(now - self._arrived)
        series.prompt_tokens.observe(self._num_prompt_tokens)
        series.generation_tokens.observe(self._num_tokens)
        series.params_n.observe(num_choices(self._params))
        if self._params.max_tokens is not None:
            series.params_max_tokens.observe(self._params.max_tokens)
        if self._num_tokens > 1:
            mean = (self._latest - self._first) / (self._num_tokens - 1)
            series.time_per_output_token.observe(mean)


class _EngineNumbers:
    """Asks the engine at every scrape, so that a gauge never shows an older truth."""

    def __init__(self, engine: Engine, gate: Gate, prefix: str):
        self._engine = engine
        self._gate = gate
        self._prefix = prefix

    def describe(self) -> list[Metric]:
        return []  # or registering would collect from an engine that is not there yet

    def collect(self) -> Iterator[Metric]:
        now = self._gate.state
        state = GaugeMetricFamily(f"{OWN_PREFIX}:engine_state", "1 for now.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == now))
        yield state
        if now in SERVING:
            labels = labels_of(self._engine)
            stats = self._engine.stats()
            yield from _gauges(stats, labels, self._prefix)
            yield from _counters(stats, labels, self._prefix)


def _gauges(stats: Stats, labels: dict[str, str], prefix: str) -> Iterator[Metric]:
    for name, doc, value in (
        ("num_requests_running", "Requests in the running batch.", stats.num_running),
        ("num_requests_waiting", "Requests that wait to run.", stats.num_waiting),
        (
            "kv_cache_usage_perc",
            "Share of the KV blocks in use, 0 to 1; cached blocks that nobody uses are free.",
            stats.kv_cache_usage,
        ),
    ):
        gauge = GaugeMetricFamily(f"{prefix}:{name}", doc, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        yield gauge
    config = {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    info = GaugeMetricFamily(
        f"{prefix}:cache_config_info", "The KV cache's shape.", labels=[*labels, *config]
    )
    info.add_metric([*labels.values(), *config.values()], 1.0)
    yield info


def _counters(stats: Stats, labels: dict[str, str], prefix: str) -> Iterator[Metric]:
    for name, doc, value in (
        (f"{prefix}:prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
        (f"{prefix}:generation_tokens", "Tokens generated.", stats.generation_tokens),
        (f"{prefix}:num_preemptions", "Sequences preempted.", stats.preemptions),
        (f"{prefix}:prefix_cache_queries", "Tokens looked up.", stats.prefix_lookup_tokens),
        (f"{prefix}:prefix_cache_hits", "Tokens found.", stats.prefix_hit_tokens),
        (f"{OWN_PREFIX}:steps", "Engine steps.", stats.num_steps),
        (f"{OWN_PREFIX}:padding_tokens", "Computed for nobody.", stats.padded_tokens),
        (f"{OWN_PREFIX}:compiles", "Programs compiled.", stats.compiles),
        (f"{OWN_PREFIX}:compile_seconds", "Time spent compiling.", stats.compile_s),
        (f"{OWN_PREFIX}:late_compiles", "Compiled after warm-up.", stats.late_compiles),
    ):
        counter = CounterMetricFamily(name, doc, labels=list(labels))
        counter.add_metric(list(labels.values()), value)
        yield counter


def labels_of(engine: Engine) -> dict[str, str]:
    return {"model_name": engine.model_name, "engine": "0"}


def num_choices(params: SamplingParams) -> int:
    return params.n if "n" in SamplingParams.field_names() else 1
