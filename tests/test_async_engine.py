"""The engine behind an event loop: streams, clients that leave, and how an engine ends."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from paged_jax import (
    AsyncEngine,
    Engine,
    EngineConfig,
    EngineDeadError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from paged_jax.progress import SilentProgress
from tests.engine_runs import Run, assert_idle
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

PATIENCE_S = 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    """One engine for all tests: each AsyncEngine runs it in a thread of its own."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_llama(directory, vocab_size=VOCAB_SIZE)
    write_tokenizer(directory)
    config = EngineConfig(
        model=str(directory),
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        block_size=8,
        num_blocks=65,
    )
    engine = Engine.from_pretrained(config, progress=SilentProgress())
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def leaves_nothing(engine) -> Iterator[None]:
    engine.scheduler.forget_prefixes()
    yield
    assert_idle(engine)


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    await served.start()
    try:
        yield served
        await until(lambda: not engine.has_unfinished)
        assert not served._streams
    finally:
        await served.shutdown()
        finish(engine)


def finish(engine: Engine) -> None:
    """End what a shutdown left in the engine, which nobody would use again."""
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    Run(engine).drain()


async def until(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < PATIENCE_S, "still not true"
        await asyncio.sleep(0.001)


class Steps:
    """Stands in for an engine's `step`: counts, slows down, holds up or raises."""

    def __init__(self, engine: Engine):
        self._step = engine.step
        self.num = 0
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.is_held = False
        self._open = threading.Event()
        self._open.set()

    async def hold(self) -> None:
        """Returns when the engine's thread stands before its next step; it must have work."""
        self._open.clear()
        await until(lambda: self.is_held)

    def go_on(self) -> None:
        self.is_held = False
        self._open.set()

    def __call__(self):
        if not self._open.is_set():
            self.is_held = True
            assert self._open.wait(PATIENCE_S)
        time.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        self.num += 1
        return self._step()


@pytest.fixture
def steps(engine, monkeypatch) -> Steps:
    steps = Steps(engine)
    monkeypatch.setattr(engine, "step", steps)
    return steps


class Told:
    """What a stream told, joined."""

    def __init__(self):
        self.outputs: list[RequestOutput] = []

    def add(self, output: RequestOutput) -> None:
        self.outputs.append(output)

    def text(self, index: int = 0) -> str:
        return "".join(c.text for o in self.outputs for c in o.outputs if c.index == index)

    def token_ids(self, index: int = 0) -> list[int]:
        return [t for o in self.outputs for c in o.outputs if c.index == index for t in c.token_ids]

    def reasons(self, index: int = 0) -> list[str]:
        found = [c.finish_reason for o in self.outputs for c in o.outputs if c.index == index]
        return [reason for reason in found if reason is not None]


async def read(
    served: AsyncEngine, prompt, params: SamplingParams, *, pause_s: float | None = None, **options
) -> Told:
    told = Told()
    async with contextlib.aclosing(served.generate(prompt, params, **options)) as outputs:
        async for output in outputs:
            told.add(output)
            if pause_s is not None:
                await asyncio.sleep(pause_s)
    assert [output.finished for output in told.outputs].count(True) == 1
    assert told.outputs[-1].finished
    return told


def alone(engine: Engine, prompt, params: SamplingParams) -> list[list[int]]:
    """The engine's own tokens of each sample."""
    ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    run = Run(engine)
    run.add("alone", ids, params)
    run.drain()
    return [list(run.tokens("alone", index)) for index in range(params.n)]


# Streams


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=3, max_tokens=40, n=3, ignore_eos=True)]
)
async def test_joined_deltas_are_the_whole(params, engine):
    want = alone(engine, "the other", params)
    async with serving(engine) as served:
        told = await read(served, "the other", params)
    for index, token_ids in enumerate(want):
        assert told.token_ids(index) == token_ids
        assert told.text(index) == engine.tokenizer.decode(token_ids)
        assert told.reasons(index) == ["length"]
    assert {output.prompt for output in told.outputs} == {"the other"}
    assert told.outputs[0].prompt_token_ids == tuple(engine.tokenizer.encode("the other"))
    # Each token comes by itself, and each output is of one sample.
    assert all(len(output.outputs) == 1 for output in told.outputs)
    assert max(len(output.outputs[0].token_ids) for output in told.outputs) == 1
    assert told.outputs[-1].num_generated_tokens == sum(map(len, want))


