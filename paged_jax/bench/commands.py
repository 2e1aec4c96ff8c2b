"""`paged-jax bench …`: the sub-commands, their flags, and what each imports when it runs."""

import argparse
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from paged_jax.bench.options import LatencyOptions, OfflineOptions, ServingOptions
from paged_jax.config import DEVICES, EngineConfig
from paged_jax.errors import ConfigError
from paged_jax.flags import add_flags, chosen

__all__ = ["add_arguments", "run"]

# Every program is compiled before a clock starts, and prompts are token ids.
NOT_HERE = {"model", "served_model_name", "skip_tokenizer_init", "warmup", "late_compile"}


class Benchmark(NamedTuple):
    """A sub-command: what it measures, its arguments, and how it is run."""

    doc: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, benchmark in BENCHMARKS.items():
        subparser = benchmarks.add_parser(name, help=benchmark.doc, description=benchmark.doc)
        benchmark.add_arguments(subparser)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that was named; returns the exit code."""
    return BENCHMARKS[arguments.benchmark].run(arguments)


def _add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="an alias (smollm2), a Hugging Face id (owner/name), a folder, or a .gguf file",
    )


def _add_engine_flags(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    add_flags(parser, EngineConfig, leave_out=NOT_HERE | set(leave_out))


def _engine_config(arguments: argparse.Namespace, **defaults: Any) -> EngineConfig:
    return EngineConfig(**{**defaults, **chosen(arguments, EngineConfig)})


# -- offline ------------------------------------------------------------------------------------


def _add_offline(parser: argparse.ArgumentParser) -> None:
    _add_model(parser, optional=True)
    parser.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="JSON lines: id, arrival_s, prompt, prompt_token_ids, max_tokens; may be gzipped",
    )
    add_flags(parser, OfflineOptions, group="Benchmark")
    _add_engine_flags(parser)


def _offline(arguments: argparse.Namespace) -> int:
    options = OfflineOptions(**chosen(arguments, OfflineOptions))
    given = chosen(arguments, EngineConfig)
    if given["model"] is None:
        if not options.simulate:
            raise ConfigError("MODEL is missing; only --simulate goes without one")
        given["model"] = "simulated"
    if options.compare:
        from paged_jax.bench.compare import CHOSEN_HERE

        for name in CHOSEN_HERE:
            if name in given:
                raise ConfigError(f"{name} is what --compare compares: leave it out")

    from paged_jax.bench.offline import run_offline

    return run_offline(EngineConfig(**given), arguments.trace, options)


# -- serve --------------------------------------------------------------------------------------


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url",
        required=True,
        metavar="URL",
        help="of a running OpenAI-compatible server, such as http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="as for offline; without one, --num-prompts random prompts are sent",
    )
    parser.add_argument(
        "--slo",
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="LIMIT",
        help="limits that a good request keeps: ttft_ms:500 tpot_ms:50 e2el_ms:9000",
    )
    add_flags(parser, ServingOptions, group="Benchmark", leave_out={"slo"})


def _serve(arguments: argparse.Namespace) -> int:
    options = ServingOptions(**chosen(arguments, ServingOptions))
    if arguments.trace is None and options.num_prompts is None:
        raise ConfigError("give --trace FILE, or --num-prompts N for random ones")

    from paged_jax.bench.serving import run_serving

    return run_serving(arguments.base_url, arguments.trace, options)


# -- latency, startup, host, calibrate ----------------------------------------------------------


def _add_latency(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        default=argparse.SUPPRESS,
        metavar="N",
        help="requests at once; each size is measured (default: 1)",
    )
    add_flags(parser, LatencyOptions, group="Benchmark", leave_out={"batch_sizes"})
    _add_engine_flags(parser)


def _latency(arguments: argparse.Namespace) -> int:
    given = chosen(arguments, LatencyOptions)
    if "batch_sizes" in given:
        given["batch_sizes"] = tuple(given["batch_sizes"])
    options = LatencyOptions(**given)
    config = _engine_config(
        arguments,
        max_num_seqs=max(options.batch_sizes),
        max_model_len=options.input_len + options.output_len,
    )

    from paged_jax.bench.latency import run_latency

    return run_latency(config, options)


def _add_startup(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    group = parser.add_argument_group("Benchmark")
    _add_repeat_and_json(group)
    add_flags(parser, EngineConfig, leave_out={"model", "compilation_cache_dir"})


def _startup(arguments: argparse.Namespace) -> int:
    from paged_jax.bench.startup import run_startup

    config = _engine_config(arguments)
    return run_startup(config, repeat=arguments.repeat, json_path=arguments.json)


def _add_repeat_and_json(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--repeat",
        type=_count,
        default=3,
        metavar="N",
        help="rounds; medians are reported (default: %(default)s)",
    )
    _add_json(group)


def _add_json(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="FILE", help="write every figure to this file")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _add_host(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Benchmark")
    group.add_argument(
        "--steps",
        type=_count,
        default=200,
        metavar="N",
        help="steps that each median is over (default: %(default)s)",
    )
    _add_json(group)


def _host(arguments: argparse.Namespace) -> int:
    from paged_jax.bench.host import run_host

    return run_host(steps=arguments.steps, json_path=arguments.json)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Benchmark")
    group.add_argument("--device", choices=DEVICES, default="auto", help="what to measure")
    _add_json(group)


def _calibrate(arguments: argparse.Namespace) -> int:
    from paged_jax.bench.calibrate import run_calibrate

    return run_calibrate(arguments.device, arguments.json)


def _add_quant(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    group = parser.add_argument_group("Benchmark")
    group.add_argument(
        "--tokens",
        type=_count,
        default=128,
        metavar="N",
        help="of each text (default: %(default)s)",
    )
    group.add_argument(
        "--text",
        metavar="FILE",
        help="what is scored, up to 16 texts of it (default: four that the model samples)",
    )
    _add_json(group)
    _add_engine_flags(parser, {"quantization", "kv_cache_dtype"})


def _quant(arguments: argparse.Namespace) -> int:
    from paged_jax.bench.quant import run_quant

    config = _engine_config(arguments, max_num_seqs=4, max_model_len=arguments.tokens + 1)
    return run_quant(
        config,
        num_tokens=arguments.tokens,
        text_path=arguments.text,
        json_path=arguments.json,
    )


BENCHMARKS = {
    "offline": Benchmark(
        "run a trace through the engine; with --compare, through the baselines too",
        _add_offline,
        _offline,
    ),
    "serve": Benchmark(
        "an open-loop load on any OpenAI-compatible server, and on a peer in turn",
        _add_serve,
        _serve,
    ),
    "latency": Benchmark(
        "a batch of equal requests, and one decode step taken apart", _add_latency, _latency
    ),
    "startup": Benchmark(
        "from the start of a process to the first token, cold and warm", _add_startup, _startup
    ),
    "quant": Benchmark(
        "weights and KV cache in fewer bits: size, speed and error of each", _add_quant, _quant
    ),
    "host": Benchmark("the scheduler's own time, without a model", _add_host, _host),
    "calibrate": Benchmark(
        "what this machine can read and multiply at best", _add_calibrate, _calibrate
    ),
}
