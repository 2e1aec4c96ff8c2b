"""Steps that the device fails: done over to the same tokens, and the third in a row ends it all."""

import asyncio
import json

import numpy as np
import pytest

from paged_jax import AsyncEngine, Engine, EngineConfig, EngineDeadError, SamplingParams
from paged_jax.progress import SilentProgress
from scheduler import replay
from tests.engine_runs import Run, assert_idle, run_all
from tests.live_server import live_server, wait_until
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

PROMPTS = [[40 + i, 7, 9, 11, 20 + i] * (i + 1) for i in range(5)]
FORM = {"structured_outputs": {"regex": "[a-z]{30}"}}
JOBS = {
    "greedy": (PROMPTS[4], SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)),
    "drawn": (PROMPTS[1], SamplingParams(seed=4, max_tokens=25, ignore_eos=True, n=2)),
    "penalized": (
        PROMPTS[2],
        SamplingParams(seed=5, max_tokens=25, ignore_eos=True, frequency_penalty=1.0, logprobs=1),
    ),
    "shaped": (PROMPTS[3], SamplingParams(seed=6, max_tokens=25, **FORM)),
    "scored": (
        PROMPTS[0],
        SamplingParams(seed=7, max_tokens=9, ignore_eos=True, prompt_logprobs=1),
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_tiny_llama(path, vocab_size=VOCAB_SIZE)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def programs() -> dict:
    return {}


@pytest.fixture
def make(directory, programs):
    made = []

    def make_engine(**fields) -> Engine:
        config = EngineConfig(
            model=str(directory),
            max_model_len=96,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            block_size=8,
            num_blocks=33,
            **fields,
        )
        engine = Engine.from_pretrained(config, progress=SilentProgress())
        engine.runner._compiled = programs.setdefault(engine.runner.specs, {})
        engine.runner._patient = False
        made.append(engine)
        return engine

    yield make_engine
    for engine in made:
        engine.close()


class Faults:
    """Makes chosen calls of a program lose what was donated to it, and raise."""

    def __init__(self, engine: Engine, kind: str, failing: set[int]):
        self.num_calls = 0
        self.num_failed = 0
        runner, compiled = engine.runner, engine.runner.compile

        def compile_faulty(program):
            made = compiled(program)
            if program.kind != kind:
                return made

            def call(*args):
                self.num_calls += 1
                result = made(*args)  # from here on the arguments are gone
                if self.num_calls not in failing:
                    return result
                self.num_failed += 1
                raise RuntimeError("the device is out of sorts")

            return call

        runner.compile = compile_faulty


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", ["backbone", "sample_full", "score", "count"])
def test_a_failed_step_is_done_over_to_the_same_tokens(kind, overlap, make, caplog):
    engine = make(overlap=overlap)
    want = run_all(engine, JOBS)
    failing = {1, 2, 9, 20} if kind in ("backbone", "sample_full") else {1}
    faults = Faults(engine, kind, failing)
    run, scores = Run(engine), []
    for request_id, (prompt, params) in JOBS.items():
        run.add(request_id, prompt, params)
    while engine.has_unfinished:
        num_failed = engine.stats().num_failed_steps
        scores += [u.prompt_logprobs for u in run.step() if u.prompt_logprobs is not None]
        engine.scheduler.check_invariants()
        if engine.stats().num_failed_steps > num_failed:
            assert engine.stats().blocks_cached == 0  # nothing of the lost pool is found again
    assert_idle(engine)
    assert faults.num_failed == len(failing) == engine.stats().num_failed_steps
    assert "a step failed and is done over" in caplog.text
    assert "out of sorts" in caplog.text
    assert len(scores) == 1
    for key, sample in want.items():
        got = run.samples[key]
        assert (got.token_ids, got.finish_reason) == (sample.token_ids, sample.finish_reason), key
        np.testing.assert_allclose(
            [e.logprob for e in got.logprobs], [e.logprob for e in sample.logprobs], atol=1e-4
        )


def test_a_result_that_cannot_be_read_is_a_failed_step(make, monkeypatch):
    """What goes wrong on a device that runs behind shows when its result is fetched."""
    engine = make()
    want = run_all(engine, JOBS)
    run = Run(engine)
    for request_id, (prompt, params) in JOBS.items():
        run.add(request_id, prompt, params)
    for _ in range(3):
        run.step()

    class Broken:
        def __array__(self, *args, **kwargs):
            raise RuntimeError("lost")

    pending = engine._pending[0]
    engine._pending[0] = pending._replace(result=pending.result._replace(tokens=Broken()))
    run.drain()
    assert_idle(engine)
    assert engine.stats().num_failed_steps == 1
    assert {k: s.token_ids for k, s in run.samples.items()} == {
        k: s.token_ids for k, s in want.items()
    }


def test_three_failures_in_a_row_are_raised_and_fewer_are_not(make):
    engine = make()
    Faults(engine, "backbone", {1, 2, 5, 6, 9, 10})
    run_all(engine, {"greedy": JOBS["greedy"]})
    assert engine.stats().num_failed_steps == 6
    engine = make()
    Faults(engine, "backbone", {3, 4, 5})
    engine.add_request("a", *JOBS["greedy"])
    for _ in range(4):
        engine.step()
    assert engine.stats().num_failed_steps == 2
    with pytest.raises(Exception, match="out of sorts"):
        engine.step()


def test_a_log_with_failed_steps_replays(make, tmp_path):
    engine = make(step_log=str(tmp_path / "log"))
    Faults(engine, "backbone", {2, 5, 6})
    run_all(engine, JOBS)
    engine.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum(json.loads(line)["event"] == "recompute" for line in lines) == 3
    assert sum(1 for _ in replay(lines)) > 20


async def test_streams_go_on_after_a_failed_step_and_end_after_three(make):
    engine = make()
    prompt, params = JOBS["greedy"]
    (want,) = run_all(engine, {"a": (prompt, params)}).values()
    Faults(engine, "sample", {2, 9, 30, 31, 32})
    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    await served.start()

    async def tokens() -> list[int]:
        found = []
        async for output in served.generate(prompt, params):
            found += output.outputs[0].token_ids
        return found

    assert await tokens() == want.token_ids
    with pytest.raises(EngineDeadError):
        await asyncio.gather(tokens(), tokens())
    assert served.state == "dead"
    with pytest.raises(EngineDeadError):
        await tokens()
    await served.shutdown()


def test_after_three_failures_the_server_says_503(make):
    engine = make()
    prompt, _ = JOBS["greedy"]
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0}
    with live_server(AsyncEngine(engine.config, make_engine=lambda: engine)) as server:
        status, want = server.post("/v1/completions", body)
        assert status == 200
        Faults(engine, "backbone", {2, 10, 11, 12})
        status, answer = server.post("/v1/completions", body)
        assert (status, answer["choices"]) == (200, want["choices"])
        assert server.request("GET", "/health")[0] == 200
        status, answer = server.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (503, "engine_dead")
        wait_until(lambda: server.request("GET", "/health")[0] == 503)
        assert server.post("/v1/completions", body)[0] == 503