async def test_every_kind_of_prompt(engine):
    ids = engine.tokenizer.encode("the other")
    async with serving(engine) as served:
        texts = [
            (await read(served, prompt, GREEDY)).text()
            for prompt in ("the other", {"prompt": "the other"}, {"prompt_token_ids": ids}, ids)
        ]
    assert texts == [texts[0]] * 4


async def test_many_at_once_get_their_own(engine):
    prompts = [f"number {i} of " * (1 + i % 4) for i in range(12)]
    params = [
        SamplingParams(seed=i, max_tokens=5 + 3 * i, ignore_eos=True, temperature=float(i % 2))
        for i in range(12)
    ]
    want = [alone(engine, *job)[0] for job in zip(prompts, params, strict=True)]
    async with serving(engine) as served:
        told = await asyncio.gather(*map(lambda *job: read(served, *job), prompts, params))
    assert [one.token_ids() for one in told] == want


async def test_a_request_tells_how_long_it_waited_to_run(engine, steps):
    steps.delay_s = 0.002
    async with serving(engine) as served:
        readers = [asyncio.create_task(read(served, [i + 5], GREEDY)) for i in range(5)]
        told = await asyncio.gather(*readers)
    waits = [{output.queue_s for output in one.outputs} for one in told]
    assert all(len(wait) == 1 for wait in waits)
    first, *_, last = sorted(min(wait) for wait in waits)
    assert 0 <= first < 29 * steps.delay_s <= last  # there are rows for four


async def test_a26_requests_of_one_name_are_two_requests(engine):
    prompts = ("first", "second one")
    want = [alone(engine, prompt, GREEDY)[0] for prompt in prompts]
    async with serving(engine) as served:
        told = await asyncio.gather(
            *(read(served, prompt, GREEDY, request_id="same") for prompt in prompts),
            read(served, "third", GREEDY, request_id="x" * 2**20),
        )
    assert [one.token_ids() for one in told[:2]] == want
    assert all(one.outputs[0].request_id.startswith("same#") for one in told[:2])
    assert told[0].outputs[0].request_id != told[1].outputs[0].request_id


async def test_a21_nothing_wanted_is_one_output(engine):
    async with serving(engine) as served:
        told = await read(served, "the other", SamplingParams(max_tokens=0, n=2))
    assert [told.text(0), told.text(1)] == ["", ""]
    assert [told.reasons(0), told.reasons(1)] == [["length"], ["length"]]


async def test_a_stop_string_ends_the_stream_and_the_work(engine):
    (token_ids,) = alone(engine, "the other", LONG)
    text = engine.tokenizer.decode(token_ids)
    stop = text[20:23]
    before = engine.stats().generation_tokens
    async with serving(engine) as served:
        for include in (False, True):
            params = SamplingParams(
                temperature=0.0,
                max_tokens=200,
                ignore_eos=True,
                stop=[stop],
                include_stop_str_in_output=include,
            )
            told = await read(served, "the other", params)
            end = text.index(stop) + include * len(stop)
            assert told.text() == text[:end]
            assert told.reasons() == ["stop"]
            assert told.outputs[-1].outputs[0].stop_reason == stop
    assert engine.stats().generation_tokens - before < 2 * 60  # of 400


async def test_a_stop_string_ends_the_work_of_its_own_sample(engine):
    params = {"seed": 8, "max_tokens": 150, "n": 2, "ignore_eos": True}
    texts = [engine.tokenizer.decode(ids) for ids in alone(engine, "x", SamplingParams(**params))]
    stop = next(letter for letter in texts[0][5:] if letter not in texts[1] and letter != "\ufffd")
    before = engine.stats().generation_tokens
    async with serving(engine) as served:
        told = await read(served, "x", SamplingParams(**params, stop=stop))
    assert told.text(0) == texts[0][: texts[0].index(stop)]
    assert told.text(1) == texts[1]
    assert (told.reasons(0), told.reasons(1)) == (["stop"], ["length"])
    generated = engine.stats().generation_tokens - before
    assert generated <= len(told.token_ids(0)) + 150 + 20 < 300  # it ran on for a few steps


