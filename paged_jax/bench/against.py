"""Peers, run in turn with ours: a command that tells its rates, or a server that gets the load."""

import asyncio
import json
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paged_jax.bench.http_stream import Endpoint
from paged_jax.bench.load import Client, arrival_times, run_load, served_model
from paged_jax.bench.load_figures import load_figures
from paged_jax.bench.timing import ratio_of_pairs, spread
from paged_jax.bench.trace import Trace
from paged_jax.errors import ConfigError, PagedJaxError

__all__ = ["check_peer", "is_url", "peer_on_trace", "ratios_to_peer", "run_peer"]

LAST_LINES = 5


def is_url(target: str) -> bool:
    """Whether a peer is a server; else it is a command."""
    return target.startswith(("http://", "https://"))


def check_peer(target: str) -> None:
    """ConfigError if the peer is neither a server's address nor a command."""
    if is_url(target):
        Endpoint.parse(target)
    else:
        split_command(target)


def peer_on_trace(target: str, trace: Trace, *, arrivals: bool) -> Callable[[], dict[str, Any]]:
    """What runs the peer once; it returns `system`, `total_tok_s` and `output_tok_s` at least.

    A server gets the trace's requests, when they arrive or all at once; a command knows its work.
    """
    if is_url(target):
        return partial(_run_server, target, trace, arrivals)
    return partial(run_peer, target)


def _run_server(url: str, trace: Trace, arrivals: bool) -> dict[str, Any]:
    """Raises PagedJaxError if a request fails: the peer would have done less work."""

    async def run() -> dict[str, Any]:
        endpoint = Endpoint.parse(url)
        client = Client(endpoint, await served_model(endpoint, {}))
        times = arrival_times(trace, None if arrivals else float("inf"), seed=0)
        replies, seconds = await run_load(client, trace.requests, times)
        figures = load_figures(replies, seconds, {})
        if figures["failed"]:
            raise PagedJaxError(f"{url} failed requests of the trace: {figures['errors']}")
        return {
            "system": f"{client.model} at {url}",
            "seconds": seconds,
            "total_tok_s": figures["total_token_throughput"],
            "output_tok_s": figures["output_throughput"],
            "figures": figures,
        }

    return asyncio.run(run())


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
