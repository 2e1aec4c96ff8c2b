"""The engine against a plain decoder: the same tokens, however they are batched, cut or cached."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ConfigError, Engine, EngineConfig, RequestError, SamplingParams
from paged_jax.attention import dense
from paged_jax.models import ServedModel, from_linen, from_nnx, load_model
from paged_jax.progress import SilentProgress
from scheduler import Status, derive_seed
from tests import linen_models, nnx_models
from tests.dense_decoding import DenseDecoder
from tests.engine_runs import Job, Run, Sample, assert_idle, run_all, spoil_unused_slots
from tests.tiny_models import write_tiny_llama

BLOCK = 8
COUNT = 12  # tokens a job generates
LENGTH = 64  # of the longest sequence
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.5}
SMALL_POOL = {"num_blocks": 11}  # 80 tokens, for four sequences of up to 52
EngineOf = Callable[..., Engine]


def scanned_linen() -> ServedModel:
    module = linen_models.Decoder()
    ids = jnp.arange(4)
    params = module.init(jax.random.key(0), ids, ids, dense(jnp.zeros_like(ids)))["params"]
    return from_linen(module, params, num_layers=module.num_layers, max_position=64)


def windowed_nnx() -> ServedModel:
    """Full and sliding layers, these with fewer KV heads."""
    return from_nnx(nnx_models.Decoder([(6, 1), (None, 2), (6, 1)]), max_position=64)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, ServedModel]:
    directory = tmp_path_factory.mktemp("llama")
    write_tiny_llama(directory)
    llama = load_model(directory, dtype="float32")
    return {"llama": llama, "windowed": windowed_nnx(), "scanned": scanned_linen()}


@pytest.fixture(scope="module")
def decoders(models) -> dict[str, DenseDecoder]:
    return {name: DenseDecoder(model, LENGTH) for name, model in models.items()}


@pytest.fixture(scope="module")
def engine_of(models) -> Iterator[EngineOf]:
    """Engines by model and configuration; each is made once, and must be idle between tests."""
    made: dict[tuple, Engine] = {}
    programs: dict[tuple, dict] = {}

    def get(model: str = "llama", *, eos: tuple[int, ...] = (), **config) -> Engine:
        key = (model, eos, *sorted(config.items()))
        if key not in made:
            made[key] = make_engine(models[model], eos_token_ids=eos, **config)
            # Compiling takes most of the time: engines of one size share what they compile.
            runner = made[key].runner
            sizes = (runner.specs, runner._table_width, runner._max_num_seqs)
            runner._compiled = programs.setdefault((model, runner.backend, *sizes), {})
        assert_idle(made[key])
        return made[key]

    yield get
    for engine in made.values():
        assert_idle(engine)
        engine.close()


def make_engine(model: ServedModel, eos_token_ids: tuple[int, ...] = (), **config) -> Engine:
    defaults = {
        "max_model_len": LENGTH,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": BLOCK,
        "num_blocks": 65,
    }
    return Engine(
        model,
        EngineConfig(model="test", **{**defaults, **config}),
        eos_token_ids=eos_token_ids,
        progress=SilentProgress(),
    )


# The same tokens as the oracle


def tokens_of(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 50, count).tolist()


STEM = tokens_of(99, 2 * BLOCK + 1)
PROMPTS = [
    *(tokens_of(i, n) for i, n in enumerate((1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2, 40))),
    [*STEM],
    [*STEM, *tokens_of(6, 1)],
    [*STEM, *tokens_of(7, 20)],
    [*STEM[: 2 * BLOCK]],
]


def greedy(max_tokens: int | None = COUNT, **fields) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    )


def seeded(seed: int, max_tokens: int = COUNT, **fields) -> SamplingParams:
    return greedy(max_tokens, temperature=1.0, seed=seed, **fields)


def equivalence_jobs() -> dict[str, Job]:
    """Greedy and seeded ones in turn, so that they share steps; some with several samples."""
    jobs: dict[str, Job] = {}
    for i, prompt in enumerate(PROMPTS):
        jobs[f"greedy-{i}"] = (prompt, greedy())
        jobs[f"seeded-{i}"] = (prompt, seeded(2**63 + i))
    jobs["samples-of-a-full-block"] = (PROMPTS[2], seeded(5, n=3))
    jobs["samples-that-copy"] = (PROMPTS[4], seeded(6, n=3))
    jobs["penalized"] = (PROMPTS[3], greedy(**PENALTIES))
    jobs["penalized-samples"] = (PROMPTS[5], seeded(7, n=2, **PENALTIES))
    return jobs


JOBS = equivalence_jobs()
Tokens = dict[tuple[str, int], tuple[int, ...]]


@pytest.fixture(scope="module")
def wanted(decoders) -> Callable[[str], Tokens]:
    """The oracle's tokens of JOBS by model; only those that rounding cannot change."""
    memo: dict[str, Tokens] = {}

    def get(model: str) -> Tokens:
        if model not in memo:
            memo[model] = expected(decoders[model], JOBS)
            assert len(memo[model]) > 22  # of 29 samples
        return memo[model]

    return get


