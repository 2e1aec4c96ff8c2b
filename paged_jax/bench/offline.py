"""`paged-jax bench offline`: a trace through the engine, as fast as it goes."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paged_jax.bench.against import check_peer, peer_on_trace, ratios_to_peer
from paged_jax.bench.beds import Bed, Measured, sized_for
from paged_jax.bench.compare import compare, median_run
from paged_jax.bench.comparison_tables import (
    comparison_table,
    gain_facts,
    indirection_facts,
    ratio_text,
)
from paged_jax.bench.options import OfflineOptions
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import number, show, show_facts
from paged_jax.bench.timing import alternate
from paged_jax.bench.trace import Trace, read_trace, with_token_ids
from paged_jax.config import EngineConfig
from paged_jax.errors import RequestError
from paged_jax.progress import ConsoleProgress

if TYPE_CHECKING:
    from paged_jax.bench.model_bed import ModelBed

__all__ = ["run_offline"]

OURS = ""  # among the peers' commands, none of which is empty


def run_offline(config: EngineConfig, trace_path: str, options: OfflineOptions) -> int:
    """Run, print and write; returns the exit code. Bad input is found before the model loads."""
    require_writable(options.json)
    for target in options.against:
        check_peer(target)
    trace = read_trace(trace_path, num_requests=options.num_prompts)
    about: dict[str, Any] = {"environment": environment()}
    bed: Bed
    if options.simulate:
        bed, model_bed = _simulated_bed(trace), None
    else:
        bed = model_bed = _model_bed(config)
        trace = with_token_ids(trace, model_bed.encode)
        model_bed.check(trace, config)
    about |= {"model": bed.name, "trace": trace.summary(), "simulated": options.simulate}
    title = f"{bed.name} on {trace.name}: {_sizes(trace)}"
    if options.compare:
        report = compare(bed, config, trace, arrivals=options.arrivals, rounds=options.rounds)
        facts = gain_facts(report)
        if model_bed is not None:
            report["indirection"] = _indirection(model_bed, config, trace)
            facts += indirection_facts(report["indirection"])
        show(comparison_table(report, f"{title}; ratios to {report['baseline']}"))
    else:
        report = _run_alone(bed, config, trace, options)
        facts = run_facts(report)
    if model_bed is not None and options.calibrate:
        facts += _shares_of_the_machine(config, report)
    show_facts("What was expected, and what came out" if options.compare else title, facts)
    for note in report.get("notes", ()):
        print(f"\nNote: {note}")
    write_json(options.json, {**about, **report})
    return 0


def _simulated_bed(trace: Trace) -> Bed:
    from paged_jax.bench.simulate import SimulatedBed

    for request in trace.requests:
        if not request.prompt_token_ids:
            raise RequestError(
                f"request {request.id} of the trace has no prompt_token_ids: a simulation has no "
                "tokenizer"
            )
    return SimulatedBed()


def _model_bed(config: EngineConfig) -> "ModelBed":
    from paged_jax.bench.model_bed import load_bed

    return load_bed(config, ConsoleProgress())


def _run_alone(
    bed: Bed, config: EngineConfig, trace: Trace, options: OfflineOptions
) -> dict[str, Any]:
    """The run of median time; where there are peers, each ran once after each of ours."""
    if options.simulate:
        config = sized_for(config, trace)
    with bed.engine(config) as engine:
        ours = partial(engine.measure, trace, label="running", arrivals=options.arrivals)
        peers = {
            target: peer_on_trace(target, trace, arrivals=options.arrivals)
            for target in options.against
        }
        runs: dict[str, Callable[[], Any]] = {OURS: ours, **peers}
        taken = alternate(runs, options.rounds)
    measured: list[Measured] = taken.pop(OURS)
    figures = median_run(measured).figures
    if peers:
        rates = [one.figures for one in measured]
        figures["against"] = {target: ratios_to_peer(rates, said) for target, said in taken.items()}
    return figures


def _indirection(bed: "ModelBed", config: EngineConfig, trace: Trace) -> dict[str, Any]:
    """One sequence of the trace's mean length, decoded through blocks and without any."""
    from paged_jax.bench.step_times import step_times

    config = sized_for(config, trace)
    assert config.max_model_len is not None
    context_len = min(round(trace.mean_held_len), config.max_model_len - 1)
    with bed.cold_engine(config) as engine:
        return step_times(engine, bed.model, batch_size=1, context_len=context_len)


def _shares_of_the_machine(config: EngineConfig, report: dict[str, Any]) -> list[tuple[str, str]]:
    """Measure the machine, and note in each run how much of its multiplying it did."""
    from paged_jax.bench.calibrate import calibrate
    from paged_jax.sharding import choose_device

    rates = calibrate(choose_device(config.device))
    report["machine"] = rates.summary()
    runs: Iterable[dict[str, Any]] = report["runs"].values() if "runs" in report else [report]
    for run in runs:
        run["matmul_share"] = run["flop_s"] / rates.matmul_flop_s
    best = max(run["matmul_share"] for run in runs)
    return [*rates.facts(), ("share of it that the model's products reached", f"{best:.1%}")]


# -- shown --------------------------------------------------------------------------------------


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
    peers = [
        (f"times {peer['system'] or target}", ratio_text(peer["total_tok_s_ratio"]))
        for target, peer in run.get("against", {}).items()
    ]
    other_s = run["seconds"] - run["host_s"] - run["device_s"]
    return [
        ("total tokens/s", number(run["total_tok_s"])),
        *peers,
        ("output tokens/s", number(run["output_tok_s"])),
        ("seconds", f"{run['seconds']:.2f}"),
        ("  waiting for the device", f"{run['device_s']:.2f}"),
        ("  scheduling and dispatch", f"{run['host_s']:.2f}"),
        ("  the rest", f"{other_s:.2f}"),
        ("  compiling (none of it should be left)", f"{run['compile_s']:.2f}"),
        (
            "compiled before the clock started",
            f"{run['warm_up']['programs']} programs in {run['warm_up']['seconds']:.1f} s",
        ),
        ("time to first token, p50 / p99, s", _two(run["ttft_s"], 1.0)),
        ("gap between tokens, p50 / p99, ms", _two(run["itl_s"], 1000.0)),
        *facts,
    ]


def _two(values: Mapping[str, float], factor: float) -> str:
    if not values:
        return "-"
    return f"{number(factor * values['p50'])} / {number(factor * values['p99'])}"
