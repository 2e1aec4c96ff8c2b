"""`paged-jax bench serve`: a load on a server that is already running, and on a peer in turn."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paged_jax.bench.against import check_peer, is_url, run_peer
from paged_jax.bench.http_stream import Endpoint
from paged_jax.bench.load import (
    Client,
    arrival_times,
    random_trace,
    run_load,
    served_model,
)
from paged_jax.bench.load_figures import load_facts, load_figures, parse_slo
from paged_jax.bench.options import ServingOptions
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import show_facts
from paged_jax.bench.timing import alternate, ratio_of_pairs
from paged_jax.bench.trace import Trace, read_trace
from paged_jax.errors import RequestError
from paged_jax.progress import ConsoleProgress

__all__ = ["run_serving"]

FAILED = 1
# How a peer compares: its figure by ours where less is better, else the other way.
LESS_IS_BETTER = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms")
MORE_IS_BETTER = ("request_throughput", "output_throughput", "total_token_throughput")


def run_serving(base_url: str, trace_path: str | None, options: ServingOptions) -> int:
    """Run the load, print and write; returns 1 if a request failed."""
    require_writable(options.json)
    slo = parse_slo(options.slo)
    about = {"environment": environment()}
    for target in options.against:
        check_peer(target)
    trace = _trace(trace_path, options)
    urls = [base_url, *filter(is_url, options.against)]
    clients = {url: _client(url, options) for url in urls}
    arrivals = arrival_times(trace, options.request_rate, options.seed)

    def load(url: str) -> dict[str, Any]:
        with ConsoleProgress().track(url, len(trace.requests), unit="requests") as advance:
            replies, seconds = asyncio.run(
                run_load(
                    clients[url],
                    trace.requests,
                    arrivals,
                    max_concurrency=options.max_concurrency,
                    advance=advance,
                )
            )
        return load_figures(replies, seconds, slo)

    runs: dict[str, Callable[[], dict[str, Any]]] = {url: partial(load, url) for url in urls}
    for target in options.against:
        if not is_url(target):
            runs[target] = partial(_run_command, target)
    taken = alternate(runs, options.rounds)
    figures = _median_round(taken[base_url])
    facts = load_facts(figures)
    peers = {target: _peer_report(taken[base_url], taken[target]) for target in options.against}
    for target, peer in peers.items():
        facts += [
            (
                f"{name}, better than {target}",
                f"{r['median']:.2f}x ({r['low']:.2f} to {r['high']:.2f})",
            )
            for name, r in peer["ratios"].items()
        ]
    model = clients[base_url].model
    show_facts(f"{model} at {base_url} on {trace.name}", facts)
    report = {
        **about,
        "base_url": base_url,
        "model_id": model,
        "trace": trace.summary(),
        "request_rate": options.request_rate,
        "max_concurrency": options.max_concurrency,
        **figures,
    }
    write_json(options.json, report | ({"against": peers} if peers else {}))
    for error, count in figures["errors"].items():
        print(f"{count} requests failed: {error}")
    rounds = [one for rounds in taken.values() for one in rounds]
    return FAILED if any(one.get("failed") for one in rounds) else 0


def _run_command(command: str) -> dict[str, Any]:
    """What the peer says, with its rates under the names that they have here."""
    said = run_peer(command)
    return {
        **said,
        "duration": said.get("seconds", 0.0),
        "total_token_throughput": said["total_tok_s"],
        "output_throughput": said.get("output_tok_s"),
    }


def _trace(path: str | None, options: ServingOptions) -> Trace:
    if path is None:
        return random_trace(
            options.num_prompts or 1,
            input_len=options.input_len,
            output_len=options.output_len,
            vocab_size=options.vocab_size,
            seed=options.seed,
        )
    trace = read_trace(path, num_requests=options.num_prompts)
    for request in trace.requests:
        if options.send_text and request.prompt is None:
            raise RequestError(f"request {request.id} of the trace has no text to send")
    return trace


def _client(url: str, options: ServingOptions) -> Client:
    endpoint = Endpoint.parse(url)
    headers = {} if options.api_key is None else {"Authorization": f"Bearer {options.api_key}"}
    model = options.model or asyncio.run(served_model(endpoint, headers))
    return Client(
        endpoint,
        model,
        headers,
        ignore_eos=options.ignore_eos,
        send_text=options.send_text,
        timeout_s=options.timeout_s,
    )


def _median_round(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The round of (lower) median duration."""
    return sorted(rounds, key=lambda figures: figures["duration"])[(len(rounds) - 1) // 2]


def _peer_report(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    """The peer's median round, and round by round how many times better ours was."""
    ratios = {}
    for better, worse, names in (
        (theirs, ours, LESS_IS_BETTER),
        (ours, theirs, MORE_IS_BETTER),
    ):
        for name in names:
            if all(one.get(name) for one in (*ours, *theirs)):
                pairs = ([one[name] for one in better], [one[name] for one in worse])
                ratios[name] = ratio_of_pairs(*pairs)._asdict()
    return {"figures": _median_round(theirs), "ratios": ratios}
