"""The command line: `paged-jax pull | convert | generate | serve | bench | doctor`.

Each command imports what it needs when it runs: `--help` and `--version` load no JAX.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from paged_jax import __version__
from paged_jax.config import EngineConfig
from paged_jax.errors import ConfigError, EngineDeadError, PagedJaxError, RequestError
from paged_jax.flags import add_flags, chosen

__all__ = ["main"]

FAILED, USAGE, INTERRUPTED = 1, 2, 130

API_KEY_VARIABLE = "PAGED_JAX_API_KEY"

# A server that compiles while clients wait looks as if it hung: it is not ready before it has.
SERVE_DEFAULTS = {"warmup": "full"}


class Command(NamedTuple):
    """A sub-command: what it is for, its arguments, and what it does; `run` gives the exit code."""

    doc: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 0, 1 if the engine failed, 2 for bad input, 3 for a blocker.

    A usage error leaves through SystemExit(2), as argparse has it.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = build_parser(argv).parse_args(argv)
    try:
        return COMMANDS[arguments.command].run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Who read our output has gone; nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (PagedJaxError, RequestError) as error:
        print(f"paged-jax: {error}", file=sys.stderr)
        return FAILED if isinstance(error, EngineDeadError) else USAGE


def build_parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser; only the command that `argv` starts with gets its arguments."""
    parser = argparse.ArgumentParser(
        prog="paged-jax", description="Serve language models in pure JAX."
    )
    parser.add_argument("--version", action="version", version=f"paged-jax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.doc, description=command.doc)
        if name in argv[:1]:
            command.add_arguments(subparser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an alias (smollm2), a Hugging Face id (owner/name), a folder, or a .gguf file",
    )


def _pull(arguments: argparse.Namespace) -> int:
    from paged_jax.hub import pull

    files = pull(arguments.model)
    print(f"{files.name} is ready in {files.directory}")
    return 0


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("target", metavar="FOLDER", help="what to write; it must not exist yet")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="bfloat16",
        help="of the weights that are written (default: %(default)s)",
    )


def _convert(arguments: argparse.Namespace) -> int:
    from paged_jax.convert import convert

    folder = convert(arguments.model, arguments.target, dtype=arguments.dtype)
    print(f"{arguments.model} is ready in {folder}")
    return 0


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    from paged_jax.generate import add_arguments

    _add_model(parser)
    add_arguments(parser)
    add_flags(parser, EngineConfig, leave_out={"model", "served_model_name"})


def _generate(arguments: argparse.Namespace) -> int:
    from paged_jax.generate import run

    return run(arguments)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from serve import ServeOptions

    _add_model(parser)
    group = parser.add_argument_group("Server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: %(default)s)"
    )
    group.add_argument("--port", default=8000, type=int, metavar="N", help="(default: %(default)s)")
    group.add_argument("--api-key-file", metavar="PATH", help="file with an API key on each line")
    add_flags(parser, ServeOptions, group="Server")
    add_flags(parser, EngineConfig, leave_out={"model"}, defaults=SERVE_DEFAULTS)


def _serve(arguments: argparse.Namespace) -> int:
    from serve import ServeOptions, run_server

    given = chosen(arguments, ServeOptions)
    keys = (*given.pop("api_key", ()), *_api_keys(arguments.api_key_file, os.environ))
    try:
        options = ServeOptions(**given, api_key=keys)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    config = EngineConfig(**(SERVE_DEFAULTS | chosen(arguments, EngineConfig)))
    return run_server(config, options, host=arguments.host, port=arguments.port)


def _api_keys(path: str | None, environ: Mapping[str, str]) -> list[str]:
    """The keys that stand in a file or in the environment, where no list of processes shows them.

    Raises ConfigError for a file that cannot be read or holds none: it would let everybody in.
    """
    keys = [environ[API_KEY_VARIABLE]] if environ.get(API_KEY_VARIABLE) else []
    if path is None:
        return keys
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {path} cannot be read: {error}") from error
    in_file = [line.strip() for line in lines if line.strip()]
    if not in_file:
        raise ConfigError(f"--api-key-file: {path} holds no key")
    return keys + in_file


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    from paged_jax.bench.commands import add_arguments

    add_arguments(parser)


def _bench(arguments: argparse.Namespace) -> int:
    from paged_jax.bench.commands import run

    return run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from paged_jax.doctor import run_doctor

    return run_doctor()


COMMANDS = {
    "pull": Command("download a model and make it ready", _add_model, _pull),
    "convert": Command(
        "write a model's weights in Orbax's format, which any mesh restores",
        _add_convert_arguments,
        _convert,
    ),
    "generate": Command("answer prompts, one or thousands", _add_generate_arguments, _generate),
    "serve": Command(
        "serve a model over HTTP, as OpenAI's clients expect", _add_serve_arguments, _serve
    ),
    "bench": Command(
        "measure the engine, beside baselines, peers and the machine", _add_bench_arguments, _bench
    ),
    "doctor": Command("look at this machine and say what to do", lambda parser: None, _doctor),
}

if __name__ == "__main__":
    sys.exit(main())