def expected(decoder: DenseDecoder, jobs: dict[str, Job]) -> Tokens:
    """What each sample must be: that of a request of its own with the derived seed."""
    found = {}
    for request_id, (prompt, params) in jobs.items():
        for index in range(params.n):
            seed = 0 if params.seed is None else derive_seed(params.seed, index)
            decoded = decoder.decode(prompt, params, seed)
            if decoded.is_clear:
                found[request_id, index] = decoded.token_ids
    return found


def check(samples, want: Tokens) -> None:
    for key, token_ids in want.items():
        assert tuple(samples[key].token_ids) == token_ids, key
    assert all(sample.finish_reason == "length" for sample in samples.values())


TO_HOST = {"preemption_mode": "swap", "swap_space": 1e-3}
SWAP = {**SMALL_POOL, **TO_HOST}
WINDOWED = {"block_size": 4}
FEW = {"block_size": 4, "num_blocks": 21}
CASES = {
    "plain": ("llama", {}),
    "no-overlap": ("llama", {"overlap": False}),
    "one-token-a-step": ("llama", {"max_num_seqs": 1, "max_num_batched_tokens": 1}),
    "steps-of-less-than-a-block": ("llama", {"max_num_batched_tokens": BLOCK - 1}),
    "steps-of-a-block": ("llama", {"max_num_batched_tokens": BLOCK}),
    "steps-of-more-than-a-block": ("llama", {"max_num_batched_tokens": BLOCK + 1}),
    "whole-prompts": ("llama", {"max_num_batched_tokens": 64}),
    "blocks-of-one-token": ("llama", {"block_size": 1, "num_blocks": 257}),
    "no-prefix-cache": ("llama", {"enable_prefix_caching": False}),
    "small-pool": ("llama", SMALL_POOL),
    "small-pool-no-overlap": ("llama", {**SMALL_POOL, "overlap": False}),
    "small-pool-no-prefix-cache": ("llama", {**SMALL_POOL, "enable_prefix_caching": False}),
    "small-pool-swap": ("llama", SWAP),
    "reference": ("llama", {"attention_backend": "reference"}),
    "reference-small-pool": ("llama", {"attention_backend": "reference", **SMALL_POOL}),
    "windowed": ("windowed", WINDOWED),
    "windowed-no-overlap": ("windowed", {**WINDOWED, "overlap": False}),
    "windowed-reference": ("windowed", {**WINDOWED, "attention_backend": "reference"}),
    "windowed-small-pool": ("windowed", FEW),
    "windowed-small-pool-swap": ("windowed", {**FEW, **TO_HOST}),
    "scanned": ("scanned", WINDOWED),
    "scanned-reference": ("scanned", {**WINDOWED, "attention_backend": "reference"}),
    "scanned-small-pool": ("scanned", {"block_size": 4, "num_blocks": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_plain_model(case, engine_of, wanted):
    model, config = CASES[case]
    engine, want = engine_of(model, **config), wanted(model)
    before = engine.stats()
    check(run_all(engine, JOBS), want)  # cold, all at once
    check(run_all(engine, JOBS), want)  # warm
    for request_id, job in reversed(JOBS.items()):
        alone = {key: tokens for key, tokens in want.items() if key[0] == request_id}
        check(run_all(engine, {request_id: job}), alone)
    after = engine.stats()
    hits = after.prefix_hit_tokens - before.prefix_hit_tokens
    assert (hits == 0) == (config.get("enable_prefix_caching") is False)
    assert (after.preemptions > before.preemptions) == ("small-pool" in case)
    assert (engine.scheduler.num_swaps > 0) == ("swap" in case)


@pytest.mark.parametrize("model", ["llama", "windowed"])
def test_logprobs_are_those_of_the_plain_model(model, engine_of, decoders):
    """Raw ones, whatever the penalties and however the sequence was computed."""
    pool = SMALL_POOL if model == "llama" else FEW
    engine, decoder = engine_of(model, **pool), decoders[model]
    jobs = {f"r{i}": (tokens_of(i, 20), seeded(i, 20, logprobs=3)) for i in range(4)}
    jobs["penalized"] = (STEM, greedy(30, logprobs=0, **PENALTIES))
    jobs["two"] = (STEM, seeded(9, 10, n=2, logprobs=20))
    jobs["none"] = (STEM, greedy(30))
    before = engine.stats().preemptions
    samples = run_all(engine, jobs)
    assert engine.stats().preemptions > before
    assert samples.pop(("none", 0)).logprobs == []
    for (request_id, _), sample in samples.items():
        prompt, params = jobs[request_id]
        assert len(sample.logprobs) == len(sample.token_ids)
        for i, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
            want = decoder.logprobs([*prompt, *sample.token_ids[:i]])
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(want[token], abs=1e-3)
            assert len(entry.top) == params.logprobs
            best = np.sort(want)[::-1][: params.logprobs]
            np.testing.assert_allclose(list(entry.top.values()), best, atol=1e-3)
            for other, logprob in entry.top.items():
                assert logprob == pytest.approx(want[other], abs=1e-3)


def test_prefix_hits_are_told_and_leave_a_token_to_compute(engine_of):
    """A06, too: a prompt whose blocks are all cached."""
    engine = engine_of()
    for length in (BLOCK, 2 * BLOCK, 2 * BLOCK + 3):
        prompt = tokens_of(1000 + length, length)
        runs = []
        for want in (0, (length - 1) // BLOCK * BLOCK):
            run = Run(engine)
            request = run.add("a", prompt, greedy(4))
            run.drain()
            assert request.num_cached_tokens == want
            runs.append(run.tokens("a"))
        assert runs[0] == runs[1]


FEW_ON_HOST = {**TO_HOST, "swap_space": 3e-5, "kv_offload": True}  # as many as on the device


@pytest.mark.parametrize("config", [{"overlap": False}, {}, FEW_ON_HOST])
@pytest.mark.parametrize(("model", "num_blocks"), [("llama", 15), ("windowed", 15), ("scanned", 8)])
def test_a_random_life(model, num_blocks, config, engine_of, decoders):
    """Requests come and go at any time through a pool that is too small for them."""
    engine = engine_of(model, block_size=4, num_blocks=num_blocks, **config)
    decoder = decoders[model]
    before = engine.stats()
    rng = np.random.default_rng(0)
    stems = [[], tokens_of(1, 8), tokens_of(2, 13)]
    run, jobs, left = Run(engine), {}, set()
    num_jobs = 150 if config == FEW_ON_HOST else 40  # what goes wrong on the host is rare
    while len(jobs) < num_jobs or engine.has_unfinished:
        if len(jobs) < num_jobs and rng.random() < 0.4:
            prompt = [*stems[rng.integers(3)], *tokens_of(len(jobs), rng.integers(1, 15))]
            n, count = int(rng.choice([1, 1, 1, 2, 4])), int(rng.integers(0, 24))
            fields = {"n": n} | (PENALTIES if rng.random() < 0.3 else {})
            params = seeded(len(jobs), count, **fields)
            if rng.random() < 0.4:
                params = greedy(count, **fields)
            jobs[f"r{len(jobs)}"] = (prompt, params)
            run.add(f"r{len(jobs) - 1}", prompt, params)
        if jobs and rng.random() < 0.04:
            request_id = str(rng.choice(list(jobs)))
            index = None if rng.random() < 0.5 else int(rng.integers(jobs[request_id][1].n))
            engine.abort(request_id, index)
            left |= {(request_id, i) for i in range(4) if index in (None, i)}
        run.step()
        engine.scheduler.check_invariants()
        assert run.num_steps < 10_000, "no progress"
    assert_idle(engine)
    assert engine.stats().preemptions > before.preemptions
    want = expected(decoder, {name: job for name, job in jobs.items() if job[1].max_tokens})
    assert len(want) > num_jobs
    for (name, index), token_ids in want.items():
        sample = run.samples.get((name, index), Sample())
        if (name, index) in left and sample.finish_reason is None:
            assert tuple(sample.token_ids) == token_ids[: len(sample.token_ids)]
        else:
            assert (tuple(sample.token_ids), sample.finish_reason) == (token_ids, "length")


# Blocks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a02_a_short_request_frees_its_blocks_once(block_size, overlap, engine_of):
    num_blocks = 257 // block_size
    engine = engine_of(block_size=block_size, num_blocks=num_blocks, overlap=overlap)
    prompt = tokens_of(0, 5)
    run = Run(engine)
    run.add("probe", prompt, greedy(7))
    run.drain()
    stops = run.tokens("probe")
    for repeat in range(100):
        max_tokens = (1, 2, 7)[repeat % 3]
        ended = greedy(max_tokens, stop_token_ids=(stops[max_tokens - 1],))
        run_all(
            engine,
            {"by-stop": (prompt, ended)}
            if repeat % 2
            else {"by-length": (prompt, greedy(max_tokens))},
        )
    pool = engine.scheduler.pools[0]
    blocks = [pool.allocate() for _ in range(pool.num_available)]
    assert sorted(blocks) == list(range(1, num_blocks))
    pool.release(blocks)


def test_requests_that_bring_the_same_block_back_at_once_all_get_it(engine_of, decoders):
    engine = engine_of(**{**SMALL_POOL, **TO_HOST}, kv_offload=True)
    stem = tokens_of(20, 2 * BLOCK)
    jobs = {f"tail-{i}": ([*stem, 5 + i], greedy(8)) for i in range(3)}
    run_all(engine, {"first": jobs["tail-0"]})
    run_all(engine, {f"push-out-{i}": (tokens_of(30 + i, 50), greedy(8)) for i in range(4)})
    swapped_in = sum(record.num_swap_ins for record in engine.records)
    want = expected(decoders["llama"], jobs)
    assert len(want) == 3
    check(run_all(engine, jobs), want)
    assert sum(record.num_swap_ins for record in engine.records) - swapped_in == 6


def test_a14_a_prompt_larger_than_the_pool_is_refused_at_once(engine_of):
    engine = engine_of(num_blocks=5)
    run = Run(engine)
    with pytest.raises(
        RequestError, match=r"33 tokens, .* only 32 \(8 in each of 4 blocks\)"
    ) as caught:
        run.add("too long", tokens_of(0, 33), greedy(1))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(RequestError, match="33 tokens"):
        engine.check_request(tokens_of(0, 33), greedy(1))
    run.add("short", tokens_of(1, 5), greedy(3))
    run.drain()
    assert len(run.tokens("short")) == 3
    assert_idle(engine)


def test_a14_an_answer_larger_than_the_pool_ends_with_length(engine_of, decoders):
    engine = engine_of(num_blocks=5)
    prompt = tokens_of(2, 30)
    run = Run(engine)
    run.add("a", prompt, greedy(30))
    run.drain()
    # 32 tokens fit, and the last one is never stored.
    assert run.samples["a", 0].finish_reason == "length"
    assert run.tokens("a") == decoders["llama"].greedy(prompt, 3).token_ids
    assert_idle(engine)


WINDOW_POOLS = (
    # (model, num_blocks, max_num_seqs): each once hung, or is as small as can be
    ("scanned", 2, 1),
    ("scanned", 7, 2),
    ("windowed", 4, 2),
    ("windowed", 21, 1),
)


@pytest.mark.parametrize(("model", "num_blocks", "max_num_seqs"), WINDOW_POOLS)
def test_sliding_layers_get_by_with_the_blocks_they_have(
    model, num_blocks, max_num_seqs, engine_of, decoders
):
    engine = engine_of(model, block_size=4, num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    fits = min(LENGTH - COUNT, engine.scheduler.config.capacity_tokens - COUNT)
    jobs = {f"r{i}": (tokens_of(i, max(1, fits - 3 * i)), greedy()) for i in range(3)}
    if fits < 1:
        jobs = {"r0": (tokens_of(0, 1), greedy(3))}
    check(run_all(engine, jobs), expected(decoders[model], jobs))


def test_a_preempted_sequence_longer_than_its_windows_blocks_comes_back(engine_of, decoders):
    engine = engine_of("windowed", block_size=4, num_blocks=17, max_num_seqs=2)
    assert min(engine.scheduler.config.num_blocks) == 13  # 12 blocks of 4 tokens, and block 0
    jobs = {"a": (tokens_of(0, 4), greedy(40)), "b": (tokens_of(1, 52), greedy(10))}
    before = engine.stats().preemptions
    check(run_all(engine, jobs), expected(decoders["windowed"], jobs))
    assert engine.stats().preemptions > before


def test_a_preempted_sequence_of_sliding_layers_only_comes_back(engine_of, decoders):
    engine = engine_of("scanned", block_size=4, num_blocks=8, seed=1)
    jobs = {
        "a": (tokens_of(0, 3), greedy()),
        "b": (tokens_of(1, 3), greedy(8)),
        "c": (tokens_of(2, 35), greedy()),
    }
    run = Run(engine)
    for request_id, (prompt, params) in jobs.items():
        run.add(request_id, prompt, params)
    try:
        run.drain(max_steps=200)
        check(run.samples, expected(decoders["scanned"], jobs))
    finally:
        for request_id in jobs:
            engine.abort(request_id)
        engine.step()


def test_a81_every_buffer_of_the_pools_is_its_own(engine_of):
    engine = engine_of("windowed", block_size=4)
    for _ in range(2):
        state = engine.runner._state
        arrays = [state.last_tokens, *(a for pool in state.pools for a in pool.arrays)]
        assert len(arrays) == 5
        pointers = [array.unsafe_buffer_pointer() for array in arrays]
        assert len(set(pointers)) == len(pointers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # JAX warns of donated buffers that it could not use
            run_all(engine, {"a": (tokens_of(0, 20), greedy())})


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a82_the_scheduler_and_every_array_agree_on_the_blocks(backend, engine_of):
    engine = engine_of("windowed", block_size=4, attention_backend=backend)
    counts = engine.scheduler.config.num_blocks
    assert counts == tuple(pool.num_blocks for pool in engine.scheduler.pools)
    assert len(set(counts)) > 1  # a window's group is smaller
    for count, pool in zip(counts, engine.runner._state.pools, strict=True):
        assert pool.spec.num_blocks == count
        assert all(a.shape[0] == pool.spec.num_layers * count for a in pool.arrays)
    assert engine.stats().num_blocks == max(counts) == 65  # of full attention


@pytest.mark.parametrize(
    ("model", "backend"), [("llama", "xla"), ("llama", "reference"), ("windowed", "xla")]
)
def test_a86_what_unused_slots_hold_never_matters(model, backend, engine_of, wanted):
    config = {**SMALL_POOL} if model == "llama" else {"block_size": 4, "num_blocks": 21}
    engine = engine_of(model, attention_backend=backend, overlap=False, **config)
    for value in (np.nan, np.inf, 0.0):
        run = Run(engine)
        for request_id, (prompt, params) in JOBS.items():
            run.add(request_id, prompt, params)
        num_spoiled = 0
        while engine.has_unfinished:
            num_spoiled += spoil_unused_slots(engine, value)
            run.step()
        assert num_spoiled > 1000
        check(run.samples, wanted(model))
        assert_idle(engine)
        spoil_unused_slots(engine, value)


def test_logits_that_are_not_finite_end_their_own_request_only(models, wanted):
    want = wanted("llama")
    used = {token for token_ids in want.values() for token in token_ids}
    bad = max(set(range(50, 160)) - used)  # no prompt and no answer holds it
    table = models["llama"].params["embed_tokens"]["weight"]
    params = {**models["llama"].params, "embed_tokens": {"weight": table.at[bad].set(jnp.nan)}}
    engine = make_engine(models["llama"]._replace(params=params), **SMALL_POOL)
    for _ in range(2):
        samples = run_all(engine, {"bad": ([*STEM, bad, 5, 6], greedy()), **JOBS})
        assert samples.pop(("bad", 0)) == Sample([], "error")
        check(samples, want)
        assert_idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefix_that_was_computed_wrong_is_not_found_again(
    overlap, engine_of, decoders, monkeypatch, caplog
):
    """One step in the middle of a long prompt goes wrong, as a faulty device would have it."""
    engine = engine_of(overlap=overlap, **TO_HOST, kv_offload=True)
    prompt = tokens_of(66, 45)
    good = engine.runner._params
    run = Run(engine)
    run.add("a", prompt, greedy())
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "_params", jax.tree.map(lambda x: x * jnp.nan, good))
        run.step()
    run.drain()
    assert run.samples["a", 0] == Sample([], "error")
    assert "request a ended: its logits are not finite" in caplog.text
    assert engine.stats().blocks_cached == 0
    want = decoders["llama"].greedy(prompt, COUNT)
    assert want.is_clear
    assert tuple(finish(engine, prompt, greedy()).token_ids) == want.token_ids


# Limits


@pytest.fixture
def engine(engine_of) -> Engine:
    return engine_of()


def finish(engine: Engine, prompt: list[int], params: SamplingParams) -> Sample:
    return run_all(engine, {"a": (prompt, params)})["a", 0]


def test_a15_a_prompt_about_as_long_as_the_context(engine):
    assert len(finish(engine, tokens_of(0, LENGTH - 1), greedy(1)).token_ids) == 1
    assert finish(engine, tokens_of(0, LENGTH), greedy(0)) == Sample([], "length")
    for length, max_tokens, param in (
        (LENGTH, 1, "prompt"),
        (LENGTH, None, "prompt"),
        (LENGTH + 1, 1, "prompt"),
        (LENGTH + 1, 0, "prompt"),
        (LENGTH - 1, 2, "max_tokens"),
    ):
        with pytest.raises(RequestError, match=f"maximum context length is {LENGTH}") as caught:
            engine.add_request("a", tokens_of(0, length), greedy(max_tokens))
        assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
    assert_idle(engine)


def test_a16_the_pools_size_limits_the_context_that_is_promised(models):
    short = models["llama"]._replace(max_position=64)
    engine = make_engine(short, max_model_len=None, num_blocks=5)
    assert engine.max_model_len == 32
    with pytest.raises(RequestError, match="maximum context length is 32"):
        engine.add_request("a", tokens_of(0, 33), greedy(1))
    # One that runs to the end of the context, and fits.
    assert len(finish(engine, tokens_of(0, 3), greedy(None)).token_ids) == 29
    assert make_engine(short, max_model_len=None, num_blocks=65).max_model_len == 64


def test_a17_the_message_says_the_numbers(engine):
    with pytest.raises(RequestError) as caught:
        engine.add_request("a", tokens_of(0, 8), greedy(61))
    assert caught.value.code == "context_length_exceeded"
    for number in (LENGTH, 8, 61):
        assert f" {number} " in str(caught.value)


def test_a21_max_tokens_of_zero_one_and_none(engine, decoders):
    assert finish(engine, STEM, greedy(0)) == Sample([], "length")
    samples = run_all(engine, {"a": (STEM, seeded(1, 0, n=3))})
    assert list(samples.values()) == [Sample([], "length")] * 3
    (token,) = finish(engine, STEM, greedy(1)).token_ids
    assert finish(engine, STEM, greedy(None)).token_ids[0] == token
    assert len(finish(engine, STEM, greedy(None)).token_ids) == LENGTH - len(STEM)


def test_a21_nothing_is_computed_for_nothing(engine):
    before = engine.stats()
    finish(engine, tokens_of(1, 30), greedy(0))
    after = engine.stats()
    assert after.num_steps == before.num_steps
    assert after.prompt_tokens == before.prompt_tokens + 30


@pytest.mark.parametrize("overlap", [False, True])
def test_a55_each_end_has_its_reason(overlap, engine_of, decoders):
    prompt = tokens_of(3, 10)
    told = decoders["llama"].greedy(prompt, LENGTH - 10).token_ids
    at = next(i for i in range(2, 20) if told[i] not in told[:i])
    token = told[at]
    engine = engine_of(eos=(token,), overlap=overlap)
    by_eos = list(told[: at + 1])
    assert finish(engine, prompt, greedy(40, ignore_eos=False)) == Sample(by_eos, "stop")
    # The token that ends it may be the last that it may have.
    assert finish(engine, prompt, greedy(at + 1, ignore_eos=False)) == Sample(by_eos, "stop")
    assert finish(engine, prompt, greedy(at, ignore_eos=False)) == Sample(by_eos[:-1], "length")
    own = greedy(40, ignore_eos=True, stop_token_ids=[told[1], told[30]])
    assert finish(engine, prompt, own) == Sample(list(told[:2]), "stop", told[1])
    both = greedy(40, ignore_eos=False, stop_token_ids=[token])
    assert finish(engine, prompt, both) == Sample(by_eos, "stop", token)
    assert finish(engine, prompt, greedy(40)) == Sample(list(told[:40]), "length")
    assert finish(engine, prompt, greedy(None)) == Sample(list(told), "length")


def test_a26_two_live_requests_cannot_share_an_id(engine, decoders):
    run = Run(engine)
    first = decoders["llama"].greedy(PROMPTS[4], COUNT).token_ids
    run.add("same", PROMPTS[4], greedy())
    run.step()
    counted = engine.stats().num_requests
    for params in (greedy(), greedy(0)):
        with pytest.raises(RequestError, match="'same' is in use") as caught:
            run.add("same", PROMPTS[1], params)
        assert caught.value.param == "request_id"
    run.drain()
    assert run.tokens("same") == first
    assert engine.stats().num_requests == counted
    assert_idle(engine)
    assert finish(engine, PROMPTS[1], greedy(3)).finish_reason == "length"  # free again


def test_requests_that_want_nothing_have_ids_and_ends_too(engine):
    run = Run(engine)
    for request_id in ("a", "b", "c"):
        run.add(request_id, STEM, greedy(0, n=2))
    with pytest.raises(RequestError, match="'a' is in use"):
        run.add("a", STEM, greedy())
    engine.abort("b")
    engine.abort("c", 1)
    run.drain()
    assert sorted(run.samples) == [("a", 0), ("a", 1), ("c", 0)]
    assert_idle(engine)


@pytest.mark.parametrize("bad", [160, -1, 2**40, 1.5, True, "7", None])
def test_a61_ids_outside_the_vocabulary_are_refused(bad, engine):
    with pytest.raises(RequestError, match=f"prompt holds {bad!r}.* from 0 to 159") as caught:
        engine.add_request("a", [5, bad, 6], greedy(1))
    assert caught.value.param == "prompt"
    assert_idle(engine)


def test_a61_the_first_and_last_id_are_taken(engine):
    assert len(finish(engine, [0, 159], greedy(2)).token_ids) == 2
    with pytest.raises(RequestError, match="empty"):
        engine.add_request("a", [], greedy(1))
    with pytest.raises(RequestError, match="stop_token_ids holds 160"):
        engine.add_request("a", [1], greedy(1, stop_token_ids=(160,)))
    assert_idle(engine)


def test_a_configuration_that_does_not_fit_the_model_is_refused(models):
    with pytest.raises(ConfigError, match=r"max_model_len=513 .* 512 tokens"):
        make_engine(models["llama"], max_model_len=513)
    with pytest.raises(ConfigError, match=r"no room for a KV cache.*kv_cache_memory"):
        make_engine(models["llama"], num_blocks=None, kv_cache_memory=1e-6)


# Sampling


SEEDED = seeded(42, 16, stop_token_ids=())


@pytest.fixture(scope="module")
def uniform() -> Iterator[Engine]:
    engine = make_engine(from_nnx(nnx_models.Uniform(1000), max_position=64))
    yield engine
    engine.close()


def draw(engine: Engine, before: dict[str, Job], wait: int = 0, row: int | None = None):
    """The seeded request's tokens, beside others that came before it."""
    run = Run(engine)
    for request_id, (prompt, params) in before.items():
        run.add(request_id, prompt, params)
    for _ in range(wait):
        run.step()
    request = run.add("seeded", [1, 2, 3], SEEDED)
    run.step()
    if row is not None:
        assert request.sequences[0].row == row
    run.drain()
    assert_idle(engine)
    return run.tokens("seeded")


def test_a30_a_seed_is_not_disturbed_by_neighbours(uniform):
    alone = draw(uniform, {}, row=0)
    unseeded = ([4, 5], SamplingParams(max_tokens=40))
    other = ([4, 5], seeded(43, 40))
    cold = ([4, 5], greedy(40))
    assert draw(uniform, {"a": unseeded}, row=1) == alone
    assert draw(uniform, {"a": other}) == alone
    assert draw(uniform, {"a": cold}) == alone
    assert draw(uniform, {"a": unseeded, "b": other, "c": cold}, row=3) == alone
    assert draw(uniform, {"a": unseeded, "b": cold}, wait=7) == alone
    filtered = ([4, 5], seeded(1, 40, top_k=3, top_p=0.5, min_p=0.1))
    assert draw(uniform, {"a": filtered}, wait=2) == alone


def test_a31_every_position_has_its_own_number(uniform):
    first, second = draw(uniform, {}), draw(uniform, {})
    assert first == second
    assert len(set(first)) >= 12


def test_requests_without_a_seed_differ(uniform):
    params = SamplingParams(max_tokens=8)
    told = run_all(uniform, {f"r{i}": ([1, 2, 3], params) for i in range(4)})
    told |= run_all(uniform, {"n": ([1, 2, 3], SamplingParams(max_tokens=8, n=4))})
    assert len({tuple(sample.token_ids) for sample in told.values()}) == 8


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_every_seed_is_its_own(seed, uniform):
    told = finish(uniform, [1, 2, 3], seeded(seed, 8)).token_ids
    assert finish(uniform, [1, 2, 3], seeded(seed, 8)).token_ids == told
    assert finish(uniform, [1, 2, 3], seeded(seed ^ 2**32, 8)).token_ids != told
    assert finish(uniform, [1, 2, 3], seeded(seed ^ 1, 8)).token_ids != told


# Ending early


LONG = tokens_of(8, 40)  # three steps of 16 tokens


def in_state(engine: Engine, run: Run, state: str) -> None:
    """Bring request "victim", of two samples, into a state, beside "bystander"."""
    engine.scheduler.forget_prefixes()
    run.add("bystander", STEM, greedy(40))
    run.step()
    if state == "unknown":
        return
    first, second = run.add("victim", LONG, seeded(3, 20, n=2)).sequences
    if state in ("preempted", "swapped"):
        run.add("rival", tokens_of(9, 8), greedy(50))
    reached = {
        "queued": lambda: True,
        "mid-prefill": lambda: 0 < first.num_computed_tokens < 40,
        "decoding": lambda: first.num_computed_tokens > 42 and second.status is Status.RUNNING,
        "preempted": lambda: any(s.num_preemptions and s.row < 0 for s in (first, second)),
        "swapped": lambda: first.host_blocks or second.host_blocks,
        "finished": lambda: first.status is second.status is Status.FINISHED,
    }[state]
    for _ in range(200):
        if reached():
            return
        run.step()
    raise AssertionError(f"never {state}")


STATES = ("queued", "mid-prefill", "decoding", "preempted", "swapped", "finished", "unknown")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a04_abort_in_every_state(state, overlap, engine_of, decoders):
    pools = {"preempted": SMALL_POOL, "swapped": SWAP}
    engine = engine_of(overlap=overlap, **pools.get(state, {}))
    run = Run(engine)
    in_state(engine, run, state)
    engine.abort("victim")
    engine.abort("victim")
    told = {key: len(sample.token_ids) for key, sample in run.samples.items()}
    run.drain()
    engine.abort("victim")
    assert_idle(engine)
    for index in range(2):
        sample = run.samples.get(("victim", index), Sample())
        assert (sample.finish_reason == "length") == (state == "finished")
        assert len(sample.token_ids) == told.get(("victim", index), 0)
    want = decoders["llama"].greedy(STEM, 40)
    assert want.is_clear
    assert run.tokens("bystander") == want.token_ids


@pytest.mark.parametrize("state", ["queued", "mid-prefill", "decoding", "preempted", "swapped"])
@pytest.mark.parametrize("index", [0, 1])
def test_ending_one_sample_leaves_the_other(state, index, engine_of, decoders):
    pools = {"preempted": SMALL_POOL, "swapped": SWAP}
    engine = engine_of(**pools.get(state, {}))
    run = Run(engine)
    in_state(engine, run, state)
    engine.abort("victim", index)
    run.drain()
    assert_idle(engine)
    want = decoders["llama"].sampled(LONG, 20, derive_seed(3, 1 - index))
    assert want.is_clear
    assert run.tokens("victim", 1 - index) == want.token_ids
    assert len(run.samples.get(("victim", index), Sample()).token_ids) < 20


def test_a24_abort_during_a_long_prefill_ends_it_within_two_steps(engine_of):
    engine = engine_of(max_num_batched_tokens=BLOCK - 1)
    run = Run(engine)
    run.add("long", tokens_of(77, 60), greedy(4))
    for _ in range(3):
        run.step()
    before = engine.stats().num_steps
    engine.abort("long")
    run.step()
    run.step()
    assert_idle(engine)
    assert engine.stats().num_steps <= before + 1
    assert ("long", 0) not in run.samples


# Figures


def test_the_model_computes_what_the_records_say_and_never_more_than_the_limit(models):
    """Rows that do not decode take no room beside a chunk."""
    plain, computed = models["llama"], set()

    def apply(params, token_ids, positions, attend):
        computed.add(token_ids.shape[0])
        return plain.apply(params, token_ids, positions, attend)

    model = plain._replace(apply=apply)
    engine = make_engine(model, max_num_batched_tokens=20, warmup="none")
    run_all(engine, JOBS)
    computed.discard(8)  # that many are traced to know the model
    with_prefill = {r.num_tokens + r.num_padded_tokens for r in engine.records if r.num_chunks}
    without = {r.num_tokens + r.num_padded_tokens for r in engine.records if not r.num_chunks}
    assert (with_prefill, without) == ({16, 20}, {1, 4})
    assert computed == with_prefill | without


def test_the_figures_add_up(engine):
    before, num_records = engine.stats(), len(engine.records)
    samples = run_all(engine, JOBS)
    after, records = engine.stats(), list(engine.records)[num_records:]
    new = {
        field.name: getattr(after, field.name) - getattr(before, field.name)
        for field in dataclasses.fields(after)
        if not field.name.startswith("steps_by")
    }
    assert new["num_requests"] == len(JOBS)
    assert new["prompt_tokens"] == sum(len(prompt) for prompt, _ in JOBS.values())
    assert new["generation_tokens"] == sum(len(sample.token_ids) for sample in samples.values())
    assert new["num_steps"] == len(records)
    kinds = {kind: n - before.steps_by_kind[kind] for kind, n in after.steps_by_kind.items()}
    assert sum(kinds.values()) == len(records)
    assert new["scheduled_tokens"] == sum(record.num_tokens for record in records)
    assert new["padded_tokens"] == sum(record.num_padded_tokens for record in records) > 0
    assert new["preemptions"] == new["late_compiles"] == 0
    assert new["prefix_lookup_tokens"] >= new["prompt_tokens"]
    assert new["host_s"] > 0 and new["device_s"] > 0
    assert after.blocks_cached > 0
    assert 0 < after.mean_occupancy <= 1
    assert 0 < after.mean_block_utilization <= 1
