"""Streams: the order of chunks, errors in them, and the clients that people use."""

import asyncio
import contextlib
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from paged_jax import EngineDeadError
from tests.fake_engine import BOS, FakeEngine, text_of
from tests.live_server import LiveServer, events, live_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine()) as server:
        yield server


def stream(server: LiveServer, path: str, **body) -> list:
    """All events of a stream, without the final mark, which must be there."""
    default = {"prompt": "hi"} if path == COMPLETIONS else {"messages": SAY_HI}
    status, headers, data = server.request("POST", path, default | {"stream": True} | body)
    assert status == 200, data
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    told = events(data)
    assert told[-1] == "[DONE]"
    assert told.count("[DONE]") == 1
    return told[:-1]


def choices(told: list) -> list[dict]:
    assert all(len(chunk["choices"]) == 1 for chunk in told)
    return [chunk["choices"][0] for chunk in told]


# Order and shape


def test_a_chat_stream_is_role_content_finish(server):
    told = stream(server, CHAT, max_tokens=3)
    empty = {"index": 0, "logprobs": None, "finish_reason": None}
    assert choices(told) == [
        empty | {"delta": {"role": "assistant", "content": ""}},
        empty | {"delta": {"content": "one "}},
        empty | {"delta": {"content": "two "}},
        empty | {"delta": {"content": "three "}},
        empty | {"delta": {}, "finish_reason": "length", "stop_reason": None},
    ]
    assert {chunk["object"] for chunk in told} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in told}) == 1
    assert told[0]["id"].startswith("chatcmpl-")


def test_a_completion_stream_has_no_role_and_keeps_its_last_text(server):
    told = choices(stream(server, COMPLETIONS, max_tokens=3))
    assert [choice["text"] for choice in told] == ["one ", "two ", "three "]
    assert [choice["finish_reason"] for choice in told] == [None, None, "length"]
    assert all("delta" not in choice for choice in told)


def test_the_headers_of_a_stream(server):
    body = {"prompt": "hi", "stream": True, "tempreature": 1}
    _, headers, _ = server.request("POST", COMPLETIONS, body, {"x-request-id": "mine"})
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"] == "mine"
    assert headers["x-paged-jax-ignored-fields"] == "tempreature"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_joined_deltas_equal_the_whole_text(server, path):
    told = choices(stream(server, path, max_tokens=11))
    parts = [c["text"] if path == COMPLETIONS else c["delta"].get("content", "") for c in told]
    assert "".join(parts) == text_of(11)


def test_deltas_without_text_make_no_chunk():
    with live_server(FakeEngine(pieces=("", "", "abc"))) as server:
        told = choices(stream(server, COMPLETIONS, max_tokens=5))
        assert [choice["text"] for choice in told] == ["abc", ""]
        told = choices(stream(server, COMPLETIONS, max_tokens=5, return_token_ids=True))
        assert [choice["token_ids"] for choice in told] == [[0], [1], [2], [0], [1]]
        told = choices(stream(server, CHAT, max_tokens=2))
        assert [choice["delta"] for choice in told] == [{"role": "assistant", "content": ""}, {}]


def test_echo_comes_first_and_once(server):
    told = choices(stream(server, COMPLETIONS, echo=True, max_tokens=2))
    assert [choice["text"] for choice in told] == ["hione ", "two "]
    told = choices(stream(server, COMPLETIONS, echo=True, max_tokens=0))
    assert [(c["text"], c["finish_reason"]) for c in told] == [("hi", "length")]


def test_token_ids_of_a_stream(server):
    told = choices(stream(server, COMPLETIONS, return_token_ids=True, max_tokens=2))
    assert told[0]["prompt_token_ids"] == [BOS, 104, 105]
    assert "prompt_token_ids" not in told[1]
    assert [choice["token_ids"] for choice in told] == [[0], [1]]
    told = stream(server, CHAT, return_token_ids=True, max_tokens=2)
    assert told[0]["prompt_token_ids"][0] == BOS
    assert all("prompt_token_ids" not in chunk for chunk in told[1:])
    assert [c["token_ids"] for c in choices(told) if "token_ids" in c] == [[0], [1]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a50_usage_comes_only_when_asked_and_last(server, path):
    told = stream(server, path, max_tokens=2)
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in told)
    told = stream(server, path, max_tokens=2, stream_options={"include_usage": True})
    assert all(chunk["choices"] and chunk.get("usage") is None for chunk in told[:-1])
    assert told[-1]["choices"] == []
    usage = told[-1]["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + 2
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


def test_continuous_usage_counts_up(server):
    options = {"continuous_usage_stats": True}
    told = stream(server, COMPLETIONS, max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in told] == [1, 2, 3]
    told = stream(
        server, COMPLETIONS, max_tokens=3, stream_options=options | {"include_usage": True}
    )
    assert told[-1]["choices"] == []
    assert told[-1]["usage"]["completion_tokens"] == 3


def test_a51_choices_that_finish_at_different_times():
    with live_server(FakeEngine(lengths=(2, 5, 8))) as server:
        told = stream(server, CHAT, n=3, stream_options={"include_usage": True})
    assert told[-1]["usage"]["completion_tokens"] == 2 + 5 + 8
    assert told[-1]["usage"]["prompt_tokens"] == 20
    by_index = {0: [], 1: [], 2: []}
    for choice in choices(told[:-1]):
        by_index[choice["index"]].append(choice)
    for index, length in enumerate((2, 5, 8)):
        mine = by_index[index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == text_of(length)
        assert [c["finish_reason"] for c in mine] == [None] * (length + 1) + ["stop"]


def test_several_prompts_share_a_stream(server):
    told = stream(
        server,
        COMPLETIONS,
        prompt=["a", "b", "c"],
        max_tokens=3,
        stream_options={"include_usage": True},
    )
    assert told[-1]["usage"]["completion_tokens"] == 9
    for index in range(3):
        mine = [c for c in choices(told[:-1]) if c["index"] == index]
        assert "".join(c["text"] for c in mine) == text_of(3)
        assert [c["finish_reason"] for c in mine] == [None, None, "length"]


# Errors


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"dies_after": 3}, "engine_dead"),
        ({"fails_after": 3}, "generation_failed"),
        ({"raises_after": (3, KeyError("innards"))}, "internal_error"),
        ({"raises_after": (3, asyncio.CancelledError())}, "generation_failed"),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a52_an_error_in_mid_stream_is_one_event(path, wrong, code):
    with live_server(FakeEngine(**wrong)) as server:
        told = stream(server, path, max_tokens=9)
    assert told[-1]["error"]["code"] == code
    assert told[-1]["error"]["type"] == "server_error"
    assert ["error" in chunk for chunk in told].count(True) == 1
    assert len(told) == (5 if path == CHAT else 4)
    for innards in ("Traceback", "innards", "KeyError", EngineDeadError.__name__):
        assert innards not in json.dumps(told)


