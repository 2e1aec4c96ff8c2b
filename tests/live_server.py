"""A served engine on a real socket, in a thread of the test, and raw HTTP to talk to it."""

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from paged_jax import AsyncEngine, Engine, EngineConfig
from paged_jax.progress import SilentProgress
from serve import ServeOptions, create_app

PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parent.parent


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
    engine: Any  # a FakeEngine or an AsyncEngine
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

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and decoded body of a request with a JSON answer."""
        status, _, answer = self.request("POST", path, body, headers)
        return status, json.loads(answer)

    def scrape(self) -> dict[tuple[str, frozenset], float]:
        """Every series of /metrics: its value by its name and its labels."""
        status, headers, body = self.request("GET", "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(body.decode())
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """The value of the series with these labels and the model's."""
        labels = {"model_name": self.engine.model_name, "engine": "0"} | labels
        return self.scrape()[name, frozenset(labels.items())]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def open(self, path: str, body: Any) -> socket.socket:
        """A socket on which the request was sent and nothing was read."""
        data = json.dumps(body).encode()
        connection = self.connect()
        head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection


@contextlib.contextmanager
def live_server(
    engine: Any,
    options: ServeOptions | None = None,
    *,
    ready: bool = True,
    tracer_provider: Any = None,
) -> Iterator[LiveServer]:
    """The engine behind uvicorn on a free port of 127.0.0.1; stopped at the end of the block."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_app(engine, options or ServeOptions(), tracer_provider=tracer_provider),
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
        assert not engine.stats().num_running, "a request outlived its server"


@contextlib.contextmanager
def server_process(
    *flags: str, ready: bool = True
) -> Iterator[tuple[LiveServer, subprocess.Popen]]:
    """A process that serves a fake engine; the LiveServer has no engine of its own to look at."""
    command = [sys.executable, "-m", "tests.fake_engine", "--port", "0", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stderr.readline()
        assert "Listening on http://127.0.0.1:" in line
        server = LiveServer(engine=None, port=int(re.search(r"127\.0\.0\.1:(\d+)", line).group(1)))
        if ready:
            wait_until(lambda: server.request("GET", "/health")[0] == 200)
        yield server, process
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()


@contextlib.contextmanager
def tiny_server(
    directory: Path, options: ServeOptions | None = None, **config: Any
) -> Iterator[LiveServer]:
    """The model in `directory`, served by the real engine, which takes and gives token ids.

    At the end the engine's books are checked.
    """
    small = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "max_model_len": 128,
        "num_blocks": 200,
    }
    chosen = EngineConfig(model=str(directory), **(small | config))
    engine = Engine.from_pretrained(chosen, progress=SilentProgress())
    with live_server(AsyncEngine(chosen, make_engine=lambda: engine), options) as server:
        yield server
        wait_until(lambda: not engine.has_unfinished)
    engine.scheduler.check_invariants()


def events(stream: bytes) -> list[Any]:
    """The data of each event of a whole stream, decoded; "[DONE]" as it is."""
    assert stream.endswith(b"\n\n")
    lines = stream.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
