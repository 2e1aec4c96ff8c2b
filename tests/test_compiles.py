"""No program is compiled after warm-up, and none of them copies the pool."""

import asyncio
import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import AsyncEngine, Engine, EngineConfig, SamplingParams
from paged_jax.compile_options import compile_options
from paged_jax.errors import ConfigError, LateCompileError
from paged_jax.model_runner import Program
from paged_jax.models import ServedModel, from_nnx
from paged_jax.progress import SilentProgress
from tests import nnx_models
from tests.engine_runs import Run, assert_idle, run_all

NUM_REQUESTS = 200
MAX_MODEL_LEN = 48
VOCAB_SIZE = 100
HOST = {"preemption_mode": "swap", "kv_offload": True, "swap_space": 1e-4}


def make(model, num_blocks: int, **config) -> Engine:
    defaults = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "warmup": "full",
    }
    return Engine(
        model,
        EngineConfig(model="test", num_blocks=num_blocks, **(defaults | config)),
        eos_token_ids=[2],
        progress=SilentProgress(),
    )


@pytest.fixture(scope="module")
def decoder() -> ServedModel:
    """Full and sliding layers."""
    return from_nnx(nnx_models.Decoder([(None, 2), (6, 1)], vocab_size=VOCAB_SIZE))


@pytest.fixture(scope="module")
def warm(decoder) -> Iterator[Engine]:
    """With so little room that blocks move in every way."""
    engine = make(decoder, 16, **HOST)
    engine.warm_up()
    yield engine
    engine.close()


class Heard:
    """Every trace, lowering and compilation that JAX tells of, of whatever function."""

    def __init__(self):
        self.events: list[str] = []
        self.listens = True
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, seconds: float, **_: object) -> None:
        if self.listens and event.startswith("/jax/core/compile/"):
            self.events.append(event)


@contextlib.contextmanager
def nothing_compiles(engine: Engine) -> Iterator[None]:
    engine.step()
    before, programs = engine.stats(), set(engine.runner._compiled)
    heard = Heard()
    try:
        yield
        after = engine.stats()
        assert heard.events == []
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert "/jax/core/compile/backend_compile_duration" in heard.events  # it does listen
    finally:
        heard.listens = False
    assert set(engine.runner._compiled) == programs == set(engine.runner.programs())
    assert after.compiles == before.compiles
    assert after.late_compiles == before.late_compiles
    assert after.generation_tokens > before.generation_tokens + NUM_REQUESTS


def test_the_warm_up_runs_every_program_once(warm, monkeypatch):
    """What XLA makes ready at a program's first run does not wait for a request."""
    ran: list[Program] = []
    monkeypatch.setattr(warm.runner, "dummy_run", ran.append)
    warm.warm_up()
    assert ran == list(warm.runner.programs())


def squared_rows(x: jax.Array) -> jax.Array:
    """The squared length of each row, in the form that XLA's CPU of JAX 0.10.2 computes wrongly."""
    unit = jnp.eye(3)
    return jax.vmap(lambda row: jnp.sum((unit @ row) ** 2))(x)


def test_a_sum_behind_a_product_is_right():
    x = jnp.zeros((40_000, 3)).at[:, 0].set(jnp.arange(40_000.0))
    program = jax.jit(squared_rows).lower(x).compile(compile_options(jax.devices("cpu")[0]))
    np.testing.assert_allclose(program(x), np.arange(40_000.0) ** 2, rtol=1e-6)


def test_the_cpus_library_gets_products_alone(warm):
    """No sum of any program of the engine goes to YNNPACK."""
    for program in warm.runner.programs():
        text = warm.runner.compile(program).as_text()
        called = re.findall(r"ynn_fusion[.\d]* = .* calls=(%[\w.]+)", text)
        bodies = [text.split(f"\n{name} (", 1)[1].split("\n}", 1)[0] for name in called]
        assert bodies or program.kind != "backbone"
        assert [body for body in bodies if " reduce(" in body] == []


def test_a_dummy_run_changes_nothing_of_a_request(warm):
    prompt, params = (
        list(range(20, 33)),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    )
    alone = Run(warm)
    alone.add("alone", prompt, params)
    alone.drain()
    disturbed = Run(warm)
    disturbed.add("disturbed", prompt, params)
    while warm.has_unfinished:
        disturbed.step()
        for program in warm.runner.programs():
            warm.runner.dummy_run(program)
    assert disturbed.samples["disturbed", 0].token_ids == alone.samples["alone", 0].token_ids
    assert_idle(warm)