async def test_a_slow_reader_holds_nobody_up(engine):
    async with serving(engine) as served:
        slow = asyncio.create_task(read(served, "slow", GREEDY, pause_s=0.02))
        quick = await read(served, "quick", GREEDY)
        assert not slow.done()
        await until(lambda: not engine.has_unfinished)  # the engine waits for nobody
        assert not slow.done()
        assert len((await slow).token_ids()) == len(quick.token_ids()) == 30


# Refusals


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([VOCAB_SIZE], "prompt"),
        ([-1], "prompt"),
        ([1.5], "prompt"),
        ({"text": "x"}, "prompt"),
        (7, "prompt"),
        ("x" * 300, "prompt"),
        ("x" * 5000, "prompt"),
        ("\ud800", "prompt"),
        ("x" * 5000 + "\ud800", "prompt"),
        ([1] * 60, "max_tokens"),
    ],
)
async def test_a_bad_prompt_is_refused_before_anything_starts(prompt, param, engine):
    async with serving(engine) as served:
        before = engine.stats().num_requests
        with pytest.raises(RequestError) as caught:
            await read(served, prompt, LONG)
        assert caught.value.param == param
        assert not served._streams
        assert len((await read(served, [VOCAB_SIZE - 1], GREEDY)).token_ids()) == 30
        assert engine.stats().num_requests == before + 1


async def test_a_refusal_on_the_engines_thread_reaches_the_caller(engine, monkeypatch):
    def refuse(*args, **kwargs):
        raise RequestError("no", param="prompt")

    async with serving(engine) as served:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "add_request", refuse)
            with pytest.raises(RequestError, match="no"):
                await read(served, "the other", GREEDY)
        assert len((await read(served, "the other", GREEDY)).token_ids()) == 30


async def test_chat_needs_a_template_and_a_tokenizer(engine):
    async with serving(engine) as served:
        messages = [{"role": "user", "content": "hi"}]
        ids = served.render_chat(messages)
        assert engine.tokenizer.decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        with pytest.raises(RequestError, match="the role judge is not known"):
            served.render_chat([{"role": "judge", "content": "hi"}])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "tokenizer", None)
            with pytest.raises(RequestError, match="needs a tokenizer"):
                served.render_chat(messages)
            with pytest.raises(RequestError, match="needs a tokenizer"):
                await read(served, "text", GREEDY)


# Clients that leave


def is_free(engine: Engine) -> bool:
    return not engine.has_unfinished and not engine.scheduler.pools[0].num_referenced


@pytest.mark.parametrize("how", ["aclose", "cancel"])
@pytest.mark.parametrize("n", [1, 4])
async def test_a25_a_reader_that_leaves_ends_every_sample_within_two_steps(how, n, engine, steps):
    params = SamplingParams(seed=1, max_tokens=200, n=n, ignore_eos=True)
    async with serving(engine) as served:
        for _ in range(25):
            outputs = served.generate("the other", params)
            await anext(outputs)
            if how == "cancel":
                reading = asyncio.create_task(read_on(outputs))
            await steps.hold()
            num = steps.num
            if how == "cancel":
                await cancel(reading)
            else:
                await outputs.aclose()
            assert not served._streams
            steps.go_on()
            await until(lambda: is_free(engine))
            # The step that was held up may still compute it; the next one only takes it in.
            assert steps.num <= num + 2
            assert not engine.scheduler.requests


async def read_on(outputs) -> None:
    async for _ in outputs:
        pass


