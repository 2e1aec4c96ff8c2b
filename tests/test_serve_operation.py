"""Keys, origins, paths, queues, deadlines, watchdogs: what an operator sets around the engine."""

import contextlib
import hmac
import json
import logging
import socket
import sys
import threading
import time

import pytest

from serve import ServeOptions
from serve.api_keys import ApiKeys
from serve.load_report import load_report
from serve.logs import JsonFormatter, TextFormatter, current_request_id
from tests.fake_engine import FakeEngine, FakeStats
from tests.live_server import (
    LiveServer,
    events,
    live_server,
    server_process,
    tiny_server,
    wait_until,
)
from tests.tiny_models import write_tiny_llama

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"prompt": "hi", "max_tokens": 3}
KEY = {"authorization": "Bearer first-key"}


def code_of(server: LiveServer, *request) -> tuple[int, str]:
    status, _, body = server.request(*request)
    return status, json.loads(body)["error"]["code"]


# Keys


@pytest.fixture(scope="module")
def locked():
    options = ServeOptions(
        api_key=("first-key", "second-key"),
        root_path="/llm",
        cors_origin=("https://page.example",),
    )
    with live_server(FakeEngine(), options) as server:
        yield server


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer third-key"}])
@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/llm/v1/completions", "//v1/completions", "/v1/completions/"]
)
def test_a65_without_a_key_no_spelling_of_a_path_gets_in(locked, path, headers):
    status, answered, body = locked.request("POST", path, HI, headers)
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    assert answered["www-authenticate"] == "Bearer"
    assert answered["x-request-id"]
    for method in ("HEAD", "GET", "PUT"):
        assert locked.request(method, path, None, headers)[0] == 401
    assert not locked.engine.seen


@pytest.mark.parametrize("path", ["/health/", "//health", "/v1/../health", "/tokenize", "/nowhere"])
def test_a65_only_the_probes_themselves_need_no_key(locked, path):
    for open_path in ("/health", "/ping", "/live", "/metrics", "/llm/health"):
        assert locked.request("GET", open_path)[0] == 200
    assert locked.request("HEAD", "/health")[0] == 200
    assert locked.request("GET", path)[0] == 401


def test_a65_a_websocket_handshake_is_refused(locked):
    with contextlib.closing(locked.connect()) as connection:
        connection.sendall(
            b"GET /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 401 ")


