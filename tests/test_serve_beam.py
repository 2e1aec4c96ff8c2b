"""Beam search on the asynchronous engine and over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from paged_jax import (
    LLM,
    AsyncEngine,
    BeamSearchParams,
    CompletionOutput,
    EngineStats,
    RequestError,
    RequestOutput,
)
from paged_jax.beam_search import BeamSearch
from paged_jax.progress import SilentProgress
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, live_server, wait_until
from tests.tiny_models import write_tiny_llama

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server():
    # What the authors recommend for sampling is no business of a search.
    with live_server(FakeEngine(generation_defaults={"temperature": 0.6, "top_p": 0.9})) as server:
        yield server


def search(server: LiveServer, **body) -> tuple[int, dict]:
    return server.post(COMPLETIONS, {"prompt": "hi", "use_beam_search": True} | body)


# Over HTTP, with an engine that says what it is told


def test_n_beams_are_the_choices(server):
    status, answer = search(server, n=3, return_token_ids=True, echo=True)
    assert status == 200
    assert server.engine.seen[-1][2] == BeamSearchParams(beam_width=3, max_tokens=16)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "hibeam 0"),
        (1, "hibeam 1"),
        (2, "hibeam 2"),
    ]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[0, 0], [1, 1], [2, 2]]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert server.metric("vllm:request_params_n_sum") == 3


def test_fields_of_the_search(server):
    search(server, n=2, max_completion_tokens=5, ignore_eos=True)
    params = BeamSearchParams(beam_width=2, max_tokens=5, ignore_eos=True)
    assert server.engine.seen[-1][2] == params
    _, answer = search(server, prompt=["a", "b"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert search(server)[1]["choices"][0]["text"] == "beam 0"
    assert server.engine.seen[-1][2].beam_width == 1
    search(server, use_beam_search=False, n=2)
    assert not isinstance(server.engine.seen[-1][2], BeamSearchParams)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 5),
        ("early_stopping", True),
        ("include_stop_str_in_output", True),
        ("length_penalty", 0.5),
        ("max_tokens", 0),
        ("min_p", 0.1),
        ("n", 11),
        ("seed", "x"),
        ("skip_special_tokens", False),
        ("stop", ["x"]),
        ("stop_token_ids", [5]),
        ("temperature", 0.5),
        ("temperature", 1),
        ("top_k", 5),
        ("top_p", 0.9),
        ("use_beam_search", "yes"),
    ],
)
def test_what_a_search_cannot_honour_is_refused_by_name(server, field, value):
    num_seen = len(server.engine.seen)
    status, answer = search(server, **{"n": 2, field: value})
    assert status == 400
    assert answer["error"]["param"] == field
    assert field in answer["error"]["message"]
    assert len(server.engine.seen) == num_seen


def test_what_changes_nothing_is_welcome(server):
    neutral = {
        "best_of": 2,
        "early_stopping": False,
        "length_penalty": 1.0,
        "seed": 7,
        "stop": [],
        "temperature": 0,
        "top_k": -1,
        "top_p": 1.0,
    }
    assert search(server, n=2, **neutral)[0] == 200


def test_a_search_is_neither_streamed_nor_a_chat(server):
    status, answer = search(server, stream=True)
    assert (status, answer["error"]["param"]) == (400, "use_beam_search")
    assert "stream" in answer["error"]["message"]
    body = {"messages": [{"role": "user", "content": "hi"}], "use_beam_search": True}
    status, answer = server.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "use_beam_search")


def test_a_client_that_leaves_ends_the_search():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        body = {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 10_000}
        with contextlib.closing(server.open(COMPLETIONS, body)):
            wait_until(lambda: server.engine.running)
        wait_until(lambda: not server.engine.running)
        assert server.engine.num_aborted == 1
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2


@pytest.mark.parametrize(
    ("wrong", "status", "code"),
    [({"fails_after": 0}, 500, "generation_failed"), ({"dies_after": 2}, 503, "engine_dead")],
)
def test_a_search_that_fails(wrong, status, code):
    with live_server(FakeEngine(**wrong)) as server:
        found, answer = search(server, n=2)
    assert (found, answer["error"]["code"]) == (status, code)


# The search itself


def failed(token_ids: tuple[int, ...]) -> RequestOutput:
    return RequestOutput("r", None, token_ids, (CompletionOutput(0, "", (), "error"),), True)


def test_a40_logits_that_are_not_finite_end_a_search():
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    one = BeamSearch([5, 6], params, eos_token_ids=frozenset())
    one.advance([failed(ids) for ids in one.pending()])
    assert not one.pending()
    [beam] = one.output(None, None).beams
    assert (beam.token_ids, beam.finish_reason) == ((), "error")


# With the real engine

SMALL = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 4,
    "max_model_len": 128,
    "num_blocks": 200,
}
PROMPTS = [list(range(5, 30)), [8, 9], [3, 7, 9, 11]]
PARAMS = BeamSearchParams(beam_width=4, max_tokens=6)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    llm = LLM(str(directory), progress=SilentProgress(), **SMALL)
    llm.engine.eos_token_ids = frozenset(range(0, 160, 8))  # so that some beams stop
    return llm


@contextlib.asynccontextmanager
async def asynchronous(llm: LLM) -> AsyncIterator[AsyncEngine]:
    """The same engine on a thread of its own, with an empty prefix cache; checked at the end."""
    llm.engine.scheduler.forget_prefixes()
    engine = AsyncEngine(llm.engine.config, make_engine=lambda: llm.engine)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.shutdown()
    llm.engine.scheduler.check_invariants()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - another thread makes it true
            await asyncio.sleep(0.001)


def held(stats: EngineStats) -> int:
    return stats.num_running + stats.num_waiting + stats.blocks_in_use


async def test_searches_side_by_side_find_what_llm_finds(llm):
    expected = llm.beam_search([{"prompt_token_ids": ids} for ids in PROMPTS], PARAMS)
    reasons = {beam.finish_reason for output in expected for beam in output.beams}
    assert reasons == {"stop", "length"}
    async with asynchronous(llm) as engine:
        before = engine.stats()
        found = await asyncio.gather(*[engine.beam_search(ids, PARAMS) for ids in PROMPTS])
        after = engine.stats()
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert [(b.token_ids, b.finish_reason) for b in one.beams] == [
            (b.token_ids, b.finish_reason) for b in other.beams
        ]
        assert [b.cumulative_logprob for b in one.beams] == pytest.approx(
            [b.cumulative_logprob for b in other.beams], abs=1e-4
        )
    assert after.prefix_hit_tokens > before.prefix_hit_tokens
    # A round asks for up to twelve tokens, eight in a step: searches and beams share their steps.
    assert after.num_requests - before.num_requests > 40
    assert after.num_steps - before.num_steps < 40


async def test_a_search_finds_its_prompt_in_the_cache_under_its_salt(llm):
    async with asynchronous(llm) as engine:
        cold = await engine.beam_search(PROMPTS[0], PARAMS)
        warm = await engine.beam_search(PROMPTS[0], PARAMS)
        salted = await engine.beam_search(PROMPTS[0], PARAMS, cache_salt="s")
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 24)
    assert salted.num_cached_tokens == 0
    for other in (warm, salted):
        assert [b.token_ids for b in other.beams] == [b.token_ids for b in cold.beams]


async def test_a_search_is_checked_before_it_begins(llm):
    async with asynchronous(llm) as engine:
        before = engine.stats().num_requests
        with pytest.raises(RequestError, match="max_tokens asks for 200 more"):
            await engine.beam_search([5], BeamSearchParams(beam_width=2, max_tokens=200))
        with pytest.raises(RequestError, match="policy here is 'fcfs'"):
            await engine.beam_search([5], PARAMS, priority=1)
        assert engine.stats().num_requests == before


async def test_cancelling_a_search_leaves_nothing_behind(llm):
    long = BeamSearchParams(beam_width=4, max_tokens=100, ignore_eos=True)
    async with asynchronous(llm) as engine:
        before = engine.stats().num_requests
        searching = asyncio.create_task(engine.beam_search(PROMPTS[1], long))
        await until(lambda: engine.stats().num_requests > before + 10)
        searching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await searching
        await until(lambda: not held(engine.stats()))
        assert engine.stats().num_requests - before < 300
