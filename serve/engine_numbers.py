"""The engine's own numbers, as Prometheus wants them."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serve.engine import Engine, Stats
from serve.gate import Gate

OWN_PREFIX = "paged_jax"
STATES = ("loading", "compiling", "ready", "draining", "dead")
SERVING = ("ready", "draining")  # the states in which there is something to count


def labels_of(engine: Engine) -> dict[str, str]:
    return {"model_name": engine.model_name, "engine": "0"}


class EngineNumbers:
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
