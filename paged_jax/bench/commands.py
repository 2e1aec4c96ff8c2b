"""`paged-jax bench …`: the sub-commands, their flags, and what each imports when it runs."""

import argparse
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from paged_jax.bench.options import OfflineOptions
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError
from paged_jax.flags import add_flags, chosen

__all__ = ["add_arguments", "run"]

# Every program is compiled before a clock starts, and prompts are token ids.
NOT_HERE = {"model", "served_model_name", "skip_tokenizer_init", "warmup"}


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
    group = parser.add_argument_group("Benchmark")
    group.add_argument(
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


BENCHMARKS = {
    "offline": Benchmark(
        "run a trace through the engine; with --compare, through the baselines too",
        _add_offline,
        _offline,
    ),
}
