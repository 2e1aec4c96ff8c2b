"""Whose request it is: priority, tenant and cache salt, from the body and from trusted headers."""

import threading

import pytest

from scheduler import ORDER_POLICIES
from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, live_server, tiny_server, wait_until
from tests.tiny_models import write_tiny_llama

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FAIRNESS = "x-gateway-inference-fairness-id"
SAY_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine()) as server:
        yield server


def caller(server: LiveServer, headers: dict[str, str] | None = None, **body) -> dict:
    """What the engine is told of the sender; the same by every way to generate."""
    told = []
    for path, prompt in (
        (COMPLETIONS, {"prompt": "hi"}),
        (COMPLETIONS, {"prompt": "hi", "use_beam_search": True}),
        (CHAT, {"messages": SAY_HI}),
    ):
        status, answer = server.post(path, {"max_tokens": 1} | prompt | body, headers)
        assert status == 200, answer
        told.append(server.engine.callers[-1])
    assert told[0] == told[1] == told[2]
    return told[0]


def refused(server: LiveServer, headers: dict[str, str] | None = None, **body) -> dict:
    num_seen = len(server.engine.seen)
    status, answer = server.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 1} | body, headers)
    assert status == 400, answer
    assert len(server.engine.seen) == num_seen
    return answer["error"]


# What the engine is told


def test_fields_of_the_body(server):
    nobody = {"priority": 0, "tenant": "", "cache_salt": ""}
    assert caller(server) == nobody
    assert caller(server, priority=None, user=None, cache_salt=None) == nobody
    told = {"priority": -3, "tenant": "ann", "cache_salt": "s" * 256}
    assert caller(server, priority=-3, user="ann", cache_salt="s" * 256) == told


def test_the_gateways_header_comes_before_the_user(server):
    assert caller(server, {FAIRNESS: "team"}, user="ann")["tenant"] == "team"
    assert caller(server, {FAIRNESS: ""}, user="ann")["tenant"] == "ann"
    assert caller(server, {FAIRNESS: "x" * 256})["tenant"] == "x" * 256
    error = refused(server, {FAIRNESS: "x" * 257})
    assert (error["param"], "257" in error["message"]) == (FAIRNESS, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", ""),
        ("cache_salt", "s" * 257),
        ("cache_salt", 5),
        ("priority", "high"),
        ("priority", 1.5),
        ("priority", True),
        ("priority", 2**31),
        ("priority", -(2**31) - 1),
        ("user", 5),
        ("user", "u" * 257),
    ],
)
def test_a94_wrong_fields_are_refused_by_name(server, field, value):
    assert refused(server, **{field: value})["param"] == field


def test_only_the_operators_header_carries_a_salt(server):
    assert caller(server, {"x-salt": "team"})["cache_salt"] == ""


def test_a94_a_trusted_layer_sets_the_salt():
    with live_server(FakeEngine(), ServeOptions(cache_salt_header="X-Salt")) as server:

        def salt(header: str | None, own: str | None = None) -> str:
            headers = {} if header is None else {"x-salt": header}
            return caller(server, headers, cache_salt=own)["cache_salt"]

        assert salt("team") == salt("team")
        # A request can keep to itself inside of its team, and never reach into another's.
        several = [
            salt(None),
            salt(None, "team"),
            salt(None, salt("team")),
            salt("team"),
            salt("team", "x"),
            salt("tea", "m"),
            salt("teamx"),
            salt(salt("team")),
            salt("other", "x"),
        ]
        assert len(set(several)) == len(several)
        for wrong in ("", "s" * 257):
            assert refused(server, {"x-salt": wrong})["param"] == "X-Salt"


def test_a94_a_header_that_is_given_twice_is_refused():
    """A proxy that adds its header to the client's would let the client choose."""
    body = b'{"prompt": "hi"}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n"
    with live_server(FakeEngine(), ServeOptions(cache_salt_header="x-salt")) as server:
        with server.connect() as raw:
            raw.sendall(f"{head}x-salt: mine\r\nx-salt: theirs\r\n\r\n".encode() + body)
            answer = raw.recv(1000)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"given 2 times" in answer
        assert not server.engine.seen


