"""What an operator can do to a running engine, and that nobody else can."""

import contextlib
import json
import threading

import pytest

from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, events, live_server, tiny_server, wait_until
from tests.tiny_models import write_tiny_llama

COMPLETIONS = "/v1/completions"
ADMIN = ServeOptions(enable_admin=True)
POSTS = ("/pause", "/resume", "/reset_prefix_cache", "/update_weights", "/sleep", "/wake_up")
LONG = {"prompt": "hi", "max_tokens": 40, "stream": True}


def state(server: LiveServer) -> tuple[int, str]:
    status, _, body = server.request("GET", "/health")
    return status, json.loads(body)["state"]


def told(server: LiveServer, path: str, body: dict | None = None) -> dict:
    status, _, data = server.request("POST", path, body)
    assert status == 200, data
    return json.loads(data)


def test_nobody_administers_a_server_that_does_not_offer_it():
    with live_server(FakeEngine()) as server:
        for path in POSTS:
            assert server.request("POST", path)[0] == 404
        assert server.request("GET", "/weight_info")[0] == 404
        assert not set(POSTS) & set(json.loads(server.request("GET", "/openapi.json")[2])["paths"])


def test_administering_needs_a_key_where_there_are_any():
    options = ServeOptions(enable_admin=True, api_key=("key",))
    with live_server(FakeEngine(), options) as server:
        assert server.request("POST", "/pause")[0] == 401
        assert server.request("POST", "/pause", None, {"authorization": "Bearer key"})[0] == 200


def test_a_pause_waits_for_those_inside_and_lets_nobody_in():
    with live_server(FakeEngine(delay_s=0.02), ADMIN) as server:
        answers: list = []
        with contextlib.closing(server.open(COMPLETIONS, LONG)) as stream:
            wait_until(lambda: server.engine.running)
            pausing = threading.Thread(target=lambda: answers.append(told(server, "/pause")))
            pausing.start()
            wait_until(lambda: state(server) == (503, "paused"))
            assert not answers
            status, headers, _ = server.request("POST", COMPLETIONS, LONG)
            assert (status, headers["retry-after"]) == (503, "5")
            assert server.request("GET", "/live")[0] == 200
            pausing.join(10)
            answer = b""
            while not answer.endswith(b"0\r\n\r\n"):
                answer += stream.recv(2**16)
        assert answers == [{"state": "paused", "version": 0}]
        assert answer.count(b'"finish_reason":"length"') == 1
        assert told(server, "/resume")["state"] == "ready"
        assert server.request("POST", COMPLETIONS, LONG)[0] == 200


def test_a_pause_may_end_what_runs():
    with live_server(FakeEngine(delay_s=0.02), ADMIN) as server:
        answers: list = []

        def ask() -> None:
            body = LONG | {"max_tokens": 5000}
            answers.append(events(server.request("POST", COMPLETIONS, body)[2]))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: server.engine.num_tokens)
        assert told(server, "/pause", {"mode": "abort"})["state"] == "paused"
        asking.join(10)
        assert answers[0][-2]["error"]["code"] == "paused"
        assert not server.engine.running


def test_what_is_asked_reaches_the_engine():
    with live_server(FakeEngine(), ADMIN) as server:
        told(server, "/reset_prefix_cache")
        answer = told(server, "/update_weights", {"path": "good", "version": "v2", "drain": "keep"})
        assert answer["version"] == "v2"
        assert json.loads(server.request("GET", "/weight_info")[2]) == {"version": "v2"}
        assert told(server, "/sleep", {"weights": "host"})["state"] == "asleep"
        assert state(server) == (503, "asleep")
        assert server.request("POST", COMPLETIONS, {"prompt": "hi"})[0] == 503
        assert told(server, "/wake_up")["state"] == "ready"
        assert server.engine.told == [
            ("reset_prefix_cache", {}),
            ("load_weights", {"version": "v2", "drain": "keep"}),
            ("sleep", {"weights": "host", "drain": "abort"}),
            ("wake", {}),
        ]


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/update_weights", {}, "path", None),
        ("/update_weights", {"path": "bad"}, None, "not_possible"),
        ("/update_weights", {"path": "good", "drain": "soon"}, "drain", None),
        ("/sleep", {"weights": "sell"}, "weights", None),
        ("/pause", {"mode": 1}, "mode", None),
    ],
)
def test_what_cannot_be_is_told(path, body, param, code):
    with live_server(FakeEngine(), ADMIN) as server:
        status, answer = server.post(path, body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
        assert state(server) == (200, "ready")


def test_a10_weights_are_exchanged_and_put_to_sleep_under_a_real_engine(tmp_path):
    for seed in (0, 1):
        write_tiny_llama(tmp_path / str(seed), seed=seed)
    write_tiny_llama(tmp_path / "other", hidden_size=32)
    body = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def ask() -> tuple[list[int], int]:
        status, answer = server.post(COMPLETIONS, body)
        assert status == 200, answer
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["token_ids"], cached

    with tiny_server(tmp_path / "0", ADMIN) as server:
        first, cached = ask()
        assert (ask(), cached) == ((first, 4), 0)
        told(server, "/reset_prefix_cache")
        assert ask() == (first, 0)
        status, answer = server.post("/update_weights", {"path": str(tmp_path / "other")})
        assert (status, answer["error"]["code"]) == (400, "not_possible")
        assert told(server, "/update_weights", {"path": str(tmp_path / "1")})["version"] == 1
        second, cached = ask()
        assert cached == 0
        assert second != first
        told(server, "/sleep", {"weights": "drop"})
        status, answer = server.post("/wake_up", {})
        assert (status, answer["error"]["code"]) == (400, "not_possible")
        assert state(server) == (503, "asleep")
        told(server, "/update_weights", {"path": str(tmp_path / "0"), "version": "again"})
        assert told(server, "/wake_up") == {"state": "ready", "version": "again"}
        assert ask() == (first, 0)
        assert server.request("GET", "/metrics")[0] == 200
