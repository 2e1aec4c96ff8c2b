"""Traces: which requests arrive when, and how long they are. JSON lines, also gzipped.

    {"id": 0, "arrival_s": 0.0, "prompt": "...", "prompt_token_ids": [5, 9], "max_tokens": 40}

`arrival_s` may be left out (everything at once), and so may one of the two forms of the prompt.
"""

import dataclasses
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from paged_jax.errors import RequestError

__all__ = ["Trace", "TraceRequest", "equal_lengths", "read_trace", "with_token_ids"]


@dataclass(frozen=True)
class TraceRequest:
    """One request; lengths in tokens. Without `prompt_token_ids` the text is all that is known."""

    id: str
    arrival_s: float
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True)
class Trace:
    """The requests in the order in which they arrive."""

    name: str
    requests: tuple[TraceRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(request.num_tokens for request in self.requests)

    @property
    def mean_held_len(self) -> float:
        """Mean length, in tokens, of a sequence over the steps in which it holds a slot.

        With its prompt prefilled in one step, a request of p + m tokens is p, p + 1, ...,
        p + m - 1 tokens long in its m steps.
        """
        lengths = sum(
            request.max_tokens * (request.num_prompt_tokens + (request.max_tokens - 1) / 2)
            for request in self.requests
        )
        return lengths / self.num_output_tokens

    def num_shareable_tokens(self, block_size: int) -> int:
        """Prompt tokens that a cache of whole blocks can save: those of a prefix that an earlier
        prompt begins with too. A prompt's last token is always computed.
        """
        seen: set[tuple[int, ...]] = set()
        shareable = 0
        for request in self.requests:
            ids = request.prompt_token_ids
            edges = range(block_size, len(ids), block_size)
            hits = itertools.takewhile(lambda edge, ids=ids: ids[:edge] in seen, edges)  # type: ignore[misc]
            shareable += block_size * sum(1 for _ in hits)
            seen.update(ids[:edge] for edge in range(block_size, len(ids) + 1, block_size))
        return shareable

    def summary(self) -> dict[str, Any]:
        """Its sizes, for a report."""
        lengths = [request.num_tokens for request in self.requests]
        return {
            "name": self.name,
            "requests": len(self.requests),
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "mean_len": sum(lengths) / len(lengths),
            "max_len": self.longest,
        }


def read_trace(path: str, *, num_requests: int | None = None) -> Trace:
    """Read a trace, or its first `num_requests`. RequestError names the line of what is wrong."""
    file = Path(path)
    try:
        data = file.read_bytes()
        text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode()
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    requests = list(itertools.islice(_parse(text, path), num_requests))
    if not requests:
        raise RequestError(f"{path} holds no requests")
    requests.sort(key=lambda request: request.arrival_s)
    return Trace(file.name.removesuffix(".gz").removesuffix(".jsonl"), tuple(requests))


def _parse(text: str, name: str) -> Iterator[TraceRequest]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line), default_id=str(number - 1))
        except json.JSONDecodeError as error:
            raise RequestError(f"{name}, line {number}: not JSON: {error.msg}") from error
        except RequestError as error:
            raise RequestError(f"{name}, line {number}: {error}", param=error.param) from error


def _request(body: Any, default_id: str) -> TraceRequest:
    if not isinstance(body, Mapping):
        raise RequestError(f"expected an object, got {body!r:.60}")
    ids, prompt = body.get("prompt_token_ids"), body.get("prompt")
    if ids is None and prompt is None:
        raise RequestError("a request needs prompt_token_ids or prompt", param="prompt_token_ids")
    if prompt is not None and (not isinstance(prompt, str) or not prompt):
        raise RequestError(f"prompt must be a text, got {prompt!r:.60}", param="prompt")
    if ids is not None and (
        not isinstance(ids, list) or not ids or not all(_is_count(token) for token in ids)
    ):
        raise RequestError("prompt_token_ids must be a list of token ids", param="prompt_token_ids")
    max_tokens, arrival_s = body.get("max_tokens"), body.get("arrival_s", 0.0)
    if not _is_count(max_tokens) or max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {max_tokens!r}", param="max_tokens")
    if not isinstance(arrival_s, int | float) or not 0 <= arrival_s < float("inf"):
        raise RequestError(f"arrival_s must be a time, got {arrival_s!r}", param="arrival_s")
    return TraceRequest(
        str(body.get("id", default_id)), float(arrival_s), prompt, tuple(ids or ()), max_tokens
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def with_token_ids(trace: Trace, encode: Callable[[str], Sequence[int]]) -> Trace:
    """The trace with the texts encoded that come without token ids."""
    requests = tuple(
        request
        if request.prompt_token_ids or request.prompt is None
        else dataclasses.replace(request, prompt_token_ids=tuple(encode(request.prompt)))
        for request in trace.requests
    )
    return dataclasses.replace(trace, requests=requests)


def equal_lengths(trace: Trace, num_slots: int) -> Trace:
    """A control: whole batches of requests that are all as long as this trace's mean.

    Where every sequence ends at the same time there is nothing for continuous batching to gain.
    Prompts are cut from the trace's own tokens, no two from the same place.
    """
    num_requests = max(1, len(trace.requests) // num_slots) * num_slots
    prompt_len = round(trace.num_prompt_tokens / len(trace.requests))
    output_len = round(trace.num_output_tokens / len(trace.requests))
    every_id = itertools.cycle(token for r in trace.requests for token in r.prompt_token_ids)
    requests = tuple(
        TraceRequest(str(i), 0.0, None, tuple(itertools.islice(every_id, prompt_len)), output_len)
        for i in range(num_requests)
    )
    return Trace(f"{trace.name}-equal-lengths", requests)