async def test_a65_a_websocket_of_another_server_is_closed():
    async def app(scope, receive, send):
        raise AssertionError("got in")

    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/completions", "headers": []}
    await ApiKeys(app, ["key"])(scope, None, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a65_a_preflight_succeeds_and_runs_nothing(locked):
    headers = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    status, answered, _ = locked.request("OPTIONS", COMPLETIONS, None, headers)
    assert status == 200
    assert answered["access-control-allow-origin"] == "https://page.example"
    assert "POST" in answered["access-control-allow-methods"]
    assert "authorization" in answered["access-control-allow-headers"]
    headers["origin"] = "https://other.example"
    assert locked.request("OPTIONS", COMPLETIONS, None, headers)[0] == 400
    assert not locked.engine.seen


@pytest.mark.parametrize("key", ["first-key", "second-key"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/llm" + COMPLETIONS])
def test_a65_with_a_key_both_paths_lead_in(locked, path, key):
    headers = {"authorization": f"Bearer {key}", "origin": "https://page.example"}
    status, answered, _ = locked.request("POST", path, HI, headers)
    assert status == 200
    assert answered["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in answered["access-control-expose-headers"]
    locked.engine.seen.clear()


def test_a65_comparing_keys_looks_at_all_of_every_key(locked, monkeypatch):
    compared = []
    real = hmac.compare_digest

    def counted(a, b):
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    for key in ("first-key", "second-key", "f", "x" * 5000, ""):
        compared.clear()
        locked.request("GET", "/v1/models", None, {"authorization": f"Bearer {key}"})
        assert compared == [(32, 32)] * 2


def test_without_keys_and_origins_nothing_is_asked_and_nothing_allowed():
    with live_server(FakeEngine()) as server:
        status, headers, _ = server.request(
            "POST", COMPLETIONS, HI, {"origin": "https://a.example"}
        )
        assert status == 200
        assert "access-control-allow-origin" not in headers
        assert server.request("GET", "/llm/health")[0] == 404


# The queue


@pytest.mark.parametrize("streamed", [False, True])
def test_a_full_queue_turns_requests_away_until_there_is_room(streamed):
    engine = FakeEngine(delay_s=0.02, max_num_seqs=2)
    with (
        live_server(engine, ServeOptions(max_queued=1)) as server,
        contextlib.ExitStack() as inside,
    ):
        long = {"prompt": "hi", "max_tokens": 500, "stream": streamed}
        for _ in range(3):
            inside.enter_context(contextlib.closing(server.open(COMPLETIONS, long)))
        wait_until(lambda: len(engine.running) == 3)
        status, headers, body = server.request("POST", COMPLETIONS, long)
        assert (status, headers["retry-after"]) == (429, "1")
        error = json.loads(body)["error"]
        assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
        assert "3 samples" in error["message"]
        assert server.request("POST", CHAT, {"messages": []})[0] == 429
        assert server.request("POST", "/tokenize", {"prompt": "hi"})[0] == 200
        inside.close()
        wait_until(lambda: not engine.running)
        assert server.request("POST", COMPLETIONS, HI)[0] == 200
        assert len(engine.seen) == 4


def test_a_large_request_gets_in_where_there_is_room_at_all():
    with live_server(FakeEngine(max_num_seqs=1), ServeOptions(max_queued=0)) as server:
        status, answer = server.post(COMPLETIONS, HI | {"n": 4})
        assert (status, len(answer["choices"])) == (200, 4)


# Deadlines


@pytest.mark.parametrize(
    ("field", "headers", "option"),
    [
        ({"timeout_s": 0.2}, {}, None),
        ({}, {"x-request-timeout-s": "0.2"}, None),
        ({}, {}, 0.2),
        ({"timeout_s": 100}, {"x-request-timeout-s": "50"}, 0.2),
    ],
)
def test_a_request_ends_at_its_deadline(field, headers, option):
    with live_server(FakeEngine(delay_s=0.02), ServeOptions(request_timeout_s=option)) as server:
        body = {"prompt": "hi", "max_tokens": 1000} | field
        began = time.monotonic()
        status, answered, data = server.request("POST", COMPLETIONS, body, headers)
        assert (status, answered["x-should-retry"]) == (408, "false")
        error = json.loads(data)["error"]
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout")
        assert "0.2 s" in error["message"]
        _, _, data = server.request("POST", COMPLETIONS, body | {"stream": True}, headers)
        told = events(data)
        assert time.monotonic() - began < 5
        assert told[-1] == "[DONE]"
        assert told[-2]["error"]["code"] == "deadline_exceeded"
        assert len(told) > 3
        wait_until(lambda: server.engine.num_aborted == 2)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
        assert server.request("POST", COMPLETIONS, HI, headers)[0] == 200


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e7", "soon", ""])
def test_a_deadline_that_is_none_is_refused_by_name(value):
    with live_server(FakeEngine()) as server:
        status, answer = server.post(COMPLETIONS, HI, {"x-request-timeout-s": value})
        assert (status, answer["error"]["param"]) == (400, "x-request-timeout-s")
        for timeout_s in (0, -1, 1e300, "soon"):
            status, answer = server.post(COMPLETIONS, HI | {"timeout_s": timeout_s})
            assert (status, answer["error"]["param"]) == (400, "timeout_s")


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("serve.body.BODY_TIMEOUT_S", 0.2)
    with live_server(FakeEngine()) as server, contextlib.closing(server.connect()) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9\r\n\r\n{")
        answer = raw.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"deadline_exceeded" in answer


# The watchdog


def test_a69_an_engine_that_hangs_is_unwell_until_it_goes_on():
    with live_server(FakeEngine(), ServeOptions(step_timeout_s=2)) as server:
        server.engine.step_age_s = 1.9
        assert server.request("GET", "/health")[0] == 200
        server.engine.step_age_s = 2.1
        for path in ("/health", "/ping", "/live"):
            status, _, body = server.request("GET", path)
            assert (status, json.loads(body)) == (503, {"state": "hung"})
        assert code_of(server, "POST", COMPLETIONS, HI) == (503, "not_ready")
        assert server.scrape()["paged_jax:engine_state", frozenset({("state", "hung")})] == 1
        server.engine.step_age_s = 0.0
        assert server.request("GET", "/health")[0] == 200
        assert server.request("POST", COMPLETIONS, HI)[0] == 200


def test_a69_a_step_that_blocks_is_seen_and_one_that_compiles_is_not(tmp_path, monkeypatch):
    write_tiny_llama(tmp_path)
    body = {"prompt": [5, 6], "max_tokens": 2, "temperature": 0}
    go_on, blocked = threading.Event(), threading.Event()
    with tiny_server(tmp_path, ServeOptions(step_timeout_s=0.3), warmup="none") as server:
        inner = server.engine._engine
        compile_all, step = inner.runner.compile_all, inner.step
        slow = []

        def compile_slowly(programs, done):
            if not slow:
                slow.append(programs)
                time.sleep(0.6)
            compile_all(programs, done)

        monkeypatch.setattr(inner.runner, "compile_all", compile_slowly)
        with contextlib.closing(server.open(COMPLETIONS, body)):
            wait_until(lambda: slow)
            seen = set()
            while len(inner.records) == 0:
                seen.add(server.request("GET", "/health")[0])
                time.sleep(0.02)
        assert seen == {200}, "compiling took the step's time"

        def block():
            blocked.set()
            assert go_on.wait(30)
            return step()

        wait_until(lambda: not inner.has_unfinished)
        monkeypatch.setattr(inner, "step", block)
        with contextlib.closing(server.open(COMPLETIONS, body)) as connection:
            assert blocked.wait(30)
            waited = wait_until(lambda: server.request("GET", "/health")[0] == 503)
            assert waited < 5
            assert server.request("GET", "/live")[0] == 503
            go_on.set()
            assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert server.request("GET", "/health")[0] == 200


# The load, the log


def test_the_load_is_told_to_whoever_asks_for_it():
    with live_server(FakeEngine()) as server:
        for path, method, body in (("/health", "GET", None), (COMPLETIONS, "POST", HI)):
            assert "endpoint-load-metrics" not in server.request(method, path, body)[1]
            for form in ("JSON", "json", "TEXT"):
                asked = {"endpoint-load-metrics-format": form}
                told = server.request(method, path, body, asked)[1]["endpoint-load-metrics"]
                assert told.startswith(form.upper() + " ")
        asked["endpoint-load-metrics-format"] = "BIN"
        assert "endpoint-load-metrics" not in server.request("GET", "/health", None, asked)[1]


def test_a_load_report_says_how_full_it_is():
    stats = FakeStats(num_running=4, num_waiting=4, max_num_seqs=4, kv_cache_usage=0.25)
    kind, _, report = load_report(stats, "JSON").partition(" ")
    assert (kind, json.loads(report)) == (
        "JSON",
        {
            "application_utilization": 2.0,
            "named_metrics": {
                "kv_cache_usage_perc": 0.25,
                "num_requests_running": 4,
                "num_requests_waiting": 4,
            },
        },
    )
    assert load_report(FakeStats(num_running=1, kv_cache_usage=0.5), "TEXT") == (
        "TEXT application_utilization=0.5, named_metrics.kv_cache_usage_perc=0.5, "
        "named_metrics.num_requests_running=1, named_metrics.num_requests_waiting=0"
    )


def record_of(name: str, message: str, *args) -> logging.LogRecord:
    return logging.LogRecord(name, logging.INFO, __file__, 1, message, args, None)


def test_a_log_line_names_its_request():
    access = record_of(
        "uvicorn.access", '%s - "%s %s HTTP/%s" %d', "1.2.3.4:5", "POST", COMPLETIONS, "1.1", 200
    )
    plain = record_of("serve", "said %s", "this")
    assert TextFormatter().format(plain).endswith("INFO said this")
    token = current_request_id.set("abc")
    try:
        assert TextFormatter().format(plain).endswith("INFO said this [abc]")
        line = JsonFormatter().format(access)
        told = json.loads(line)
    finally:
        current_request_id.reset(token)
    assert "\n" not in line
    assert told.pop("time").endswith("+00:00")
    assert told == {
        "level": "INFO",
        "logger": "uvicorn.access",
        "message": f'1.2.3.4:5 - "POST {COMPLETIONS} HTTP/1.1" 200',
        "request_id": "abc",
        "client": "1.2.3.4:5",
        "method": "POST",
        "path": COMPLETIONS,
        "status": 200,
    }
    try:
        raise ValueError("innards")
    except ValueError:
        failed = record_of("x", "bad")
        failed.exc_info = sys.exc_info()
    assert "ValueError: innards" in json.loads(JsonFormatter().format(failed))["traceback"]


def test_json_lines_of_a_process_carry_request_ids_and_unknown_fields():
    with server_process("--log-format", "json", ready=False) as (server, process):
        wait_until(lambda: server.request("GET", "/health")[0] == 200)
        body = {"prompt": "hi", "max_tokens": 1, "no_such_field": 1, "request_id": "mine"}
        status, headers, _ = server.request("POST", COMPLETIONS, body)
        assert (status, headers["x-paged-jax-ignored-fields"]) == (200, "no_such_field")
        process.terminate()
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    access = [line for line in lines if line.get("path") == COMPLETIONS]
    assert [(line["request_id"], line["status"]) for line in access] == [("mine", 200)]
    assert [line["level"] for line in lines if "no_such_field" in line["message"]] == ["INFO"]


def test_the_queue_is_bounded_for_bodies_that_are_still_read():
    """Requests that were let in while there was room are turned away when they come to it."""
    engine = FakeEngine(delay_s=0.02, max_num_seqs=1)
    body = json.dumps({"prompt": "hi", "max_tokens": 500}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with live_server(engine, ServeOptions(max_queued=0)) as server:
        slow: list[socket.socket] = [server.connect() for _ in range(3)]
        for connection in slow:
            connection.sendall(head + body[:5])
        time.sleep(0.1)
        for connection in slow:
            connection.sendall(body[5:])
        wait_until(lambda: len(engine.running) == 1)
        refused = []
        for connection in slow:
            connection.settimeout(0.3)
            with contextlib.suppress(TimeoutError):
                refused.append(connection.recv(1000)[:13])
            connection.close()
        assert refused == [b"HTTP/1.1 429 "] * 2
        assert len(engine.seen) == 1
