"""`paged-jax bench latency`: a batch of equal requests, and one decode step taken apart."""

from typing import Any

import numpy as np

from paged_jax.bench.calibrate import Rates, calibrate
from paged_jax.bench.model_bed import ModelBed, ModelSize, PreparedEngine, load_bed
from paged_jax.bench.options import LatencyOptions
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.step_times import step_times
from paged_jax.bench.table import Table, number, show, show_facts
from paged_jax.bench.timing import spread
from paged_jax.bench.trace import Trace, TraceRequest
from paged_jax.config import EngineConfig
from paged_jax.progress import ConsoleProgress
from paged_jax.sharding import choose_device

__all__ = ["run_latency"]


def run_latency(config: EngineConfig, options: LatencyOptions) -> int:
    """Measure every batch size, print and write; returns the exit code."""
    require_writable(options.json)
    about: dict[str, Any] = {"environment": environment()}
    bed = load_bed(config, ConsoleProgress())
    rates = calibrate(choose_device(config.device)) if options.calibrate else None
    with bed.engine(config) as engine:
        batches = [_measure(bed, engine, size, options, rates) for size in options.batch_sizes]
    lengths = f"{options.input_len} prompt + {options.output_len} output tokens"
    show(_latency_table(batches, f"{bed.name}: whole requests of {lengths}"))
    show(_step_table(batches, f"{bed.name}: one decode step, {options.input_len} tokens each"))
    if rates is not None:
        show_facts("This machine", rates.facts())
    report = {**about, "model": bed.name, "input_len": options.input_len}
    report |= {"output_len": options.output_len, "batches": batches}
    write_json(options.json, report | ({"machine": rates.summary()} if rates else {}))
    return 0


def _measure(
    bed: ModelBed,
    engine: PreparedEngine,
    batch_size: int,
    options: LatencyOptions,
    rates: Rates | None,
) -> dict[str, Any]:
    """Medians over the rounds: seconds until the first token, for each further one, and in all."""
    trace = _equal_requests(engine.engine.vocab_size, batch_size, options)
    rounds = [
        engine.measure(trace, label=f"batch of {batch_size}").figures for _ in range(options.repeat)
    ]
    steps = step_times(
        engine.engine, bed.model, batch_size=batch_size, context_len=options.input_len
    )
    return {
        "batch_size": batch_size,
        "seconds": spread([figures["seconds"] for figures in rounds])._asdict(),
        "ttft_s": spread([figures["ttft_s"]["p50"] for figures in rounds])._asdict(),
        "tpot_s": spread([figures["tpot_s"]["p50"] for figures in rounds])._asdict(),
        "output_tok_s": spread([figures["output_tok_s"] for figures in rounds])._asdict(),
        "step": steps,
        **_work_of_a_step(bed.size, engine, steps, rates),
    }


def _equal_requests(vocab_size: int, batch_size: int, options: LatencyOptions) -> Trace:
    """Random prompts, so that no two of them share a prefix."""
    rng = np.random.default_rng(0)
    requests = tuple(
        TraceRequest(
            str(i),
            0.0,
            None,
            tuple(rng.integers(0, vocab_size, options.input_len).tolist()),
            options.output_len,
        )
        for i in range(batch_size)
    )
    return Trace(f"batch-of-{batch_size}", requests)


def _work_of_a_step(
    size: ModelSize, engine: PreparedEngine, steps: dict[str, Any], rates: Rates | None
) -> dict[str, float]:
    """Bytes that a step must read (weights, keys, values) and products it must form, and which
    share of what the machine can do that is in the time it took.
    """
    runner = engine.engine.runner
    batch_size, step_s = steps["batch_size"], steps["paged_step_s"]["median"]
    kv_bytes_a_token = runner.num_block_bytes / engine.engine.config.block_size
    num_bytes = size.num_bytes_read + batch_size * steps["context_len"] * kv_bytes_a_token
    flop = size.flop(batch_size, batch_size)
    work = {"step_bytes": num_bytes, "step_flop": float(flop)}
    if rates is None:
        return work
    return {
        **work,
        "read_share": num_bytes / step_s / rates.read_bytes_s,
        "matmul_share": flop / step_s / rates.matmul_flop_s,
    }


def _latency_table(batches: list[dict[str, Any]], title: str) -> Table:
    rows = tuple(
        (
            number(one["batch_size"]),
            f"{one['seconds']['median']:.3f}",
            f"{one['seconds']['low']:.3f} to {one['seconds']['high']:.3f}",
            number(1000 * one["ttft_s"]["median"]),
            number(1000 * one["tpot_s"]["median"]),
            number(one["output_tok_s"]["median"]),
        )
        for one in batches
    )
    columns = ("batch", "seconds", "least to most", "TTFT, ms", "TPOT, ms", "output tokens/s")
    return Table(title, columns, rows)


def _step_table(batches: list[dict[str, Any]], title: str) -> Table:
    def milliseconds(step: dict[str, Any], name: str) -> str:
        return number(1000 * step[name]["median"]) if name in step else "-"

    def ratio(step: dict[str, Any], name: str) -> str:
        return f"{step[name]['median']:.2f}x" if name in step else "-"

    rows = tuple(
        (
            number(one["batch_size"]),
            milliseconds(one["step"], "paged_step_s"),
            milliseconds(one["step"], "without_attention_step_s"),
            ratio(one["step"], "paged_by_without_attention"),
            milliseconds(one["step"], "contiguous_step_s"),
            ratio(one["step"], "paged_by_contiguous"),
            _percent(one.get("read_share")),
            _percent(one.get("matmul_share")),
        )
        for one in batches
    )
    columns = (
        "batch",
        "step, ms",
        "without attention, ms",
        "ratio",
        "contiguous, ms",
        "ratio",
        "of read bandwidth",
        "of matmul rate",
    )
    return Table(title, columns, rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
