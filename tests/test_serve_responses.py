"""`/v1/responses`, as OpenAI's own client reads it, and what it refuses."""

import json

import openai
import pytest

from paged_jax import EngineDeadError
from serve.endpoints import OPERATIONS
from tests.fake_engine import FakeEngine, text_of
from tests.live_server import LiveServer, live_server

RESPONSES = "/v1/responses"
HI = {"input": "hi", "max_output_tokens": 3}


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine(lengths=(5,))) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def last_prompt(server: LiveServer) -> bytes:
    return bytes(server.engine.seen[-1][1][1:])


def test_the_openai_client_gets_a_response(client, server):
    answer = client.responses.create(
        model="fake/model",
        input="hi",
        instructions="be brief",
        max_output_tokens=100,
        temperature=0.5,
        top_p=0.9,
        metadata={"a": "b"},
        store=False,
        truncation="disabled",
        extra_body={"seed": 5, "top_k": 3},
    )
    assert answer.output_text == text_of(5)
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_")
    assert answer.output[0].id.startswith("msg_")
    assert answer.metadata == {"a": "b"}
    assert (answer.temperature, answer.instructions) == (0.5, "be brief")
    usage = answer.usage
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens) == (1, 5)
    assert usage.total_tokens == usage.input_tokens + 5
    assert last_prompt(server) == b"<system>be brief<user>hi<assistant>"
    params = server.engine.seen[-1][2]
    assert (params.max_tokens, params.top_p, params.seed, params.top_k) == (100, 0.9, 5, 3)


def test_the_openai_client_streams_a_response(client):
    seen = list(client.responses.create(model="fake/model", input="hi", stream=True))
    assert [event.type for event in seen] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 5,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(deltas) == text_of(5) == seen[-1].response.output_text == seen[-4].text
    assert seen[0].response.id == seen[-1].response.id
    assert seen[0].response.status == "in_progress"
    assert seen[-1].response.usage.output_tokens == 5


def test_the_openai_clients_own_view_of_a_response_stream(client):
    with client.responses.stream(model="fake/model", input="hi") as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert (final.output_text, final.status) == (text_of(5), "completed")


def test_a55_a_response_that_is_cut_off_says_why(client):
    asked = {"model": "fake/model", "input": "hi", "max_output_tokens": 3}
    whole = client.responses.create(**asked)
    last = list(client.responses.create(**asked, stream=True))[-1]
    assert last.type == "response.incomplete"
    for answer in (whole, last.response):
        assert answer.output_text == text_of(3)
        assert (answer.status, answer.output[0].status) == ("incomplete", "incomplete")
        assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_conversation_of_items(client, server):
    client.responses.create(
        model="fake/model",
        input=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "two", "annotations": []}],
            },
            {"role": "user", "content": "three"},
        ],
    )
    want = b"<system>rules<user>one<assistant>two<user>three<assistant>"
    assert last_prompt(server) == want


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", [], "input"),
        ("input", 5, "input"),
        ("input", None, "input"),
        ("input", [{"role": "robot", "content": "x"}], "input[0].role"),
        ("input", [{"role": "user"}], "input[0].content"),
        ("input", [{"type": "function_call", "role": "user"}], "input[0].type"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input[0].content[0]",
        ),
        ("max_output_tokens", -1, "max_output_tokens"),
        ("max_output_tokens", 10**6, None),
        ("temperature", "hot", "temperature"),
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("background", True, "background"),
        ("tools", [{"type": "function"}], "tools"),
        ("truncation", "auto", "truncation"),
        ("n", 2, "n"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("stream_options", {"include_obfuscation": True}, "stream_options"),
    ],
)
def test_what_is_not_to_be_had_is_refused_by_name(server, field, value, param):
    for stream in (False, True):
        status, answer = server.post(RESPONSES, HI | {field: value, "stream": stream})
        assert status == 400
        assert param is None or answer["error"]["param"] == param, answer


def test_unknown_fields_are_named_and_neutral_ones_are_welcome(server):
    body = HI | {"no_such": 1, "store": True, "background": False, "tools": [], "include": []}
    status, headers, _ = server.request("POST", RESPONSES, body)
    assert (status, headers["x-paged-jax-ignored-fields"]) == (200, "no_such")
    assert any(operation.path == RESPONSES for operation in OPERATIONS)


def test_a52_an_error_in_mid_stream_reaches_the_client():
    with live_server(FakeEngine(raises_after=(3, EngineDeadError("innards")))) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            stream = client.responses.create(model="fake/model", input="hi", stream=True)
            kinds = [next(stream).type for _ in range(7)]
            with pytest.raises(openai.APIError, match="stopped") as caught:
                next(stream)
        assert kinds[4:] == ["response.output_text.delta"] * 3
        assert "innards" not in str(caught.value)
        status, answer = server.post(RESPONSES, HI | {"max_output_tokens": 9})
        assert (status, answer["error"]["code"]) == (503, "engine_dead")


def test_a_response_is_named_after_its_request(server):
    status, headers, body = server.request("POST", RESPONSES, HI, {"x-request-id": "mine"})
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert json.loads(body)["id"] == "resp_mine"
    assert json.loads(body)["output"][0]["id"] == "msg_mine"
