"""`paged-jax bench offline`: a trace through the engine, as fast as it goes."""

from collections.abc import Mapping
from typing import Any

from paged_jax.bench.beds import Bed, sized_for
from paged_jax.bench.compare import compare, comparison_table, gain_facts, median_run
from paged_jax.bench.options import OfflineOptions
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import number, show, show_facts
from paged_jax.bench.trace import Trace, read_trace, with_token_ids
from paged_jax.config import EngineConfig
from paged_jax.errors import RequestError
from paged_jax.progress import ConsoleProgress

__all__ = ["run_offline"]


def run_offline(config: EngineConfig, trace_path: str, options: OfflineOptions) -> int:
    """Run, print and write; returns the exit code. Bad input is found before the model loads."""
    require_writable(options.json)
    trace = read_trace(trace_path, num_requests=options.num_prompts)
    about: dict[str, Any] = {"environment": environment()}
    bed, trace = _make_bed(config, trace, simulate=options.simulate)
    about |= {"model": bed.name, "trace": trace.summary(), "simulated": options.simulate}
    if options.compare:
        report = compare(bed, config, trace, arrivals=options.arrivals, rounds=options.rounds)
    else:
        report = _run_alone(bed, config, trace, options)
    title = f"{bed.name} on {trace.name}: {_sizes(trace)}"
    if options.compare:
        show(comparison_table(report, f"{title}; ratios to {report['baseline']}"))
        show_facts("What was expected, and what came out", gain_facts(report))
        for note in report["notes"]:
            print(f"\nNote: {note}")
    else:
        show_facts(title, run_facts(report))
    write_json(options.json, {**about, **report})
    return 0


def _make_bed(config: EngineConfig, trace: Trace, *, simulate: bool) -> tuple[Bed, Trace]:
    """Where to run, and the trace in token ids."""
    if simulate:
        from paged_jax.bench.simulate import SimulatedBed

        for request in trace.requests:
            if not request.prompt_token_ids:
                raise RequestError(
                    f"request {request.id} of the trace has no prompt_token_ids: a simulation "
                    "has no tokenizer"
                )
        return SimulatedBed(), trace
    from paged_jax.bench.model_bed import load_bed

    bed = load_bed(config, ConsoleProgress())
    return bed, with_token_ids(trace, bed.encode)


def _run_alone(
    bed: Bed, config: EngineConfig, trace: Trace, options: OfflineOptions
) -> dict[str, Any]:
    if options.simulate:
        config = sized_for(config, trace)
    with bed.engine(config) as engine:
        measured = [
            engine.measure(trace, label="running", arrivals=options.arrivals)
            for _ in range(options.rounds)
        ]
    return median_run(measured).figures


def _sizes(trace: Trace) -> str:
    return (
        f"{len(trace.requests)} requests, {trace.num_prompt_tokens:,} prompt + "
        f"{trace.num_output_tokens:,} output tokens"
    )


def run_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of one run that a person asks for first."""
    queued = run["occupancy_while_queued"]
    facts = [
        ("steps", number(run["steps"])),
        ("slots busy", f"{run['occupancy']:.1%}"),
        ("slots busy while somebody waits", "-" if queued is None else f"{queued:.1%}"),
        ("padding among computed tokens", f"{run['padding_share']:.1%}"),
        ("blocks full", f"{run['block_utilisation']:.1%}"),
        ("preemptions", number(run["preemptions"])),
        ("prompt tokens from the prefix cache", number(run["prefix_hit_tokens"])),
    ]
    if "seconds" not in run:
        return facts
    other_s = run["seconds"] - run["host_s"] - run["device_s"]
    return [
        ("total tokens/s", number(run["total_tok_s"])),
        ("output tokens/s", number(run["output_tok_s"])),
        ("seconds", f"{run['seconds']:.2f}"),
        ("  waiting for the device", f"{run['device_s']:.2f}"),
        ("  scheduling and dispatch", f"{run['host_s']:.2f}"),
        ("  the rest", f"{other_s:.2f}"),
        ("  compiling (none of it should be left)", f"{run['compile_s']:.2f}"),
        (
            "compiled before the clock started",
            f"{run['warm_up']['compiles']} in {run['warm_up']['compile_s']:.1f} s",
        ),
        ("time to first token, p50 / p99, s", _two(run["ttft_s"], 1.0)),
        ("gap between tokens, p50 / p99, ms", _two(run["itl_s"], 1000.0)),
        *facts,
    ]


def _two(values: Mapping[str, float], factor: float) -> str:
    if not values:
        return "-"
    return f"{number(factor * values['p50'])} / {number(factor * values['p99'])}"
