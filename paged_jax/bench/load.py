"""An open-loop load on an OpenAI-compatible server: requests are sent when they are due.

That a server is slow does not slow the arrivals, unless the number of requests inside is limited.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paged_jax.bench.http_stream import Endpoint, HTTPError, get_json, post_events
from paged_jax.bench.trace import Trace, TraceRequest
from paged_jax.errors import PagedJaxError

__all__ = ["Client", "Reply", "arrival_times", "random_trace", "run_load", "served_model"]

COMPLETIONS = "/v1/completions"
FIRST_RANDOM_ID = 16  # the ids below it are control tokens in many a vocabulary


@dataclass(frozen=True)
class Client:
    """Where requests go, and how they are put."""

    endpoint: Endpoint
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    ignore_eos: bool = True
    send_text: bool = False
    timeout_s: float = 600.0

    def body(self, request: TraceRequest) -> dict[str, Any]:
        as_text = self.send_text or not request.prompt_token_ids
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt if as_text else list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body


@dataclass
class Reply:
    """What came of one request. Seconds count from when it was sent; `wait_s` is how long before
    that it was due. Tokens are those of the server's `usage`, or else one for each event.
    """

    num_prompt_tokens: int
    num_output_tokens: int = 0
    wait_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    e2el_s: float = 0.0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between the tokens after the first; None where there are none."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)


async def served_model(endpoint: Endpoint, headers: Mapping[str, str]) -> str:
    """The first model that the server says it serves."""
    answer = await get_json(endpoint, "/v1/models", headers)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise PagedJaxError(f"/v1/models names no model: {answer!r:.200}") from error


def arrival_times(trace: Trace, rate: float | None, seed: int) -> list[float]:
    """Seconds, from the start, at which each request is due.

    `rate` is requests a second; infinity sends all at once. A trace with arrival times keeps
    their pattern, stretched or squeezed to the rate, or as it is without one; a trace without
    them gets a Poisson process of that rate.
    """
    given = [request.arrival_s for request in trace.requests]
    if rate == float("inf") or (rate is None and not given[-1]):
        return [0.0] * len(given)
    if rate is None:
        return given
    if given[-1] > given[0]:
        factor = (len(given) - 1) / rate / (given[-1] - given[0])
        return [(at - given[0]) * factor for at in given]
    gaps = np.random.default_rng(seed).exponential(1.0 / rate, len(given))
    return (np.cumsum(gaps) - gaps[0]).tolist()


def random_trace(
    num_requests: int, *, input_len: int, output_len: int, vocab_size: int, seed: int
) -> Trace:
    """Requests of random token ids, all of one size."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(FIRST_RANDOM_ID, vocab_size, (num_requests, input_len)).tolist()
    requests = tuple(
        TraceRequest(str(i), 0.0, None, tuple(prompt), output_len)
        for i, prompt in enumerate(prompts)
    )
    return Trace(f"random-{input_len}-{output_len}", requests)


async def run_load(
    client: Client,
    requests: Sequence[TraceRequest],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    advance: Callable[[int], None] = lambda amount: None,
) -> tuple[list[Reply], float]:
    """Send every request when it is due; the replies, and the seconds until the last one.

    With `max_concurrency` a request that is due waits until fewer are inside. `advance` hears of
    each that ends. A request that fails is a reply with an error, and stops no other.
    """
    inside: contextlib.AbstractAsyncContextManager[Any] = contextlib.nullcontext()
    if max_concurrency is not None:
        inside = asyncio.Semaphore(max_concurrency)
    began = time.perf_counter()

    async def send(request: TraceRequest, due_s: float) -> Reply:
        await asyncio.sleep(max(0.0, due_s - (time.perf_counter() - began)))
        due = time.perf_counter()
        async with inside:
            reply = await _ask(client, request)
        reply.wait_s = time.perf_counter() - due - reply.e2el_s
        advance(1)
        return reply

    replies = await asyncio.gather(*map(send, requests, arrivals))
    return replies, time.perf_counter() - began


async def _ask(client: Client, request: TraceRequest) -> Reply:
    reply = Reply(request.num_prompt_tokens)
    sent = time.perf_counter()
    try:
        async with asyncio.timeout(client.timeout_s):
            await _read(client, request, reply, sent)
    except TimeoutError:
        reply.error = f"no end within {client.timeout_s:g} s"
    except HTTPError as error:
        reply.error = str(error)
    reply.e2el_s = time.perf_counter() - sent
    if reply.error is None and not reply.num_output_tokens:
        reply.error = "the server sent no token"
    return reply


async def _read(client: Client, request: TraceRequest, reply: Reply, sent: float) -> None:
    """Note each event that holds a choice: the first token, then the gaps."""
    last = sent
    events = post_events(client.endpoint, COMPLETIONS, client.headers, client.body(request))
    num_events = 0
    async with contextlib.aclosing(events):
        async for at, data in events:
            usage = data.get("usage")
            if data.get("choices"):
                if num_events:
                    reply.itl_s.append(at - last)
                else:
                    reply.ttft_s = at - sent
                num_events += 1
                last = at
                reply.num_output_tokens = num_events
            if usage:
                reply.num_prompt_tokens = usage["prompt_tokens"]
                reply.num_output_tokens = usage["completion_tokens"]