def test_a52_the_openai_client_raises_its_error():
    with live_server(FakeEngine(dies_after=3)) as server, client_of(server) as client:
        chunks = client.completions.create(model="fake/model", prompt="hi", stream=True)
        assert [next(chunks).choices[0].text for _ in range(3)] == ["one ", "two ", "three "]
        with pytest.raises(openai.APIError, match="engine has stopped"):
            next(chunks)


def test_one_bad_prompt_among_several_ends_the_others():
    with live_server(FakeEngine(delay_s=0.05)) as server:
        body = {"prompt": [[1], [10**6], [2]], "max_tokens": 50, "stream": True}
        status, _, data = server.request("POST", COMPLETIONS, body)
        assert (status, json.loads(data)["error"]["param"]) == (400, "prompt")
        assert not server.engine.running
        assert server.engine.num_tokens < 50


# Clients


@contextlib.contextmanager
def client_of(server: LiveServer):
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10
    ) as client:
        yield client


def test_the_openai_client(server):
    with client_of(server) as client:
        assert [model.id for model in client.models.list()] == ["fake/model"]
        assert client.models.retrieve("fake/model").object == "model"
        whole = client.completions.create(model="fake/model", prompt="hi", max_tokens=3)
        assert whole.choices[0].text == text_of(3)
        assert whole.usage.total_tokens == 6
        whole = client.chat.completions.create(
            model="fake/model", messages=SAY_HI, max_completion_tokens=3, extra_body={"top_k": 5}
        )
        assert whole.choices[0].message.content == text_of(3)
        assert whole.choices[0].finish_reason == "length"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="gpt-9", prompt="hi")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake/model", prompt="hi", temperature=-1)
        assert caught.value.param == "temperature"


def test_the_openai_client_streams(server):
    with client_of(server) as client:
        chunks = client.completions.create(
            model="fake/model", prompt="hi", max_tokens=5, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(5)
        chunks = list(
            client.chat.completions.create(
                model="fake/model",
                messages=SAY_HI,
                max_tokens=5,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert chunks[-1].usage.completion_tokens == 5
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == text_of(5)


def test_the_openai_clients_own_view_of_a_stream():
    with live_server(FakeEngine(lengths=(5,))) as server, client_of(server) as client:
        with client.chat.completions.stream(model="fake/model", messages=SAY_HI) as told:
            final = told.get_final_completion()
        assert final.choices[0].message.content == text_of(5)
        assert final.choices[0].finish_reason == "stop"


async def test_eight_openai_clients_at_once():
    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        if i % 2:
            chunks = await client.chat.completions.create(
                model="fake/model", messages=SAY_HI, max_tokens=10 + i, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in chunks])
        whole = await client.completions.create(model="fake/model", prompt="hi", max_tokens=10 + i)
        return whole.choices[0].text

    with live_server(FakeEngine(delay_s=0.01)) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=10
        ) as client:
            texts = await asyncio.gather(*[ask(client, i) for i in range(8)])
        assert texts == [text_of(10 + i) for i in range(8)]
        assert len({seen[0] for seen in server.engine.seen}) == 8


def test_eight_streams_side_by_side_stay_apart():
    with live_server(FakeEngine(delay_s=0.005)) as server, ThreadPoolExecutor(8) as pool:
        told = pool.map(lambda n: stream(server, COMPLETIONS, max_tokens=n), range(20, 28))
        for n, chunks in zip(range(20, 28), told, strict=True):
            assert "".join(choice["text"] for choice in choices(chunks)) == text_of(n)


def test_curl_shows_tokens_one_by_one():
    body = json.dumps({"prompt": "hi", "max_tokens": 40, "stream": True})
    with live_server(FakeEngine(delay_s=0.02)) as server:
        command = ["curl", "-sN", "--max-time", "10", f"{server.url}{COMPLETIONS}", "-d", body]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
            made_when_seen = [
                server.engine.num_tokens for line in curl.stdout if line.startswith(b"data: {")
            ]
    assert len(made_when_seen) == 40
    assert made_when_seen[0] < 20  # the first was here long before the last was made
    assert sorted(made_when_seen) == made_when_seen
