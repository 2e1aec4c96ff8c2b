"""How a server starts and how it ends: states, signals, exit codes."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from serve.errors import DrainTimeoutError, NotReadyError
from serve.gate import Gate
from tests.fake_engine import FakeEngine, text_of
from tests.live_server import LiveServer, events, live_server, server_process, wait_until

ROOT = Path(__file__).resolve().parent.parent
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hi", "max_tokens": 25, "stream": True}


def health(server: LiveServer) -> tuple[int, str]:
    status, headers, body = server.request("GET", "/health")
    assert status == 200 or headers["retry-after"]
    return status, json.loads(body)["state"]


def read_to_the_end(connection: socket.socket) -> list:
    """The events of a chunked response, whole or cut off."""
    answer = b""
    while piece := connection.recv(100_000):
        answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), answer
    data = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        data, body = data + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return events(data)


# Starting


def test_the_port_answers_while_the_engine_loads_and_compiles():
    with live_server(FakeEngine(start_s=0.8), ready=False) as server:
        assert health(server) == (503, "loading")
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), ("/tokenize", {"prompt": "hi"})):
            status, headers, answer = server.request("POST", path, body)
            assert (status, headers["retry-after"]) == (503, "5")
            assert json.loads(answer)["error"]["code"] == "not_ready"
            assert "x-should-retry" not in headers
        assert server.request("GET", "/v1/models")[0] == 503
        assert server.request("GET", "/ping")[0] == 200
        wait_until(lambda: health(server) == (503, "compiling"))
        wait_until(lambda: health(server) == (200, "ready"))
        assert server.request("GET", "/v1/models")[0] == 200
        assert (server.engine.num_starts, server.engine.num_shutdowns) == (1, 0)
    assert server.engine.num_shutdowns == 1


def test_stopping_while_the_engine_loads_does_not_wait_for_it():
    with live_server(FakeEngine(start_s=60), ready=False) as server:
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert server.engine.num_shutdowns == 1


def test_an_engine_that_cannot_start_ends_the_process():
    with server_process("--start-fails", ready=False) as (_, process):
        assert process.wait(10) == 1
        log = process.stderr.read()
    assert "The engine could not start: no such weights" in log
    assert "Traceback" not in log


def test_a_port_that_is_taken_is_told_in_a_line():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "tests.fake_engine", "--port", str(port)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert f"Cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr


# Draining


def test_a66_sigterm_lets_streams_finish_and_turns_others_away():
    with server_process("--delay-s", "0.05") as (server, process):
        streams = [server.open(COMPLETIONS, LONG) for _ in range(2)]
        for connection in streams:
            connection.recv(1, socket.MSG_PEEK)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: health(server) == (503, "draining"))
        status, headers, answer = server.request("POST", COMPLETIONS, LONG)
        assert (status, headers["retry-after"]) == (503, "5")
        assert json.loads(answer)["error"]["code"] == "not_ready"
        assert server.request("GET", "/v1/models")[0] == 503
        assert server.request("GET", "/ping")[0] == 200
        for connection in streams:
            with contextlib.closing(connection):
                told = read_to_the_end(connection)
            assert told[-1] == "[DONE]"
            assert "".join(c["choices"][0]["text"] for c in told[:-1]) == text_of(25)
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


def test_a66_past_the_deadline_the_rest_get_an_error_event():
    with server_process("--delay-s", "0.05", "--drain-timeout-s", "0.5") as (server, process):
        streamed = server.open(COMPLETIONS, LONG | {"max_tokens": 5000})
        whole = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 5000})
        streamed.recv(1, socket.MSG_PEEK)
        process.send_signal(signal.SIGTERM)
        with contextlib.closing(streamed):
            told = read_to_the_end(streamed)
        assert told[-1] == "[DONE]"
        assert told[-2]["error"]["code"] == "shutting_down"
        with contextlib.closing(whole):
            assert whole.recv(1000).startswith(b"HTTP/1.1 503 ")
        assert process.wait(10) == 0


def test_a_second_signal_cuts_the_rest_off_at_once():
    with server_process("--delay-s", "0.05", "--drain-timeout-s", "60") as (server, process):
        connection = server.open(COMPLETIONS, LONG | {"max_tokens": 5000})
        connection.recv(1, socket.MSG_PEEK)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: health(server) == (503, "draining"))
        process.send_signal(signal.SIGINT)
        with contextlib.closing(connection):
            assert read_to_the_end(connection)[-2]["error"]["code"] == "shutting_down"
        assert process.wait(10) == 0


def test_an_idle_server_ends_at_once():
    with (
        server_process() as (server, process),
        contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 10)),
    ):
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0


def test_sigterm_while_loading_ends_the_process():
    with server_process("--start-s", "60", ready=False) as (server, process):
        assert health(server) == (503, "loading")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


# Dying


def test_a68_a_dead_engine_ends_the_process_when_so_configured():
    with server_process("--dies-after", "3", "--exit-when-dead") as (server, process):
        with contextlib.closing(server.open(COMPLETIONS, LONG)) as connection:
            assert read_to_the_end(connection)[-2]["error"]["code"] == "engine_dead"
        assert process.wait(10) == 1


def test_a68_without_that_the_process_stays_and_says_so():
    with server_process("--dies-after", "3") as (server, process):
        status, _, _ = server.request("POST", COMPLETIONS, {"prompt": "hi"})
        assert status == 503
        assert health(server) == (503, "dead")
        assert server.request("GET", "/ping")[0] == 503
        time.sleep(0.5)
        assert process.poll() is None


# The gate alone


async def ready_gate() -> Gate:
    gate = Gate(FakeEngine())
    await gate.start_engine()
    return gate


async def test_drain_waits_for_those_inside():
    gate = await ready_gate()
    with gate.visit():
        draining = asyncio.create_task(gate.drain(10))
        await asyncio.sleep(0.05)
        assert gate.state == "draining"
        assert not draining.done()
        with pytest.raises(NotReadyError, match="draining"), gate.visit():
            pass
    await asyncio.wait_for(draining, 1)


async def test_drain_tells_those_who_are_too_long():
    gate = await ready_gate()
    told = []
    with gate.visit(), gate.told_of_timeout(told.append):
        await gate.drain(0.01)
        assert [type(error) for error in told] == [DrainTimeoutError]
    await asyncio.wait_for(gate.drain(10), 1)
    assert len(told) == 1


def test_signals_are_left_alone_when_the_app_is_somebody_elses():
    before = signal.getsignal(signal.SIGTERM)
    with live_server(FakeEngine()) as server:
        assert server.request("GET", "/health")[0] == 200
        assert signal.getsignal(signal.SIGTERM) is before