def random_request(rng: np.random.Generator) -> tuple[list[int], SamplingParams]:
    """Some share a beginning; every field of the sampler is used, alone and together."""

    def sometimes(values, default):
        return default if rng.random() < 0.5 else values[rng.integers(len(values))]

    prompt = rng.integers(3, VOCAB_SIZE, rng.integers(1, 30)).tolist()
    if rng.random() < 0.3:
        prompt = [*range(20, 29), *prompt[:12]]
    n = int(sometimes((2, 3, 6), 1))
    params = SamplingParams(
        n=n,
        best_of=n + 1 if rng.random() < 0.1 else None,
        temperature=sometimes((0.0, 0.3, 1.0, 5.0), 0.0),
        top_k=sometimes((1, 5, -1, 1000), 0),
        top_p=sometimes((0.0, 0.3, 0.95), 1.0),
        min_p=sometimes((0.05, 0.5, 1.0), 0.0),
        seed=sometimes((0, 7, -1, 2**64 - 1), None),
        max_tokens=sometimes((0, 1, 2, 17), int(rng.integers(1, MAX_MODEL_LEN - len(prompt)))),
        logprobs=sometimes((0, 1, 20), None),
        presence_penalty=sometimes((-1.0, 0.5), 0.0),
        frequency_penalty=sometimes((-1.0, 0.5), 0.0),
        repetition_penalty=sometimes((0.7, 1.3), 1.0),
        stop_token_ids=sometimes(((5,), (5, 6, 7)), ()),
        ignore_eos=bool(rng.random() < 0.5),
        logit_bias=sometimes(({5: -100.0}, {7: 3.5, 9: -2.0}), None),
        allowed_token_ids=sometimes((tuple(range(3, 60)),), None),
        prompt_logprobs=None if rng.random() < 0.8 else 2,
        logprobs_mode=sometimes(("processed",), "raw"),
    )
    if params.max_tokens and rng.random() < 0.2:
        params = dataclasses.replace(params, min_tokens=1)
    return prompt, params


@pytest.mark.parametrize("order", ["one at a time", "all at once", "as they come"])
def test_a79_requests_of_every_kind_compile_nothing(order, warm):
    rng = np.random.default_rng(0)
    before = warm.stats()
    with nothing_compiles(warm):
        run = Run(warm)
        for i in range(NUM_REQUESTS):
            run.add(f"r{i}", *random_request(rng))
            if order == "one at a time":
                run.drain()
            elif order == "as they come":
                for _ in range(rng.integers(4)):
                    run.step()
                if rng.random() < 0.2:
                    warm.abort(f"r{rng.integers(i + 1)}")
        run.drain()
    assert_idle(warm)
    after = warm.stats()
    if order != "one at a time":
        assert after.preemptions > before.preemptions
        assert after.num_swaps > before.num_swaps
        assert after.num_swap_ins > before.num_swap_ins
    assert after.num_copies > before.num_copies
    assert after.prefix_hit_tokens > before.prefix_hit_tokens


