"""The engine's own numbers, as Prometheus wants them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from serve.engine import Engine, Stats
from serve.gate import Gate

OWN_PREFIX = "paged_jax"
STATES = ("loading", "compiling", "ready", "paused", "asleep", "draining", "hung", "dead")
SERVING = (
    "ready",
    "paused",
    "asleep",
    "draining",
    "hung",
)  # the states in which there is something to count

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


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
            yield _step_tokens(stats, labels, self._prefix)


class _Row(NamedTuple):
    """A metric with one value, or with one for each value of another label."""

    name: str
    doc: str
    values: float | Mapping[str, float]
    label: str = ""


def _families(
    kind: type[Family], rows: Iterable[_Row], labels: Mapping[str, str]
) -> Iterator[Family]:
    for row in rows:
        if isinstance(row.values, Mapping):
            family = kind(row.name, row.doc, labels=[*labels, row.label])
            for label, value in row.values.items():
                family.add_metric([*labels.values(), label], value)
        else:
            family = kind(row.name, row.doc, labels=[*labels])
            family.add_metric([*labels.values()], row.values)
        yield family


def _gauges(stats: Stats, labels: Mapping[str, str], prefix: str) -> Iterator[Metric]:
    rows = (
        _Row(f"{prefix}:num_requests_running", "Running sequences.", stats.num_running),
        _Row(f"{prefix}:num_requests_waiting", "Those that wait to run.", stats.num_waiting),
        _Row(
            f"{prefix}:kv_cache_usage_perc",
            "Share of the KV blocks in use, 0 to 1; cached blocks that nobody uses are free.",
            stats.kv_cache_usage,
        ),
        _Row(
            f"{OWN_PREFIX}:kv_blocks",
            "KV blocks; those that only wait for a prefix to come again are `cached`.",
            _blocks(stats.num_blocks - 1, stats.blocks_in_use, stats.blocks_cached),
            "state",
        ),
        _Row(
            f"{OWN_PREFIX}:hbm_bytes",
            "Bytes on the device, without what a step needs for itself.",
            {"weights": stats.weight_bytes, "kv_cache": stats.kv_cache_bytes},
            "kind",
        ),
        _Row(f"{OWN_PREFIX}:params_version", "Updates of the weights.", stats.params_number),
        _Row(
            f"{OWN_PREFIX}:host_kv_blocks",
            "Blocks of host memory, for swapped sequences and evicted prefixes.",
            _blocks(stats.num_host_blocks, stats.host_blocks_in_use, stats.host_blocks_cached),
            "state",
        ),
    )
    yield from _families(GaugeMetricFamily, rows, labels)
    config = {"block_size": str(stats.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    row = _Row(f"{prefix}:cache_config_info", "The KV cache's shape.", 1.0)
    yield from _families(GaugeMetricFamily, [row], {**labels, **config})


def _blocks(total: int, used: int, cached: int) -> dict[str, float]:
    return {"used": used, "cached": cached, "free": total - used - cached}


def _counters(stats: Stats, labels: Mapping[str, str], prefix: str) -> Iterator[Metric]:
    own = OWN_PREFIX
    swapped = {"out": stats.num_swap_outs, "in": stats.num_swap_ins}
    phases = {"host": stats.host_s, "device": stats.device_s}
    rows = (
        _Row(f"{prefix}:prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
        _Row(f"{prefix}:generation_tokens", "Tokens generated.", stats.generation_tokens),
        _Row(f"{prefix}:num_preemptions", "Sequences preempted.", stats.preemptions),
        _Row(f"{prefix}:prefix_cache_queries", "Tokens looked up.", stats.prefix_lookup_tokens),
        _Row(f"{prefix}:prefix_cache_hits", "Tokens found.", stats.prefix_hit_tokens),
        _Row(f"{own}:swaps", "Preempted sequences kept in host memory.", stats.num_swaps),
        _Row(f"{own}:swapped_blocks", "KV blocks to host memory and back.", swapped, "direction"),
        _Row(f"{own}:copied_blocks", "KV blocks copied before a write.", stats.num_copies),
        _Row(f"{own}:steps", "Engine steps.", stats.steps_by_kind, "kind"),
        _Row(f"{own}:step_seconds", "Time of the steps, by who worked.", phases, "phase"),
        _Row(f"{own}:padding_tokens", "Computed for nobody.", stats.padded_tokens),
        _Row(f"{own}:compiles", "Programs compiled.", stats.compiles),
        _Row(f"{own}:compile_seconds", "Time spent compiling.", stats.compile_s),
        _Row(f"{own}:compile_cache_hits", "Found on disk.", stats.compile_cache_hits),
        _Row(f"{own}:late_compiles", "Compiled after warm-up.", stats.late_compiles),
    )
    return _families(CounterMetricFamily, rows, labels)


def _step_tokens(stats: Stats, labels: Mapping[str, str], prefix: str) -> Metric:
    family = HistogramMetricFamily(
        f"{prefix}:iteration_tokens_total", "Tokens computed in a step.", labels=list(labels)
    )
    buckets = [(str(float(edge)), float(count)) for edge, count in stats.steps_by_size.items()]
    buckets.append(("+Inf", float(stats.num_steps)))
    family.add_metric(list(labels.values()), buckets, stats.scheduled_tokens)
    return family
