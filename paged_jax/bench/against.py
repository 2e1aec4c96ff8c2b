"""A peer's command, run in turn with ours: what it says, and the ratio with its spread."""

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.bench.timing import ratio_of_pairs, spread
from paged_jax.errors import ConfigError, PagedJaxError

__all__ = ["ratios_to_peer", "run_peer", "split_command"]

LAST_LINES = 5


def split_command(command: str) -> list[str]:
    """The command as a program and its arguments. ConfigError if its quotes do not close."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"against={command!r}: {error}") from error
    if not words:
        raise ConfigError("against is an empty command")
    return words


def run_peer(command: str) -> dict[str, Any]:
    """Run the command; its last line of output is a JSON object with at least `total_tok_s`.

    Raises PagedJaxError, with the end of what it said, if it fails or says something else.
    """
    words = split_command(command)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PagedJaxError(f"{words[0]} cannot be run: {error.strerror}") from error
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 0 and lines:
        try:
            said = json.loads(lines[-1])
        except json.JSONDecodeError:
            said = None
        if isinstance(said, dict) and isinstance(said.get("total_tok_s"), int | float):
            return said
    end = "\n".join([*lines, *done.stderr.splitlines()][-LAST_LINES:])
    raise PagedJaxError(
        f"{command!r} ended with code {done.returncode} and no JSON line with total_tok_s:\n{end}"
    )


def ratios_to_peer(
    ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Rates of both in each round, and how many times ours is faster, round by round."""
    report: dict[str, Any] = {"system": theirs[0].get("system"), "runs": list(theirs)}
    for name in ("total_tok_s", "output_tok_s"):
        if all(name in run for run in theirs):
            mine, other = [run[name] for run in ours], [run[name] for run in theirs]
            report[name] = spread(other)._asdict()
            report[f"{name}_ratio"] = ratio_of_pairs(mine, other)._asdict()
    return report
