"""Other weights in a running engine: what comes out, what is kept, what is freed."""

import gc
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from paged_jax import AsyncEngine, ConfigError, Engine, ModelLoadError, RequestError, SamplingParams
from paged_jax.models import from_nnx
from paged_jax.progress import SilentProgress
from scheduler.step_log import replay
from tests import nnx_models
from tests.dense_decoding import DenseDecoder
from tests.engine_runs import Run, assert_idle

COUNT = 12
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def module_of(seed: int) -> nnx_models.Decoder:
    """The same decoder with weights of another seed."""
    module = nnx_models.Decoder([(6, 1), (None, 2)], vocab_size=60, max_position=64)
    state = nnx.state(module, nnx.Param)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    new = [x + 0.2 * n for x, n in zip(leaves, noise, strict=True)]
    nnx.update(module, treedef.unflatten(new))
    return module


@pytest.fixture(scope="module")
def modules() -> list[nnx_models.Decoder]:
    return [module_of(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def decoders(modules) -> list[DenseDecoder]:
    """What each module says, densely; they share their programs."""
    served = [from_nnx(module) for module in modules]
    return [DenseDecoder(model, 48) for model in served]


@pytest.fixture(scope="module")
def shared(modules, tmp_path_factory) -> Iterator[Engine]:
    engine = Engine.from_nnx(
        modules[0],
        max_model_len=48,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=40,
        warmup="none",
        step_log=str(tmp_path_factory.mktemp("log") / "steps.jsonl"),
        progress=SilentProgress(),
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(shared, modules) -> Iterator[Engine]:
    """With the first module's weights, in a cache that knows none of their blocks."""
    shared.update_params(modules[0])
    yield shared
    assert_idle(shared)


def answer(engine: Engine, name: str, params: SamplingParams = GREEDY) -> tuple[tuple, int]:
    """Tokens of PROMPT, and how many of the prompt were found in the cache."""
    run = Run(engine)
    request = run.add(name, PROMPT, params)
    run.drain()
    return run.tokens(name), request.num_cached_tokens


def expect(decoder: DenseDecoder, prompt=PROMPT, count: int = COUNT) -> tuple[int, ...]:
    decoded = decoder.greedy(prompt, count)
    assert decoded.is_clear
    return decoded.token_ids


def test_a10_new_weights_find_no_block_of_the_old(engine, modules, decoders):
    assert answer(engine, "a") == (expect(decoders[0]), 0)
    assert answer(engine, "b")[1] == 12  # the cache works
    assert engine.update_params(modules[1], version="step 1") == "step 1" == engine.params_version
    assert expect(decoders[0]) != expect(decoders[1])
    assert answer(engine, "c") == (expect(decoders[1]), 0)
    assert answer(engine, "d") == (expect(decoders[1]), 12)
    engine.update_params(modules[0])  # the old weights again are new ones, too
    assert answer(engine, "e") == (expect(decoders[0]), 0)


def test_an_update_compiles_nothing_and_frees_the_old_weights(engine, modules):
    answer(engine, "a")
    gc.collect()
    before = engine.stats().compiles, len(jax.live_arrays())
    olds = [weakref.ref(leaf) for leaf in jax.tree.leaves(engine.runner._params)]
    for module in modules:
        engine.update_params(module)
        answer(engine, "b")
    gc.collect()
    assert (engine.stats().compiles, len(jax.live_arrays())) == before
    assert not any(old() for old in olds)


def test_a_trainer_may_donate_what_it_handed_over(engine, decoders):
    module = module_of(1)
    engine.update_params(module)
    for leaf in jax.tree.leaves(nnx.state(module)):
        leaf.delete()
    assert answer(engine, "a")[0] == expect(decoders[1])


@pytest.mark.parametrize("form", ["numpy", "state", "bfloat16"])
def test_weights_come_in_any_form(form, engine, modules, decoders):
    state = nnx.state(modules[1], nnx.Param)
    if form == "state":
        tree = state
    elif form == "numpy":
        tree = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    else:
        tree = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.to_pure_dict(state))
    engine.update_params(tree)
    if form != "bfloat16":
        assert answer(engine, "a")[0] == expect(decoders[1])
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.runner._params)} == {jnp.dtype("float32")}


def begun(engine: Engine) -> Run:
    """A request in the middle of its answer, and one that waits."""
    run = Run(engine)
    for name in ("a", "b", "c"):
        run.add(name, PROMPT, GREEDY)
    while len(run.samples.get(("a", 0), ()) and run.samples["a", 0].token_ids) < 5:
        run.step()
    return run


