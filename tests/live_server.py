"""A served fake engine on a real socket, in a thread of the test, and raw HTTP to talk to it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from serve import ServeOptions, create_app
from tests.fake_engine import FakeEngine

PATIENCE_S = 10.0


def wait_until(condition: Callable[[], object], within_s: float = PATIENCE_S) -> float:
    """Seconds until the condition held; fails the test when it does not in time."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < within_s, f"still not true after {waited:.1f} s"
        time.sleep(0.005)
    return time.monotonic() - began


@dataclass(frozen=True)
class LiveServer:
    engine: FakeEngine
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers (lower case) and body; `body` is sent as JSON unless it is bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return (
                answer.status,
                {name.lower(): value for name, value in answer.getheaders()},
                answer.read(),
            )

    def open(self, path: str, body: Any) -> socket.socket:
        """A socket on which the request was sent and nothing was read."""
        data = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


@contextlib.contextmanager
def live_server(
    engine: FakeEngine, options: ServeOptions | None = None, *, ready: bool = True
) -> Iterator[LiveServer]:
    """The engine behind uvicorn on a free port of 127.0.0.1; stopped at the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(engine, options or ServeOptions()),
        http="httptools",
        ws="none",
        lifespan="on",
        log_config=None,
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        if ready:
            wait_until(lambda: engine.state != "loading" and engine.state != "compiling")
        yield LiveServer(engine, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        listener.close()
        assert not thread.is_alive()
        assert not engine.running, "a request outlived its server"


def events(stream: bytes) -> list[Any]:
    """The data of each event of a whole stream, decoded; "[DONE]" as it is."""
    assert stream.endswith(b"\n\n")
    lines = stream.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