async def test_a79_requests_through_the_event_loop_compile_nothing(warm, monkeypatch):
    monkeypatch.setattr(warm, "close", lambda: None)  # it is needed again
    rng = np.random.default_rng(1)
    served = AsyncEngine(warm.config, make_engine=lambda: warm)
    await served.start()

    async def read(prompt, params, patience: int) -> None:
        """All of it, or its first outputs."""
        async with contextlib.aclosing(served.generate(prompt, params)) as outputs:
            async for _ in outputs:
                patience -= 1
                if not patience:
                    return

    with nothing_compiles(warm):
        for _ in range(10):
            readers = [
                read(*random_request(rng), patience=int(rng.choice([1, 5, 1000])))
                for _ in range(NUM_REQUESTS // 10)
            ]
            await asyncio.gather(*readers)
        await served.shutdown(drain_s=10)
        Run(warm).drain()
    assert_idle(warm)


def test_the_number_of_programs_is_bounded(warm):
    """By sums, not by products: 3 step sizes, 2 samplers of 2 sizes, and per group 5 moves."""
    programs = list(warm.runner.programs())
    assert len(set(programs)) == len(programs)
    assert len([p for p in programs if p.kind == "backbone"]) == 3
    kinds = {p.kind for p in programs}
    assert len([p for p in programs if p.kind.startswith("sample")]) == 2 * 2
    assert {"copy", "swap_out", "swap_in"} <= kinds
    for kind, count in (("copy", 1), ("swap_out", 2), ("swap_in", 2)):
        assert len([p for p in programs if p.kind == kind]) == 2 * count


def test_a_late_compile_is_counted_and_logged_with_its_size(warm, caplog):
    (decode_step,) = (p for p in warm.runner.programs() if p.size == (1, 0))
    del warm.runner._compiled[decode_step]
    warm.step()
    before = warm.stats()
    with caplog.at_level(logging.WARNING):
        run_all(warm, {"a": ([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))})
    after = warm.stats()
    assert after.late_compiles == before.late_compiles + 1
    assert after.compiles == before.compiles + 1
    assert caplog.messages == ["compiling after warm-up: step of 1 decode rows"]


def test_all_that_a_step_lacks_is_compiled_at_once(warm, monkeypatch):
    """Python traces the sampler while XLA compiles the step."""
    first_step = warm.runner.sizes(0, 3, 1)
    backbone = Program("backbone", first_step.backbone)
    lacking = [backbone, first_step.sampler]
    for program in lacking:
        del warm.runner._compiled[program]
    together = []
    compile_all = warm.runner.compile_all

    def noted(programs, done):
        together.append(programs)
        compile_all(programs, done)

    monkeypatch.setattr(warm.runner, "compile_all", noted)
    before = warm.stats()
    run_all(warm, {"a": ([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))})
    assert lacking in together
    assert all(map(warm.runner.is_compiled, lacking))
    assert warm.stats().late_compiles == before.late_compiles + 2


def test_a_late_compile_can_be_refused():
    uniform = from_nnx(nnx_models.Uniform(50), max_position=64)
    engine = make(uniform, 20, max_num_seqs=1, late_compile=False)
    engine.warm_up()
    run_all(engine, {"a": ([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))})
    decode_step = Program("backbone", (1, 0))
    del engine.runner._compiled[decode_step]
    with pytest.raises(LateCompileError, match=r"late_compile=False.*step of 1 decode rows"):
        run_all(engine, {"b": ([3, 4, 6], SamplingParams(max_tokens=4, ignore_eos=True))})
    assert not engine.runner.is_compiled(decode_step)
    engine.close()


def test_refusing_late_compiles_needs_a_whole_warm_up():
    with pytest.raises(ConfigError, match="late_compile=False needs warmup='full', got 'lazy'"):
        EngineConfig(model="test", late_compile=False)
    assert EngineConfig(model="test", late_compile=False, warmup="full").late_compile is False


def test_warm_up_can_be_given_up(caplog):
    engine = make(from_nnx(nnx_models.Uniform(50), max_position=64), 20)
    engine.warm_up(wanted=lambda: len(engine.runner._compiled) < 2)
    assert 2 <= len(engine.runner._compiled) < len(list(engine.runner.programs()))
    run = Run(engine)
    run.add("a", [3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True))
    run.drain()
    assert engine.stats().late_compiles == 0  # nothing was promised
    engine.close()


def test_a_larger_program_stands_in_only_where_all_tokens_have_room():
    """One with prefill has room for every row, but computes only so many tokens."""
    sizes = {"max_num_seqs": 20, "max_num_batched_tokens": 32}
    engine = make(from_nnx(nnx_models.Uniform(50)), 40, warmup="lazy", **sizes)
    runner = engine.runner
    runner._compiled[Program("backbone", (20, 16))] = None  # is asked for, not run
    assert runner.sizes(4, 0, 4).backbone == (20, 16)
    assert runner.sizes(18, 0, 18).backbone == (20, 0)
    engine.close()


# Memory


def test_no_program_copies_the_pool(warm, decoder):
    """Donated arrays are written in place, and a step needs no more memory in a larger pool."""
    larger = make(decoder, 160, **HOST)
    num_blocks = [engine.scheduler.config.num_blocks for engine in (warm, larger)]
    assert num_blocks[1][0] == 10 * num_blocks[0][0]
    largest, _ = warm.runner.largest_programs()
    decodes = Program("backbone", (4, 0))
    for program in (largest, decodes, Program("copy", (0, 4)), Program("swap_in", (0, 8))):
        used = [e.runner.compile(program).memory_analysis() for e in (warm, larger)]
        assert used[1].temp_size_in_bytes == used[0].temp_size_in_bytes
        for engine, memory in zip((warm, larger), used, strict=True):
            specs = engine.runner.specs if program.kind == "backbone" else engine.runner.specs[:1]
            pool = sum(engine.runner.backend.layout(spec).num_bytes for spec in specs)
            assert memory.alias_size_in_bytes >= pool
            assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096
    larger.close()


def test_the_pools_arrays_stay_where_they_are(warm):
    """Step after step the device works in the same buffers."""

    def pointers() -> list[int]:
        arrays = [a for pool in warm.runner._state.pools for a in pool.arrays]
        jax.block_until_ready(arrays)
        return [array.unsafe_buffer_pointer() for array in arrays]

    before = pointers()
    assert len(set(before)) == 4
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, n=2)
    run_all(warm, {"a": ([3, 4, 5], params), "b": ([3, 4, 6], params)})
    assert pointers() == before
