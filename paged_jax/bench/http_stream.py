"""A small HTTP/1.1 client over asyncio's own streams: JSON out, JSON or server-sent events in.

Nothing stands between the socket and the clock. One connection for each request, no redirects.
"""

import asyncio
import contextlib
import json
import ssl
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple

from paged_jax.errors import ConfigError, PagedJaxError

__all__ = ["Endpoint", "Event", "HTTPError", "get_json", "post_events"]

DONE = b"[DONE]"
MAX_HEAD_BYTES = 64 * 1024
BODY_SHOWN = 300


class HTTPError(PagedJaxError):
    """The server could not be reached, broke off, or answered with an error."""


class Endpoint(NamedTuple):
    """A server's address, and what every path on it begins with."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, base_url: str) -> "Endpoint":
        """Read `http://host:port` or `https://host/prefix`; a `/v1` at the end is taken off.

        ConfigError if it is no such address.
        """
        try:
            parts = urllib.parse.urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"base_url={base_url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"base_url={base_url!r} must look like http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)


class Event(NamedTuple):
    """The data of a server-sent event, decoded, and the clock (perf_counter) when it came."""

    at: float
    data: Any


async def get_json(endpoint: Endpoint, path: str, headers: Mapping[str, str]) -> Any:
    """The decoded body of a GET. Raises HTTPError."""
    async with _response(endpoint, "GET", path, headers, b"") as response:
        body = b"".join([piece async for piece in response.pieces()])
        return _decoded(response.status, body)


async def post_events(
    endpoint: Endpoint, path: str, headers: Mapping[str, str], body: Mapping[str, Any]
) -> AsyncGenerator[Event, None]:
    """The events that answer a POST, until `[DONE]` or the end. Raises HTTPError.

    Closing the generator early closes the connection.
    """
    data = json.dumps(body).encode()
    async with _response(endpoint, "POST", path, headers, data) as response:
        if response.status != 200:
            said = b"".join([piece async for piece in response.pieces()])
            _decoded(response.status, said)
        rest = b""
        async for piece in response.pieces():
            at = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                text = line[len(b"data:") :].strip()
                if text == DONE:
                    return
                event = _decoded(response.status, text)
                if isinstance(event, dict) and "error" in event:
                    raise HTTPError(f"the server sent an error: {event['error']!r:.{BODY_SHOWN}}")
                yield Event(at, event)


def _decoded(status: int, body: bytes) -> Any:
    if status == 200:
        try:
            return json.loads(body)
        except ValueError:
            pass
    shown = body[:BODY_SHOWN].decode(errors="replace")
    raise HTTPError(f"the server answered {status}: {shown}")


class _Response:
    """The head of a response, and its body piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]):
        self.status = status
        self._reader = reader
        self._headers = headers

    async def pieces(self) -> AsyncIterator[bytes]:
        """Parts of the body as they come: chunks, or what has arrived."""
        if self._headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._reader.readline()).split(b";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._reader.readexactly(2)
            return
        length = self._headers.get("content-length")
        left = None if length is None else int(length)
        while left is None or left > 0:
            piece = await self._reader.read(MAX_HEAD_BYTES if left is None else left)
            if not piece:
                if left:
                    raise asyncio.IncompleteReadError(b"", left)
                return
            left = None if left is None else left - len(piece)
            yield piece


@contextlib.asynccontextmanager
async def _response(
    endpoint: Endpoint, method: str, path: str, headers: Mapping[str, str], body: bytes
) -> AsyncIterator[_Response]:
    """Send a request and read the head of what comes back; closes the connection at the end."""
    writer = None
    try:
        context = ssl.create_default_context() if endpoint.tls else None
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=context, limit=MAX_HEAD_BYTES
        )
        writer.write(_head(endpoint, method, path, headers, len(body)) + body)
        await writer.drain()
        status, answer_headers = _parse_head(await reader.readuntil(b"\r\n\r\n"))
        yield _Response(reader, status, answer_headers)
    except (EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise HTTPError(f"the server broke off, or did not speak HTTP: {error}") from error
    except OSError as error:
        where = f"{endpoint.host}:{endpoint.port}"
        raise HTTPError(f"{where}: {error.strerror or error}") from error
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _head(
    endpoint: Endpoint, method: str, path: str, headers: Mapping[str, str], num_bytes: int
) -> bytes:
    lines = [
        f"{method} {endpoint.prefix}{path} HTTP/1.1",
        f"Host: {endpoint.host}:{endpoint.port}",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {num_bytes}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Status and headers, their names in lower case."""
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    protocol, _, status = first.partition(" ")
    if not protocol.startswith("HTTP/1."):
        raise ValueError(f"it began with {first!r:.60}")
    return int(status[:3]), headers