def test_a10_requests_in_flight_are_ended_by_default(engine, modules, decoders):
    run = begun(engine)
    engine.update_params(modules[1])
    run.drain()
    old = expect(decoders[0])
    assert {sample.finish_reason for sample in run.samples.values()} == {"abort"}
    assert len(run.samples) == 3
    assert 5 <= len(run.tokens("a")) < COUNT and run.tokens("a") == old[: len(run.tokens("a"))]
    assert answer(engine, "d") == (expect(decoders[1]), 0)


def test_a10_requests_in_flight_may_finish_on_the_old_weights(engine, modules, decoders):
    run = begun(engine)
    engine.update_params(modules[1], drain="wait")
    run.drain()
    assert {run.tokens(name) for name in "abc"} == {expect(decoders[0])}
    assert answer(engine, "d") == (expect(decoders[1]), 0)


def test_a10_requests_in_flight_may_go_on_with_a_cache_of_the_new_weights(
    engine, modules, decoders
):
    run = begun(engine)
    engine.update_params(modules[1], drain="keep")
    run.drain()
    old = expect(decoders[0])
    for name in "abc":
        tokens = run.tokens(name)
        same = [ours == theirs for ours, theirs in zip(tokens, old, strict=True)]
        kept = same.index(False)
        assert len(tokens) == COUNT
        new = expect(decoders[1], PROMPT + list(tokens[:kept]), COUNT - kept)
        assert tokens == old[:kept] + new
    assert run.tokens("a")[:5] == old[:5]
    assert run.tokens("c") == expect(decoders[1])


def test_a_step_log_with_updates_replays(engine, modules):
    begun(engine)
    engine.update_params(modules[1], drain="keep")
    run = Run(engine)
    run.drain()
    with open(engine.config.step_log) as lines:
        assert sum(1 for _ in replay(lines)) > 20


def test_what_does_not_fit_is_named_by_path_and_changes_nothing(engine, modules, decoders):
    tree = nnx.to_pure_dict(nnx.state(modules[1], nnx.Param))
    tree["heads"] = tree.pop("head")
    tree["layers"][1]["up"] = tree["layers"][1]["up"].T
    tree["tokens"] = tree["tokens"].astype(jnp.int32)
    run = begun(engine)
    with pytest.raises(ModelLoadError) as refused:
        engine.update_params(tree)
    for part in (
        "missing: head;",
        "unexpected: heads;",
        "layers/1/up is [64, 32], must be [32, 64]",
        "tokens is int32, must be float32",
    ):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match="drain must be one of wait, keep, abort; got 'now'"):
        engine.update_params(modules[1], drain="now")
    run.drain()
    assert run.tokens("a") == expect(decoders[0])


@pytest.mark.parametrize("weights", ["keep", "host", "drop"])
def test_a_sleeping_engine_gives_its_memory_back(weights, engine, modules, decoders):
    def live_bytes() -> int:
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays())

    answer(engine, "a")
    awake = live_bytes()
    pool = sum(x.nbytes for x in jax.tree.leaves(engine.runner._state))
    weight_bytes = engine.runner.num_weight_bytes
    engine.sleep(weights=weights)
    engine.sleep()  # it does already
    assert awake - live_bytes() >= pool + (0 if weights == "keep" else weight_bytes)
    with pytest.raises(RequestError, match="asleep"):
        engine.add_request("b", PROMPT, GREEDY)
    if weights == "drop":
        with pytest.raises(ModelLoadError, match=r"update_params\(\) before wake"):
            engine.wake()
        engine.update_params(modules[1])
    engine.wake()
    engine.wake()
    assert live_bytes() == awake
    assert answer(engine, "c") == (expect(decoders[weights == "drop"]), 0)


async def test_an_update_between_streams(modules, decoders):
    made = Engine.from_nnx(
        modules[0],
        max_model_len=48,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=40,
        warmup="none",
        progress=SilentProgress(),
    )
    engine = AsyncEngine(made)
    await engine.start()
    prompt = {"prompt_token_ids": PROMPT}
    stream = engine.generate(prompt, GREEDY)
    tokens = list((await anext(stream)).outputs[0].token_ids)
    assert await engine.update_params(modules[1], drain="wait") == 1
    async for output in stream:
        tokens += output.outputs[0].token_ids
    assert tuple(tokens) == expect(decoders[0])
    await engine.sleep()
    with pytest.raises(RequestError, match="asleep"):
        await anext(engine.generate(prompt, GREEDY))
    await engine.wake()
    with pytest.raises(ModelLoadError, match="missing"):
        await engine.update_params({})
    outputs = [output async for output in engine.generate(prompt, GREEDY)]
    assert tuple(t for o in outputs for t in o.outputs[0].token_ids) == expect(decoders[1])
    await engine.shutdown()
