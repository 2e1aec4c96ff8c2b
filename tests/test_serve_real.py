"""The whole house on a real socket: OpenAI's clients, curl, and clients that leave."""

import asyncio
import contextlib
import json
import queue
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from paged_jax import LLM, AsyncEngine, Engine, EngineConfig, SamplingParams
from paged_jax.progress import SilentProgress
from tests.engine_runs import Run, assert_idle
from tests.live_server import PATIENCE_S, LiveServer, events, live_server, wait_until
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NAME = "tiny"
CAPACITY = 192  # tokens in 24 blocks of 8; the model could do 512
SIZES = {
    "served_model_name": NAME,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "num_blocks": CAPACITY // 8 + 1,
}
GREEDY = {"temperature": 0.0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
MESSAGES = [{"role": "user", "content": "the other"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_tiny_llama(path, vocab_size=VOCAB_SIZE)
    write_tokenizer(path)
    return str(path)


@pytest.fixture(scope="module")
def llm(directory) -> LLM:
    return LLM(directory, progress=SilentProgress(), **SIZES)


@pytest.fixture(scope="module")
def engine(directory) -> Engine:
    config = EngineConfig(model=directory, **SIZES)
    return Engine.from_pretrained(config, progress=SilentProgress())


@pytest.fixture(scope="module")
def served(engine) -> Iterator[LiveServer]:
    with live_server(AsyncEngine(engine.config, make_engine=lambda: engine)) as server:
        yield server


@pytest.fixture
def server(served) -> Iterator[LiveServer]:
    """What a test leaves behind must be nothing, and the next request is answered."""
    yield served
    settle(served)
    status, answer = served.post(COMPLETIONS, {"prompt": [7, 8], "max_tokens": 4, "temperature": 0})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert served.request("GET", "/health")[0] == 200


def settle(server: LiveServer) -> None:
    """Returns when nothing is left of any request, as seen between two steps."""

    def look(engine: Engine) -> None:
        try:
            assert_idle(engine)
        except AssertionError as error:
            seen.put(error)
        else:
            seen.put(None)

    def is_idle() -> bool:
        server.engine._inbox.put(look)  # for the engine's thread, after all that was handed in
        error = seen.get(timeout=PATIENCE_S)
        if error is not None and time.monotonic() > deadline:
            raise error
        return error is None

    seen: queue.SimpleQueue[AssertionError | None] = queue.SimpleQueue()
    deadline = time.monotonic() + PATIENCE_S / 2
    wait_until(is_idle)


class SlowSteps:
    """Stands in for an engine's `step`: counts, and waits before each."""

    def __init__(self, engine: Engine, delay_s: float):
        self._step = engine.step
        self._delay_s = delay_s
        self.num = 0

    def __call__(self):
        time.sleep(self._delay_s)
        self.num += 1
        return self._step()


@contextlib.contextmanager
def slow(engine: Engine, delay_s: float) -> Iterator[SlowSteps]:
    with pytest.MonkeyPatch.context() as patch:
        steps = SlowSteps(engine, delay_s)
        patch.setattr(engine, "step", steps)
        yield steps
        wait_until(lambda: not engine.has_unfinished)


# OpenAI's clients


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        yield client


ASKED = {
    "greedy": (GREEDY, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)),
    "seeded": (
        {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": 16, "n": 2},
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=16, n=2),
    ),
    "filtered": (
        {"seed": 6, "max_tokens": 16, "extra_body": {"top_k": 5, "min_p": 0.1}},
        SamplingParams(seed=6, max_tokens=16, top_k=5, min_p=0.1),
    ),
    "stopped": (
        {"seed": 7, "max_tokens": 100, "stop": ["a", "b", "c", "0"]},
        SamplingParams(seed=7, max_tokens=100, stop=["a", "b", "c", "0"]),
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_the_client_gets_what_llm_gives(asked, client, llm):
    fields, params = ASKED[asked]
    (want,) = llm.generate("the other", params)
    got = client.completions.create(model=NAME, prompt="the other", **fields)
    assert [(c.text, c.finish_reason) for c in got.choices] == [
        (output.text, output.finish_reason) for output in want.outputs
    ]
    assert got.usage.prompt_tokens == len(want.prompt_token_ids)
    assert got.usage.completion_tokens == sum(len(o.token_ids) for o in want.outputs)

    (want,) = llm.chat(MESSAGES, params)
    got = client.chat.completions.create(model=NAME, messages=MESSAGES, **fields)
    assert [(c.message.content, c.finish_reason) for c in got.choices] == [
        (output.text, output.finish_reason) for output in want.outputs
    ]
    assert got.usage.prompt_tokens == len(want.prompt_token_ids)


@pytest.mark.parametrize("asked", ASKED)
def test_a_streaming_client_gets_what_llm_gives(asked, client, llm):
    fields, params = ASKED[asked]
    (want,) = llm.generate("the other", params)
    texts, reasons = [""] * params.n, [None] * params.n
    usage = None
    for chunk in client.completions.create(
        model=NAME,
        prompt="the other",
        stream=True,
        stream_options={"include_usage": True},
        **fields,
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert reasons[choice.index] is None
            reasons[choice.index] = choice.finish_reason
    assert texts == [output.text for output in want.outputs]
    assert reasons == [output.finish_reason for output in want.outputs]
    assert usage.completion_tokens == sum(len(output.token_ids) for output in want.outputs)

    (want,) = llm.chat(MESSAGES, params)
    texts = [""] * params.n
    for chunk in client.chat.completions.create(
        model=NAME, messages=MESSAGES, stream=True, **fields
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [output.text for output in want.outputs]


async def test_eight_clients_at_once_get_what_llm_gives(server, llm):
    prompts = [f"{i} bottles " * (1 + i % 3) for i in range(8)]
    params = [
        SamplingParams(seed=i, max_tokens=10 + 2 * i, temperature=float(i % 2)) for i in range(8)
    ]
    want = [result.outputs[0].text for result in llm.generate(prompts, params)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    want_chat = [result.outputs[0].text for result in llm.chat(chats, params)]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        sampling = {
            "seed": i,
            "max_tokens": 10 + 2 * i,
            "temperature": float(i % 2),
        }
        if i % 4 == 0:
            whole = await client.completions.create(model=NAME, prompt=prompts[i], **sampling)
            return whole.choices[0].text
        if i % 4 == 1:
            chunks = await client.completions.create(
                model=NAME, prompt=prompts[i], stream=True, **sampling
            )
            return "".join([chunk.choices[0].text async for chunk in chunks])
        if i % 4 == 2:
            whole = await client.chat.completions.create(model=NAME, messages=chats[i], **sampling)
            return whole.choices[0].message.content
        chunks = await client.chat.completions.create(
            model=NAME, messages=chats[i], stream=True, **sampling
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30
    ) as client:
        for _ in range(3):
            texts = await asyncio.gather(*(ask(client, i) for i in range(8)))
            assert texts == [(want if i % 4 < 2 else want_chat)[i] for i in range(8)]


def test_a_client_that_asks_too_much_is_told(client, server):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=CAPACITY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="the role judge is not known"):
        client.chat.completions.create(
            model=NAME, messages=[{"role": "judge", "content": "x"}], stream=True
        )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


# Limits


def test_a16_the_limit_that_is_advertised_is_the_one_that_holds(server):
    _, _, body = server.request("GET", "/v1/models")
    (card,) = json.loads(body)["data"]
    assert (card["id"], card["max_model_len"]) == (NAME, CAPACITY)
    fits = {"prompt": [5] * (CAPACITY - 1), "max_tokens": 1}
    assert server.post(COMPLETIONS, fits)[0] == 200
    for prompt, max_tokens in (([5] * CAPACITY, 1), ([5] * (CAPACITY + 1), 1), ([5] * 8, 189)):
        body = {"prompt": prompt, "max_tokens": max_tokens}
        status, answer = server.post(COMPLETIONS, body)
        assert status == 400
        assert answer["error"]["code"] == "context_length_exceeded"
        for number in (CAPACITY, len(prompt), max_tokens):  # A17
            assert f" {number} " in answer["error"]["message"]


def test_a21_max_tokens_of_zero_one_and_null(server):
    for max_tokens, want in ((0, 0), (1, 1), (None, 16)):
        body = {"prompt": "the", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = server.post(COMPLETIONS, body)
        assert (status, answer["usage"]["completion_tokens"]) == (200, want)
        assert answer["choices"][0]["finish_reason"] == "length"
    body = {"prompt": "the", "max_tokens": 0, "echo": True}
    assert server.post(COMPLETIONS, body)[1]["choices"][0]["text"] == "the"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"n": True}, "n"),
        ({"stop": [1]}, "stop"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": "\ud800"}, None),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ],
)
def test_a60_a61_what_is_wrong_is_named(fields, param, streamed, server):
    body = {"prompt": "the", "max_tokens": 2, "stream": streamed} | fields
    status, answer = server.post(COMPLETIONS, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["param"] == param


def test_a60_null_is_absent_and_a61_the_last_id_is_taken(server):
    plain = {"prompt": [VOCAB_SIZE - 1], "seed": 3, "max_tokens": 8}
    nulls = ("n", "temperature", "top_p", "stop", "stream", "logprobs", "user", "echo", "top_k")
    status, want = server.post(COMPLETIONS, plain)
    assert status == 200
    status, got = server.post(COMPLETIONS, plain | dict.fromkeys(nulls))
    assert status == 200
    assert got["choices"] == want["choices"]


@pytest.mark.parametrize("by", ["header", "body"])
def test_a26_requests_of_one_name_get_their_own_answers(by, server, llm):
    prompts = [f"{i} of one name" for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    want = [result.outputs[0].text for result in llm.generate(prompts, params)]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        headers = {"x-request-id": "same"} if by == "header" else {}
        if by == "body":
            body["request_id"] = "same"
        status, answer = server.post(COMPLETIONS, body, headers)
        assert status == 200
        return answer["choices"][0]["text"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == want


# Clients that leave

LEAVING = [(COMPLETIONS, True), (COMPLETIONS, False), (CHAT, True), (CHAT, False)]


@pytest.mark.parametrize(("path", "streamed"), LEAVING)
def test_a_client_that_leaves_frees_its_blocks_within_two_steps(path, streamed, server, engine):
    body = {"max_tokens": 100, "n": 3, "seed": 1, "stream": streamed, "ignore_eos": True}
    body |= {"prompt": "the other"} if path == COMPLETIONS else {"messages": MESSAGES}
    with slow(engine, 0.03) as steps:
        connection = server.open(path, body)
        generated = engine.stats().generation_tokens
        wait_until(lambda: engine.stats().generation_tokens >= generated + 9)
        num = steps.num
        connection.close()
        wait_until(lambda: not engine.scheduler.requests)
        # One step is running, one may begin before the server hears of it, and two may follow.
        assert steps.num <= num + 4
        wait_until(lambda: not engine.stats().blocks_in_use)
        assert steps.num <= num + 5


@pytest.mark.parametrize(("path", "streamed"), LEAVING)
def test_a24_a_client_that_leaves_during_a_long_prefill(path, streamed, server, engine):
    long = "x" * 150
    body = {"max_tokens": 2, "stream": streamed}
    if path == COMPLETIONS:
        body |= {"prompt": long}
    else:
        body |= {"messages": [{"role": "user", "content": long}]}
    engine.scheduler.forget_prefixes()
    with slow(engine, 0.03) as steps:
        connection = server.open(path, body)  # ten steps or more of prefill
        wait_until(lambda: steps.num >= 3)
        connection.close()
        wait_until(lambda: not engine.scheduler.requests)
        assert 3 <= steps.num <= 7
        wait_until(lambda: not engine.has_unfinished)


def test_a25_many_that_leave_leave_nothing(server):
    body = {"prompt": ["a", "b"], "n": 4, "max_tokens": 100, "stream": True, "ignore_eos": True}
    for i in range(40):
        connection = server.open(COMPLETIONS, body)
        if i % 2:
            connection.recv(10)
        connection.close()
    settle(server)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0


# What one sees


def test_curl_shows_chunks_one_by_one(server, engine, llm):
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    (want,) = llm.generate("the other", params)
    body = {"prompt": "the other", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    before = engine.stats().generation_tokens
    made_when_seen, lines = [], []
    with slow(engine, 0.01):
        command = ["curl", "-sN", "--max-time", "30", f"{server.url}{COMPLETIONS}"]
        command += ["-d", json.dumps(body | {"stream": True})]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as curl:
            for line in curl.stdout:
                lines.append(line)
                made_when_seen.append(engine.stats().generation_tokens - before)
    told = events(b"".join(lines))
    assert told[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in told[:-1]) == want.outputs[0].text
    assert made_when_seen[0] < 20  # the first was here long before the last was made
    assert made_when_seen == sorted(made_when_seen)
    assert made_when_seen[-1] == 40


def test_metrics_move_with_the_work(server, engine):
    counters = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    )
    before = {name: server.metric(name) for name in counters}
    decodes = server.metric("paged_jax:steps_total", kind="decode")
    finished = server.metric("vllm:request_success_total", finished_reason="length")
    aborted = server.metric("vllm:request_success_total", finished_reason="abort")
    prompt = [9, *range(20)]
    body = {"prompt": prompt, "max_tokens": 10, "seed": 1, "ignore_eos": True}
    assert server.post(COMPLETIONS, body)[0] == 200
    assert server.post(COMPLETIONS, body)[0] == 200
    new = {name: server.metric(name) - before[name] for name in counters}
    assert new["vllm:prompt_tokens_total"] == 2 * 21
    assert new["vllm:generation_tokens_total"] == 2 * 10
    assert new["vllm:time_to_first_token_seconds_count"] == 2
    assert new["vllm:e2e_request_latency_seconds_count"] == 2
    assert new["vllm:prefix_cache_hits_total"] == 16  # two blocks, the second time
    assert server.metric("paged_jax:steps_total", kind="decode") - decodes == 2 * 9
    assert server.metric("vllm:request_success_total", finished_reason="length") == finished + 2

    with slow(engine, 0.03):
        connection = server.open(COMPLETIONS, body | {"max_tokens": 150, "n": 2, "stream": True})
        wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
        assert 0 < server.metric("vllm:kv_cache_usage_perc") < 1
        connection.close()
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        wait_until(
            lambda: (
                server.metric("vllm:request_success_total", finished_reason="abort") == aborted + 2
            )
        )


def test_a68_an_engine_that_dies_is_seen_to_be_dead(engine):
    def fail():
        raise RuntimeError("innards")

    body = {"prompt": "the other", "max_tokens": 100, "stream": True, "ignore_eos": True}
    dying = AsyncEngine(engine.config, make_engine=lambda: engine)
    with live_server(dying) as server, slow(engine, 0.01):
        with contextlib.closing(server.open(COMPLETIONS, body)) as connection:
            wait_until(lambda: engine.stats().num_running)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "step", fail)
                answer = b""
                while not answer.endswith(b"0\r\n\r\n"):
                    answer += connection.recv(2**16)
        assert b'"code":"engine_dead"' in answer
        assert b"innards" not in answer
        assert server.request("GET", "/health")[0] == 503
        assert server.request("GET", "/ping")[0] == 503
        assert server.request("POST", COMPLETIONS, body)[0] == 503
        for request_id in list(engine.scheduler.requests):
            engine.abort(request_id)  # nobody uses a dead engine again, but this test
        Run(engine).drain()
