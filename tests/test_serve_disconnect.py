"""Clients that leave, and clients that read too slowly, on real sockets."""

import contextlib
import json
import socket
import struct
import threading
import time

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from serve import ServeOptions, create_app
from tests.fake_engine import FakeEngine, text_of
from tests.live_server import LiveServer, live_server, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 500},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500},
}
SOON_S = 1.0


def reset(connection: socket.socket) -> None:
    """Close as a killed client does, with a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a53_a_client_that_leaves_in_mid_answer_aborts_it(path, streamed, leave):
    with live_server(FakeEngine(delay_s=0.02)) as server:
        engine = server.engine
        connection = server.open(path, BODIES[path] | {"stream": streamed})
        wait_until(lambda: engine.num_tokens >= 3)
        leave(connection)
        wait_until(lambda: engine.num_aborted == 1, within_s=SOON_S)
        made = engine.num_tokens
        assert made < 100
        assert not engine.running
        time.sleep(0.1)
        assert engine.num_tokens == made
        assert server.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a24_a_client_that_leaves_before_the_first_token_aborts_it(streamed):
    with live_server(FakeEngine(prefill_s=30)) as server:
        connection = server.open(COMPLETIONS, BODIES[COMPLETIONS] | {"stream": streamed})
        wait_until(lambda: server.engine.running)
        connection.close()
        wait_until(lambda: server.engine.num_aborted == 1, within_s=SOON_S)
        assert server.engine.num_tokens == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_a25_a_client_that_leaves_ends_all_its_prompts(streamed):
    with live_server(FakeEngine(delay_s=0.02)) as server:
        body = {"prompt": ["a", "b", "c", "d"], "max_tokens": 500, "stream": streamed}
        connection = server.open(COMPLETIONS, body)
        wait_until(lambda: len(server.engine.running) == 4 and server.engine.num_tokens > 8)
        connection.close()
        wait_until(lambda: server.engine.num_aborted == 4, within_s=SOON_S)


def test_a25_a_hundred_clients_that_leave_leave_nothing_behind():
    with live_server(FakeEngine(delay_s=0.01)) as server:
        for i in range(100):
            connection = server.open(COMPLETIONS, BODIES[COMPLETIONS] | {"stream": True})
            if i % 2:
                connection.recv(10)
            connection.close()
        engine = server.engine
        wait_until(lambda: len(engine.seen) >= 50 and engine.num_aborted == len(engine.seen))
        assert not engine.running
        metrics = server.request("GET", "/metrics")[2].decode()
        assert 'num_requests_running{engine="0",model_name="fake/model"} 0.0' in metrics


def test_a_client_that_leaves_in_mid_body_never_reaches_the_engine():
    with live_server(FakeEngine()) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), 10)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt": ')
        connection.close()
        assert server.request("POST", COMPLETIONS, {"prompt": "hi"})[0] == 200
        assert len(server.engine.seen) == 1


def test_a_connection_serves_one_request_after_the_other():
    with live_server(FakeEngine()) as server:
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 10)) as raw:
            for streamed in (False, True, False, True):
                body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": streamed}).encode()
                head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n"
                raw.sendall(head.encode() + b"\r\n" + body)
                answer = raw.recv(100_000)
                while not answer.endswith(b"0\r\n\r\n" if streamed else b"}}"):
                    answer += raw.recv(100_000)
                assert answer.startswith(b"HTTP/1.1 200 ")
        assert server.engine.num_aborted == 0
        assert len(server.engine.seen) == 4


def test_no_middleware_of_the_kind_that_hides_disconnects():
    app = create_app(FakeEngine())
    kinds = [middleware.cls for middleware in app.user_middleware]
    assert kinds
    assert not any(
        isinstance(kind, type) and issubclass(kind, BaseHTTPMiddleware) for kind in kinds
    )
    stack = app.build_middleware_stack()
    while hasattr(stack, "app"):
        assert not isinstance(stack, BaseHTTPMiddleware)
        stack = stack.app


# Slow readers


@pytest.fixture
def slow_server():
    """An engine that makes a megabyte in an instant, and a server that keeps little of it."""
    engine = FakeEngine(pieces=("x" * 2000,))
    with live_server(engine, ServeOptions(max_unsent_bytes=100_000)) as server:
        yield server


def open_and_not_read(server: LiveServer) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({"prompt": "hi", "max_tokens": 15_000, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    pieces = []
    while not (pieces and pieces[-1].endswith(b"0\r\n\r\n")):
        piece = connection.recv(2**20)
        assert piece, "the server hung up"
        pieces.append(piece)
    return b"".join(pieces)


def test_a54_a_stream_that_is_not_read_is_aborted_at_its_bound(slow_server):
    engine = slow_server.engine
    with contextlib.closing(open_and_not_read(slow_server)) as connection:
        wait_until(lambda: engine.num_aborted == 1)
        made = engine.num_tokens
        assert made < 10_000  # of 15,000: the kernel's buffers hold some megabytes
        answer = read_all(connection)
    assert b'"code":"slow_reader"' in answer
    assert answer.count(b"data: [DONE]") == 1
    told = answer.count(b'"text":')
    assert told <= made
    assert made - told <= 2  # what waited was sent; the piece that found no room was not
    metrics = slow_server.request("GET", "/metrics")[2].decode()
    assert 'finished_reason="abort",model_name="fake/model"} 1.0' in metrics


def test_a54_a_slow_reader_does_not_hold_up_another(slow_server):
    answers = []

    def read_fast() -> None:
        body = {"prompt": "hi", "max_tokens": 300, "stream": True}
        answers.append(slow_server.request("POST", COMPLETIONS, body)[2])

    with contextlib.closing(open_and_not_read(slow_server)):
        wait_until(lambda: slow_server.engine.num_tokens > 100)
        fast = threading.Thread(target=read_fast)
        fast.start()
        fast.join(10)
        assert not fast.is_alive()
        assert answers[0].count(b'"text":') == 300
        wait_until(lambda: slow_server.engine.num_aborted == 1)


def test_a_reader_that_is_late_but_within_the_bound_gets_everything():
    with live_server(FakeEngine()) as server:
        body = {"prompt": "hi", "max_tokens": 2000, "stream": True}
        with contextlib.closing(server.open(COMPLETIONS, body)) as connection:
            wait_until(lambda: server.engine.num_tokens == 2000)
            answer = read_all(connection)
        assert answer.count(b'"text":') == 2000
        assert answer.count(b'"finish_reason":"length"') == 1
        assert text_of(1).encode() in answer
