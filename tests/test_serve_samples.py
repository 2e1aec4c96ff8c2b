"""Several samples of a prompt over HTTP: `n` and `best_of`, whole, streamed and counted."""

import contextlib

import pytest

from paged_jax import SamplingParams
from scheduler import derive_seed
from tests.fake_engine import FakeEngine, text_of
from tests.live_server import LiveServer, events, live_server, tiny_server, wait_until
from tests.tiny_models import write_tiny_llama

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTHS = (2, 5, 8)
PROMPT = [3, 7, 9, 11, 20]


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine(lengths=LENGTHS)) as server:
        yield server


def complete(server: LiveServer, **body) -> dict:
    status, answer = server.post(COMPLETIONS, {"prompt": "hi"} | body)
    assert status == 200, answer
    return answer


def stream(server: LiveServer, path: str = COMPLETIONS, **body) -> list[dict]:
    """All events of a stream, without the final mark, which must be there."""
    status, _, data = server.request("POST", path, {"stream": True} | body)
    assert status == 200, data
    *told, done = events(data)
    assert done == "[DONE]"
    return told


def refused(server: LiveServer, path: str = COMPLETIONS, **body) -> dict:
    status, answer = server.post(path, body)
    assert status == 400, answer
    return answer["error"]


# With an engine that says what it is told


def test_every_sample_is_a_choice_and_counts(server):
    answer = complete(server, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in answer["choices"]] == [text_of(k) for k in LENGTHS]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == sum(LENGTHS)
    assert server.engine.seen[-1][2].n == 3
    status, answer = server.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 2})
    assert status == 200
    assert [c["message"]["content"] for c in answer["choices"]] == [text_of(2), text_of(5)]
    assert answer["usage"]["completion_tokens"] == 7


def test_a51_streamed_samples_interleave_under_their_indices(server):
    told = stream(server, prompt="hi", n=3, stream_options={"include_usage": True})
    assert told[-1]["usage"]["completion_tokens"] == sum(LENGTHS)
    choices = [chunk["choices"][0] for chunk in told[:-1]]
    assert [choice["index"] for choice in choices] == [0, 1, 2] * 2 + [1, 2] * 3 + [2] * 3
    for index, length in enumerate(LENGTHS):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text_of(length)
        assert [c["finish_reason"] for c in mine] == [None] * (length - 1) + ["stop"]


def test_samples_of_several_prompts_are_numbered_through(server):
    answer = complete(server, prompt=["a", "b"], n=2, echo=True)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a" + text_of(2)),
        (1, "a" + text_of(5)),
        (2, "b" + text_of(2)),
        (3, "b" + text_of(5)),
    ]
    assert answer["usage"]["completion_tokens"] == 14
    told = stream(server, prompt=["a", "b"], n=2)
    texts = dict.fromkeys(range(4), "")
    for chunk in told:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: text_of(2), 1: text_of(5), 2: text_of(2), 3: text_of(5)}


def test_best_of_returns_n_and_counts_all(server):
    answer = complete(server, n=2, best_of=3)
    assert server.engine.seen[-1][2] == SamplingParams(n=2, best_of=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == sum(LENGTHS)
    assert complete(server, best_of=1)["usage"]["completion_tokens"] == 2


def test_best_of_that_cannot_be_is_refused(server):
    error = refused(server, prompt="hi", best_of=2, stream=True)
    assert error["param"] == "best_of"
    assert "stream" in error["message"]
    assert len(stream(server, prompt="hi", n=2, best_of=2)) == 7
    error = refused(server, prompt="hi", n=3, best_of=2)
    assert error["param"] == "best_of"
    assert "between 3" in error["message"]
    messages = [{"role": "user", "content": "hi"}]
    assert refused(server, CHAT, messages=messages, best_of=2)["param"] == "best_of"
    assert server.post(CHAT, {"messages": messages, "best_of": 1})[0] == 200


def test_a62_many_prompts_with_many_samples_are_refused(server):
    num_seen = len(server.engine.seen)
    for samples in ({"n": 20}, {"best_of": 20}):
        assert refused(server, prompt=[[1]] * 100, **samples)["param"] == "prompt"
    assert len(server.engine.seen) == num_seen


def test_times_are_those_of_each_choice():
    with live_server(FakeEngine(lengths=LENGTHS, delay_s=0.02)) as server:
        complete(server, n=3)
        assert server.metric("vllm:time_to_first_token_seconds_count") == 1
        gaps = sum(length - 1 for length in LENGTHS)
        assert server.metric("vllm:inter_token_latency_seconds_count") == gaps
        assert server.metric("vllm:inter_token_latency_seconds_sum") > gaps * 0.02
        assert server.metric("vllm:request_time_per_output_token_seconds_count") == 3
        assert server.metric("vllm:request_time_per_output_token_seconds_sum") > 3 * 0.02
        assert server.metric("vllm:request_generation_tokens_sum") == sum(LENGTHS)
        assert server.metric("vllm:request_max_num_generation_tokens_sum") == max(LENGTHS)
        assert server.metric("vllm:request_params_n_sum") == 3
        assert server.metric("vllm:request_success_total", finished_reason="stop") == 3


def test_times_of_best_of_are_not_made_up():
    with live_server(FakeEngine(lengths=LENGTHS, delay_s=0.02)) as server:
        complete(server, n=1, best_of=3)
        first = server.metric("vllm:time_to_first_token_seconds_sum")
        assert server.metric("vllm:e2e_request_latency_seconds_sum") > first + 7 * 0.02
        assert server.metric("vllm:inter_token_latency_seconds_count") == 0
        assert server.metric("vllm:request_time_per_output_token_seconds_count") == 0
        assert server.metric("vllm:request_generation_tokens_sum") == sum(LENGTHS)
        assert server.metric("vllm:request_params_n_sum") == 1
        assert server.metric("vllm:request_success_total", finished_reason="stop") == 1


def test_a93_a_choice_that_ended_before_the_client_left_is_not_aborted():
    with live_server(FakeEngine(lengths=(2, None), delay_s=0.02)) as server:
        body = {"prompt": "hi", "n": 2, "max_tokens": 500, "stream": True}
        with contextlib.closing(server.open(COMPLETIONS, body)):
            wait_until(lambda: server.engine.num_tokens > 6)
        wait_until(lambda: not server.engine.running)
        assert server.metric("vllm:request_success_total", finished_reason="stop") == 1
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 0


# With the real one


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    with tiny_server(directory) as server:
        yield server


def token_ids(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


SEEDED = {
    "prompt": PROMPT,
    "max_tokens": 12,
    "seed": 11,
    "ignore_eos": True,
    "return_token_ids": True,
}


def test_samples_are_those_of_requests_with_derived_seeds(tiny):
    answer = complete(tiny, **SEEDED, n=3)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["completion_tokens"] == 3 * 12
    for index, found in enumerate(token_ids(answer)):
        alone = complete(tiny, **(SEEDED | {"seed": derive_seed(11, index)}))
        assert token_ids(alone) == [found]
    streamed: list[list[int]] = [[], [], []]
    for chunk in stream(tiny, **SEEDED, n=3):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["token_ids"]
    assert streamed == token_ids(answer)


def test_best_of_returns_some_of_the_samples_and_counts_all(tiny):
    every = token_ids(complete(tiny, **SEEDED, n=5))
    answer = complete(tiny, **SEEDED, n=2, best_of=5)
    best = token_ids(answer)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert best[0] != best[1]
    assert all(found in every for found in best)
    assert answer["usage"]["completion_tokens"] == 5 * 12