async def cancel(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("streaming", [True, False])
async def test_a24_leaving_during_a_long_prefill_ends_it_within_two_steps(streaming, engine, steps):
    async with serving(engine) as served:
        prompt, params = [7] * 250, SamplingParams(max_tokens=2)  # 16 steps of prefill
        steps.delay_s = 0.01
        if streaming:
            reading = asyncio.create_task(anext(served.generate(prompt, params)))
        else:
            reading = asyncio.create_task(read(served, prompt, params))
        await until(lambda: steps.num >= 3)
        await steps.hold()
        num, computed = steps.num, engine.stats().scheduled_tokens
        await cancel(reading)
        steps.go_on()
        await until(lambda: is_free(engine))
        assert steps.num <= num + 2 < 16
        assert engine.stats().scheduled_tokens <= computed + 2 * 16
        assert len((await read(served, "next", GREEDY)).token_ids()) == 30


async def test_a04_leaving_in_every_state(engine, steps):
    """Queued, in mid-prefill, decoding, finished; a bystander is not disturbed."""
    want = alone(engine, "bystander", LONG)[0]
    async with serving(engine) as served:
        bystander = asyncio.create_task(read(served, "bystander", LONG))
        steps.delay_s = 0.002
        await until(lambda: engine.scheduler.running)

        queued = [served.generate([9] * 5, LONG) for _ in range(8)]
        readers = [asyncio.create_task(anext(one)) for one in queued]
        await until(lambda: engine.stats().num_waiting >= 4)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for one in queued:
            await one.aclose()
        await until(lambda: len(engine.scheduler.requests) == 1)

        prefilling = asyncio.create_task(anext(served.generate([8] * 220, GREEDY)))
        await until(lambda: engine.stats().num_running == 2)
        prefilling.cancel()
        await asyncio.gather(prefilling, return_exceptions=True)

        decoding = served.generate("decoding", GREEDY)
        await anext(decoding)
        await decoding.aclose()
        await decoding.aclose()

        await read(served, "finished", SamplingParams(max_tokens=3))
        served._abort("nobody#999")
        assert (await bystander).token_ids() == want


async def test_leaving_before_the_first_look_starts_nothing(engine):
    async with serving(engine) as served:
        before = engine.stats().num_requests
        await served.generate("the other", LONG).aclose()
        reading = asyncio.create_task(read(served, "the other", LONG))
        await asyncio.sleep(0)  # handed in, and perhaps not taken yet
        await cancel(reading)
        await until(lambda: is_free(engine))
        assert engine.stats().num_requests <= before + 1


async def test_a_preempted_stream_goes_on(engine, monkeypatch):
    """Four of them need more than all blocks; what they say does not change."""
    prompts = [[10 + i] * 40 for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    want = [alone(engine, prompt, params)[0] for prompt in prompts]
    before = engine.stats().preemptions
    async with serving(engine) as served:
        readers = [asyncio.create_task(read(served, prompt, params)) for prompt in prompts]
        await until(lambda: engine.stats().preemptions > before)
        readers[-1].cancel()  # perhaps the one that waits
        told = await asyncio.gather(*readers[:-1])
    assert [one.token_ids() for one in told] == want[:-1]


# Its end


async def test_an_engine_that_dies_tells_every_stream(engine, steps):
    async with serving_until_it_dies(engine, steps) as served:
        readers = [asyncio.create_task(read(served, f"number {i}", LONG)) for i in range(6)]
        await until(lambda: engine.stats().num_running == 4)
        steps.error = RuntimeError("innards")
        for reader in readers:
            with pytest.raises(EngineDeadError, match="stopped: RuntimeError") as caught:
                await asyncio.wait_for(reader, PATIENCE_S)
            assert "innards" not in str(caught.value)
        assert served.state == "dead"
        with pytest.raises(EngineDeadError, match="it is dead"):
            await read(served, "late", GREEDY)
        assert not served._streams
        assert served.stats().block_size == 8  # still answers


async def test_a_request_that_meets_the_death_is_told_too(engine, steps):
    """Handed in while the step that fails is running: nobody will ever take it."""
    async with serving_until_it_dies(engine, steps) as served:
        running = asyncio.create_task(read(served, "running", LONG))
        await until(lambda: engine.stats().num_running)
        await steps.hold()
        steps.error = ValueError("x")
        late = asyncio.create_task(read(served, "late", GREEDY))
        await until(lambda: len(served._streams) == 2)
        steps.go_on()
        for reader in (running, late):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(reader, PATIENCE_S)


@contextlib.asynccontextmanager
async def serving_until_it_dies(engine: Engine, steps: Steps) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    await served.start()
    try:
        yield served
    finally:
        await served.shutdown()
        assert served.state == "dead"
        steps.error = None
        finish(engine)


async def test_shutdown_drains_what_runs_and_takes_nothing_new(engine, steps):
    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    await served.start()
    steps.delay_s = 0.002
    reader = asyncio.create_task(read(served, "the other", GREEDY))
    await until(lambda: engine.stats().num_running)
    ending = asyncio.create_task(served.shutdown(drain_s=PATIENCE_S))
    await asyncio.sleep(0.01)
    assert served.state == "draining"
    with pytest.raises(EngineDeadError, match="it is draining"):
        await read(served, "late", GREEDY)
    assert len((await reader).token_ids()) == 30
    await asyncio.wait_for(ending, PATIENCE_S)
    assert served.state == "dead"
    await served.shutdown()  # again


async def test_shutdown_ends_what_does_not_drain_in_time(engine, steps):
    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    await served.start()
    steps.delay_s = 0.05
    reader = asyncio.create_task(read(served, "the other", LONG))
    await until(lambda: engine.stats().num_running)
    began = time.monotonic()
    await served.shutdown(drain_s=0.1)
    assert time.monotonic() - began < 5
    with pytest.raises(EngineDeadError, match="shutting down"):
        await reader
    assert served.state == "dead"
    finish(engine)


@pytest.mark.parametrize("drain_s", [0.0, 1.0])
async def test_shutdown_before_the_engine_is_there(drain_s, engine):
    go_on = threading.Event()

    def load() -> Engine:
        assert go_on.wait(PATIENCE_S)
        return engine

    served = AsyncEngine(engine.config, make_engine=load)
    assert served.state == "loading"
    assert served.stats().num_steps == 0
    starting = asyncio.create_task(served.start())
    await asyncio.sleep(0.01)
    with pytest.raises(EngineDeadError, match="it is loading"):
        await read(served, "early", GREEDY)
    await asyncio.wait_for(served.shutdown(drain_s=drain_s), PATIENCE_S)
    assert served.state == "dead"
    go_on.set()
    with pytest.raises(EngineDeadError, match="shut down before it was ready"):
        await asyncio.wait_for(starting, PATIENCE_S)
    await asyncio.to_thread(served._thread.join, PATIENCE_S)
    assert not served._thread.is_alive()
    served._begin_to_compile()  # which the thread may have sent just before
    assert served.state == "dead"


async def test_a_start_that_fails_says_why_and_is_dead(engine):
    def load() -> Engine:
        raise MemoryError("no room")

    served = AsyncEngine(engine.config, make_engine=load)
    with pytest.raises(MemoryError, match="no room"):
        await served.start()
    assert served.state == "dead"
    with pytest.raises(EngineDeadError, match="it is dead"):
        await read(served, "x", GREEDY)
    await served.shutdown()


async def test_states_of_a_start(engine, monkeypatch):
    seen = []
    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    go_on = threading.Event()
    monkeypatch.setattr(engine, "warm_up", lambda wanted: go_on.wait(PATIENCE_S))
    seen.append(served.state)
    starting = asyncio.create_task(served.start())
    await until(lambda: served.state == "compiling")
    go_on.set()
    await starting
    assert seen == ["loading"]
    assert served.state == "ready"
    assert served.model_name == engine.model_name
    assert (served.max_model_len, served.vocab_size) == (256, VOCAB_SIZE)
    await served.shutdown()


async def test_nobody_waits_while_a_long_text_is_tokenized(engine, monkeypatch):
    """It runs in a thread, and what ends meanwhile refuses it."""
    going, go_on = threading.Event(), threading.Event()
    encode = engine.tokenizer.encode

    def slow_encode(text, **options):
        going.set()
        assert go_on.wait(PATIENCE_S)
        return encode(text[:5], **options)

    served = AsyncEngine(engine.config, make_engine=lambda: engine)
    await served.start()
    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "encode", slow_encode)
        long = asyncio.create_task(read(served, "x" * 5000, GREEDY))
        await until(going.is_set)
        assert len((await read(served, [1, 2, 3], GREEDY)).token_ids()) == 30
        await served.shutdown()
        go_on.set()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(long, PATIENCE_S)
