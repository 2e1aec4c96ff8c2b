"""The endpoints beside those that generate, and the description of them all."""

import dataclasses
import json
import threading
import time
import typing

import pytest

from paged_jax import SamplingParams, __version__
from serve import ServeOptions
from serve.endpoints import OPERATIONS
from serve.fields import NEUTRAL_VALUES, SAMPLING
from serve.openapi import describe, schema_of
from serve.time_limit import within
from tests.fake_engine import BOS, FakeEngine
from tests.live_server import LiveServer, live_server, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine()) as server:
        yield server


def get(server: LiveServer, path: str) -> dict:
    status, _, body = server.request("GET", path)
    assert status == 200, body
    return json.loads(body)


# Rendering


def test_rendered_prompts_are_what_the_engine_would_get(server):
    status, rendered = server.post(f"{COMPLETIONS}/render", {"prompt": ["hi", "you"]})
    assert (status, rendered) == (
        200,
        [{"token_ids": [BOS, *b"hi"]}, {"token_ids": [BOS, *b"you"]}],
    )
    assert server.post(f"{COMPLETIONS}/render", {"prompt": [5, 6]})[1] == [{"token_ids": [5, 6]}]
    status, rendered = server.post(f"{CHAT}/render", {"messages": SAY_HI, "max_tokens": 5})
    assert (status, bytes(rendered["token_ids"][1:])) == (200, b"<user>hi<assistant>")
    assert not server.engine.seen


def test_rendering_refuses_what_generating_would_refuse(server):
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": SAY_HI})):
        for wrong, param in (({"temperature": "hot"}, "temperature"), ({"audio": {}}, "audio")):
            for where in (path, f"{path}/render"):
                status, answer = server.post(where, body | wrong)
                assert (status, answer["error"]["param"]) == (400, param)
        _, headers, _ = server.request("POST", f"{path}/render", body | {"no_such": 1})
        assert headers["x-paged-jax-ignored-fields"] == "no_such"


# What there is to know


def test_the_tokenizer_is_described(server):
    assert get(server, "/tokenizer_info") == {
        "vocab_size": 258,
        "bos_token_id": 256,
        "eos_token_id": [257],
    }
    with live_server(FakeEngine(has_tokenizer=False)) as bare:
        assert bare.request("GET", "/tokenizer_info")[0] == 400


def test_the_load_counts_those_inside():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        assert get(server, "/load")["server_load"] == 0
        connection = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500, "stream": True})
        wait_until(lambda: server.engine.running)
        load = get(server, "/load")
        assert (load["server_load"], load["num_requests_running"]) == (1, 1)
        connection.close()
        wait_until(lambda: get(server, "/load")["server_load"] == 0)


def test_the_servers_own_description_holds_no_key():
    with live_server(FakeEngine(), ServeOptions(api_key=("the-key",), max_queued=7)) as server:
        _, _, body = server.request(
            "GET", "/server_info", None, {"authorization": "Bearer the-key"}
        )
    info = json.loads(body)
    assert b"the-key" not in body
    assert (info["version"], info["model"], info["state"]) == (__version__, "fake/model", "ready")
    assert info["options"]["max_queued"] == 7
    assert info["engine"] == {"model": "fake/model"}


# Templates


def test_a67_a_template_that_loops_is_stopped_and_holds_up_nobody():
    engine = FakeEngine()
    looping = threading.Event()

    def loop(*args, **kwargs):
        looping.set()
        while True:
            pass

    engine.render_chat = loop
    with live_server(engine, ServeOptions(template_timeout_s=0.5)) as server:
        answers: list = []
        body = {"messages": SAY_HI, "stream": True}
        asking = threading.Thread(target=lambda: answers.append(server.post(CHAT, body)))
        asking.start()
        assert looping.wait(10)
        began = time.monotonic()
        assert server.request("GET", "/health")[0] == 200
        assert time.monotonic() - began < 0.5
        asking.join(10)
        ((status, answer),) = answers
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, "messages", "chat_template")
        assert "0.5 s" in error["message"]
        wait_until(lambda: not workers())


def workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "paged-jax limited work"]


async def test_limited_work_gives_what_it_returns_or_raises():
    assert await within(5, lambda: 7) == 7
    with pytest.raises(KeyError):
        await within(5, lambda: {}[1])
    with pytest.raises(TimeoutError):
        await within(0.01, lambda: [None for _ in range(10**12)])
    assert await within(5, lambda: 8) == 8


async def test_work_that_outlives_its_limit_in_c_is_not_heard_of():
    with pytest.raises(TimeoutError):
        await within(0.01, lambda: time.sleep(0.2))
    assert await within(5, lambda: 9) == 9
    wait_until(lambda: not workers())


# The description


@pytest.fixture(scope="module")
def description(server) -> dict:
    return get(server, "/openapi.json")


def test_every_route_is_described_and_nothing_else(description):
    described = {
        (path, method.upper())
        for path, methods in description["paths"].items()
        for method in methods
    }
    assert described == {
        (operation.path.replace(":path}", "}"), method)
        for operation in OPERATIONS
        for method in operation.methods
    }
    assert all(m["summary"] for methods in description["paths"].values() for m in methods.values())


def test_every_reference_leads_somewhere(description):
    def references(value):
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = set(references(description))
    assert len(found) > 20
    for reference in found:
        here = description
        for part in reference.removeprefix("#/").split("/"):
            here = here[part]
        assert here


def test_every_field_that_is_read_is_described(description):
    for name in ("CompletionRequest", "ChatRequest"):
        schema = description["components"]["schemas"][name]
        fields = set(schema["properties"])
        assert fields >= SAMPLING | set(NEUTRAL_VALUES)
        assert {"model", "stream", "cache_salt", "timeout_s", "metadata"} <= fields
        assert schema["additionalProperties"] is True
    fields = description["components"]["schemas"]["TokenizePromptRequest"]["properties"]
    assert "temperature" not in fields


def test_what_is_said_of_null_and_of_neutral_values_is_true(server, description):
    properties = description["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"type": "null"} in properties["stream"]["anyOf"]
    for name, schema in properties.items():
        if name != "prompt" and "description" in schema:
            assert server.post(COMPLETIONS, {"prompt": "hi", name: None})[0] == 200
        for value in schema.get("enum", ()):
            assert server.post(COMPLETIONS, {"prompt": "hi", name: value})[0] == 200, (name, value)


def test_what_is_checked_by_hand_is_described_exactly(description):
    schemas = description["components"]["schemas"]
    messages = schemas["ChatRequest"]["properties"]["messages"]
    assert messages["items"]["required"] == ["role"]
    prompt = schemas["CompletionRequest"]["properties"]["prompt"]
    assert len(prompt["anyOf"]) == 4
    assert "x-exact" not in json.dumps(description)


def test_options_change_the_description():
    strict = describe(OPERATIONS, "m", strict_fields=True, with_keys=True)
    assert strict["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
    assert strict["security"] == [{"key": []}]


def test_every_sampling_field_has_a_type():
    hints = typing.get_type_hints(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        assert schema_of(hints[field.name]) != {}, field.name
    assert schema_of(hints["stop"]) == {
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    }