def test_a_salt_header_must_have_a_headers_name():
    for wrong in ("", "x salt", "x:salt"):
        with pytest.raises(ValueError, match="cache_salt_header"):
            ServeOptions(cache_salt_header=wrong)


# What the engine makes of it


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    return directory


def num_cached(server: LiveServer, headers: dict[str, str] | None = None, **body) -> int:
    prompt = {"prompt": list(range(5, 69)), "max_tokens": 1}
    status, answer = server.post(COMPLETIONS, prompt | body, headers)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a94_only_requests_of_one_salt_share_prefixes(model):
    options = ServeOptions(cache_salt_header="x-salt")
    with tiny_server(model, options) as server:
        assert num_cached(server, cache_salt="a") == 0
        assert num_cached(server, cache_salt="a") == 60
        assert num_cached(server, cache_salt="b") == 0
        assert num_cached(server) == 0
        assert num_cached(server) == 60
        assert num_cached(server, {"x-salt": "team"}) == 0
        assert num_cached(server, {"x-salt": "team"}) == 60
        assert num_cached(server, {"x-salt": "team"}, cache_salt="a") == 0
        assert num_cached(server, {"x-salt": "other"}) == 0

        # Of this server's policy
        for stream in (False, True):
            body = {"prompt": [5, 6], "priority": 3, "stream": stream}
            status, answer = server.post(COMPLETIONS, body)
            assert (status, answer["error"]["param"]) == (400, "priority")
            assert "'fcfs'" in answer["error"]["message"]
        assert num_cached(server, priority=0) == 60


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Ids of the requests that the scheduler starts, in order."""
    ids: list[str] = []

    def watched(original):
        def started(self, request):
            ids.append(request.request_id)
            original(self, request)

        return started

    for name in ("priority", "fair"):
        policy = ORDER_POLICIES[name]
        monkeypatch.setattr(policy, "started", watched(policy.started))
    return ids


def all_at_once(server: LiveServer, requests: dict[str, dict]) -> None:
    """Send requests in turn while another one runs, and wait for all of them."""

    def ask(name: str, body: dict) -> None:
        assert server.post(COMPLETIONS, body, {"x-request-id": name})[0] == 200

    def is_there(num: int) -> bool:
        stats = server.engine.stats()
        return stats.num_running + stats.num_waiting == num

    long = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True}
    threads = []
    for name, body in {"first": long, **requests}.items():
        threads.append(threading.Thread(target=ask, args=(name, body)))
        threads[-1].start()
        wait_until(lambda: is_there(len(threads)))
    for thread in threads:
        thread.join()


ONE_BY_ONE = {"max_num_seqs": 1, "max_model_len": 512}


def test_a_lower_priority_goes_first(model, started):
    body = {"prompt": [8, 9], "max_tokens": 4}
    with tiny_server(model, scheduling_policy="priority", **ONE_BY_ONE) as server:
        all_at_once(
            server,
            {
                "later": body | {"priority": 7},
                "usual": body,
                "urgent": body | {"priority": -1},
                "another": body | {"priority": 0},
            },
        )
    assert [name.split("-")[1] for name in started] == [
        "first",
        "urgent",
        "usual",
        "another",
        "later",
    ]


def test_tenants_share_fairly(model, started):
    body = {"prompt": [8, 9], "max_tokens": 4}
    many = {f"ann{i}": body | {"user": "ann"} for i in range(3)}
    with tiny_server(model, scheduling_policy="fair", **ONE_BY_ONE) as server:
        all_at_once(server, {**many, "bob": body | {"user": "bob"}})
    names = [name.split("-")[1] for name in started]
    assert names == ["first", "ann0", "bob", "ann1", "ann2"], "bob is not behind all of ann's"
