"""Continuous batching and paged blocks against the baselines that they replace.

The same requests, the same model, the same pool: only who decides differs.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paged_jax.bench.beds import Bed, Measured, sized_for
from paged_jax.bench.figures import static_rectangle
from paged_jax.bench.timing import spread
from paged_jax.bench.trace import Trace, equal_lengths
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError

__all__ = ["BASELINE", "CHOSEN_HERE", "PAGED", "RUNS", "compare", "median_run", "notes"]

BASELINE, PAGED, CACHED = "static+reserved", "continuous+paged", "continuous+paged+prefix"
RUNS: Mapping[str, Mapping[str, Any]] = {
    BASELINE: {"batching": "static", "allocation": "reserved"},
    "continuous+reserved": {"batching": "continuous", "allocation": "reserved"},
    "static+paged": {"batching": "static", "allocation": "paged"},
    PAGED: {"batching": "continuous", "allocation": "paged"},
    CACHED: {"batching": "continuous", "allocation": "paged", "enable_prefix_caching": True},
}
CHOSEN_HERE = ("batching", "allocation", "enable_prefix_caching")
CONTROL = ("static+paged", PAGED)

# What a ratio compares: the baseline's by the run's where less is better, else the other way.
LESS_IS_BETTER = ("seconds", "steps", "decode_steps", "prefill_tokens", "wasted_tokens")
MORE_IS_BETTER = ("total_tok_s", "occupancy", "occupancy_while_queued", "block_utilisation")


def compare(
    bed: Bed, config: EngineConfig, trace: Trace, *, arrivals: bool = False, rounds: int = 1
) -> dict[str, Any]:
    """Every run of `RUNS`, in turn and in an engine of its own, `rounds` times; and the control.

    Of several rounds the one of median time is told in full. Raises ConfigError if the
    configuration makes a choice that is compared here.
    """
    config = sized_for(config, trace)
    if config.step_log is not None:
        raise ConfigError("step_log cannot hold several runs: leave it out of a comparison")
    control = equal_lengths(trace, config.max_num_seqs)
    taken: dict[str, list[Measured]] = {name: [] for name in RUNS}
    controls: dict[str, list[Measured]] = {name: [] for name in CONTROL}
    for _ in range(rounds):
        for name, choices in RUNS.items():
            with bed.engine(_variant(config, choices)) as engine:
                taken[name].append(engine.measure(trace, label=name, arrivals=arrivals))
                if name in CONTROL:
                    controls[name].append(engine.measure(control, label=f"control: {name}"))
    runs = {name: median_run(measured) for name, measured in taken.items()}
    figures = {name: _without_config(measured) for name, measured in runs.items()}
    effective = runs[PAGED].figures["config"]
    rectangle = static_rectangle(runs[BASELINE].run)
    return {
        "runs": figures,
        "baseline": BASELINE,
        "ratios": {name: ratios(figures[BASELINE], run) for name, run in figures.items()},
        "expected": expected(config, trace),
        "static_rectangle": rectangle,
        "prefix": prefix_gain(figures, trace, config.block_size),
        "control": control_gain(control, *(median_run(controls[name]) for name in CONTROL)),
        "config": {k: v for k, v in effective.items() if k not in CHOSEN_HERE},
        "notes": list(notes(rectangle["batch_sizes"], config, trace)),
    }


def notes(batch_sizes: Sequence[int], config: EngineConfig, trace: Trace) -> Iterator[str]:
    """What a reader must know before believing the ratios."""
    fewest = -(-len(trace.requests) // config.max_num_seqs)
    if len(batch_sizes) > fewest:
        yield (
            f"{len(batch_sizes)} static batches were formed where {fewest} would do: the baseline "
            "is weaker than static batching must be. A larger num_blocks lets it fill its slots; "
            "with --arrivals it also starts what is there when its timer ends."
        )


def _variant(config: EngineConfig, choices: Mapping[str, Any]) -> EngineConfig:
    return dataclasses.replace(config, **{"enable_prefix_caching": False, **choices})


def median_run(measured: list[Measured]) -> Measured:
    """The one whose time is the (lower) median, with the spread of all of them noted in it."""
    if "seconds" not in measured[0].figures:
        return measured[0]
    seconds = [one.figures["seconds"] for one in measured]
    chosen = measured[seconds.index(statistics.median_low(seconds))]
    chosen.figures["seconds_spread"] = spread(seconds)._asdict()
    return chosen


def ratios(baseline: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, float]:
    """How many times better than the baseline, where both have the figure: above 1 is better."""
    found = {}
    for better, worse, names in (
        (baseline, run, LESS_IS_BETTER),
        (run, baseline, MORE_IS_BETTER),
    ):
        for name in names:
            if better.get(name) and worse.get(name):
                found[name] = better[name] / worse[name]
    return found


def expected(config: EngineConfig, trace: Trace) -> dict[str, float]:
    """What the formulas say, from the trace alone.

    reserved_block_utilisation   mean length of a sequence while it runs, by the reserved length
    paged_wasted_per_sequence    a sequence's last block is half full on average: (b - 1) / 2
    paged_wasted_bound           no sequence wastes more than b - 1, of max_num_seqs that run
    """
    size = config.block_size
    assert config.max_model_len is not None
    reserved = -(-config.max_model_len // size) * size
    return {
        "reserved_block_utilisation": trace.mean_held_len / reserved,
        "paged_wasted_per_sequence": (size - 1) / 2,
        "paged_wasted_bound": config.max_num_seqs * (size - 1),
    }


def prefix_gain(
    figures: Mapping[str, Mapping[str, Any]], trace: Trace, block_size: int
) -> dict[str, Any]:
    """Prompt tokens that the prefix cache saved, of those that whole blocks could share."""
    shareable = trace.num_shareable_tokens(block_size)
    saved = figures[PAGED]["prefill_tokens"] - figures[CACHED]["prefill_tokens"]
    return {
        "shareable_tokens": shareable,
        "saved_tokens": saved,
        "saved_share": saved / shareable if shareable else None,
        **{f"{k}_gain": v for k, v in ratios(figures[PAGED], figures[CACHED]).items()},
    }


def control_gain(control: Trace, static: Measured, continuous: Measured) -> dict[str, Any]:
    """Static against continuous where all lengths are equal: nothing is to be gained there.

    A ratio far above 1 would mean that the baseline is held back by something else.
    """
    return {
        "trace": control.summary(),
        "static": _without_config(static),
        "continuous": _without_config(continuous),
        "static_batch_sizes": static_rectangle(static.run)["batch_sizes"],
        "ratios": ratios(static.figures, continuous.figures),
    }


def _without_config(measured: Measured) -> dict[str, Any]:
    """The figures; the configuration is told once for all runs."""
    return {name: value for name, value in measured.figures.items() if name != "config"}
