"""Compiling before the first request: what a client sees meanwhile, and how it ends early."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from paged_jax import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineDeadError,
    EngineStats,
    SamplingParams,
)
from paged_jax.progress import SilentProgress
from paged_jax.step_clock import StepClock
from tests.live_server import live_server, tiny_server, wait_until
from tests.tiny_models import write_tiny_llama

COMPLETIONS = "/v1/completions"
CONFIG = EngineConfig(model="m", warmup="full")


class CompilingEngine:
    """An engine that compiles until it is told that it is done, or not wanted any more."""

    model_name = "m"
    has_unfinished = False

    def __init__(self):
        self.compiling = threading.Event()
        self.compiled = threading.Event()
        self.closed = threading.Event()
        self.step_clock = StepClock()

    def warm_up(self, wanted: Callable[[], bool]) -> None:
        self.compiling.set()
        while wanted() and not self.compiled.wait(0.005):
            pass

    def step(self) -> list:
        return []

    def stats(self) -> EngineStats:
        return EngineStats.empty(CONFIG)

    def close(self) -> None:
        self.closed.set()


def test_the_server_says_that_it_compiles():
    inner = CompilingEngine()
    with live_server(AsyncEngine(CONFIG, make_engine=lambda: inner), ready=False) as server:
        assert inner.compiling.wait(30)
        for path in ("/health", "/ping"):
            status, _, body = server.request("GET", path)
            assert (status, body) == (503 if path == "/health" else 200, b'{"state":"compiling"}')
        status, answer = server.post(COMPLETIONS, {"prompt": [5]})
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert "compiling" in answer["error"]["message"]
        inner.compiled.set()
        wait_until(lambda: server.request("GET", "/health")[0] == 200)
    assert inner.closed.is_set()


async def test_shutting_down_ends_the_warm_up():
    inner = CompilingEngine()
    engine = AsyncEngine(CONFIG, make_engine=lambda: inner)
    starting = asyncio.create_task(engine.start())
    await asyncio.to_thread(inner.compiling.wait, 30)
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="before it was ready"):
        await starting
    assert inner.closed.is_set()
    assert engine.state == "dead"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    return directory


FEW_PROGRAMS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 32,
    "block_size": 4,
    "num_blocks": 20,
    "warmup": "full",
}


def test_programs_that_are_no_longer_wanted_are_not_compiled(model):
    config = EngineConfig(model=str(model), skip_tokenizer_init=True, **FEW_PROGRAMS)
    engine = Engine.from_pretrained(config, progress=SilentProgress())
    asked = []
    engine.warm_up(wanted=lambda: asked.append(1) or len(asked) < 3)
    compiled = [engine.runner.is_compiled(program) for program in engine.runner.programs()]
    assert sum(compiled) < len(compiled) - 1
    engine.add_request("r", [5, 6], SamplingParams(max_tokens=3))
    while engine.has_unfinished:
        engine.step()
    assert engine.stats().late_compiles == 0, "it was not warm, so nothing was late"
    engine.close()


def test_after_a_warm_up_nothing_is_compiled(model):
    with tiny_server(model, **FEW_PROGRAMS) as server:
        compiles = server.metric("paged_jax:compiles_total")
        assert compiles > 0, "known before the first step"
        for asked in (
            {"max_tokens": 20},
            {"n": 2, "max_tokens": 5},
            {"best_of": 2, "max_tokens": 5},
            {"use_beam_search": True, "n": 2, "max_tokens": 3},
        ):
            prompts = [list(range(5, 5 + n)) for n in (1, 2, 9)]
            assert (
                server.post(COMPLETIONS, {"prompt": prompts, "ignore_eos": True} | asked)[0] == 200
            )
        assert server.metric("paged_jax:late_compiles_total") == 0
        assert server.metric("paged_jax:compiles_total") == compiles
