"""Failures that other engines had in public, held against the scheduler under the fake model.

Each test first makes sure that the situation it is about has come about.
"""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scheduler import (
    Buckets,
    FinishReason,
    RequestError,
    SamplingParams,
    Status,
)
from tests.fakes import FakeEngine
from tests.scheduling import (
    assert_idle_books,
    assert_right,
    checked_step,
    copies_of,
    finish_all,
    first_step_of,
    greedy,
    host_pool_of,
    make_config,
    make_engine,
    members_of,
    num_computed_for,
    pool_of,
    prompt,
    prompt_ending_by_eos,
    step_until,
)

ROOT = Path(__file__).resolve().parent.parent
both_lags = pytest.mark.parametrize("lag", [0, 1])


def fill_cache(engine: FakeEngine, request_id: str, token_ids: list[int]) -> list[bytes]:
    """Run a request that leaves the full blocks of its prompt in the cache; their digests."""
    request = engine.add(request_id, token_ids, greedy(1))
    finish_all(engine)
    num_full = len(token_ids) // engine.config.block_size
    digests = request.sequences[0].digests[:num_full]
    assert all(pool_of(engine).lookup(digest) is not None for digest in digests)
    return digests


# -- block accounting ---------------------------------------------------------------------------


@both_lags
def test_a01_hits_are_not_pinned_while_the_rest_does_not_fit(lag):
    engine = make_engine(
        make_config(num_usable=6, block_size=16, max_num_batched_tokens=128), lag=lag
    )
    pool = pool_of(engine)
    stem = prompt(32)
    digests = fill_cache(engine, "r1", stem)
    assert pool.num_cached == 2
    r2 = engine.add("r2", prompt(33, first=2), greedy(14))
    checked_step(engine)
    assert pool.num_referenced == 3
    r3 = engine.add("r3", [*stem, *range(500, 548)], greedy(1))
    for _ in range(10):
        checked_step(engine)
        assert r2.sequences[0].status is Status.RUNNING
        assert r3.sequences[0].status is Status.WAITING
        assert [pool.ref_counts[pool.lookup(digest)] for digest in digests] == [0, 0]
    finish_all(engine)
    assert r3.num_cached_tokens == 32
    assert_right(engine, r2, r3)


@pytest.mark.parametrize("by_eos", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
@pytest.mark.parametrize("block_size", [1, 4])
@both_lags
def test_a02_blocks_are_freed_once_whichever_way_a_request_ends(
    lag, block_size, max_tokens, by_eos
):
    num_usable = -(-11 // block_size)
    engine = make_engine(make_config(num_usable=num_usable, block_size=block_size), lag=lag)
    token_ids = prompt_ending_by_eos(5, max_tokens) if by_eos else prompt(5)
    params = greedy(7 if by_eos else max_tokens, ignore_eos=not by_eos)
    for i in range(100):
        request = engine.add(f"r{i}", token_ids, params)
        finish_all(engine)
        assert len(engine.tokens[f"r{i}", 0]) == max_tokens
        reason = FinishReason.STOP if by_eos else FinishReason.LENGTH
        assert engine.finished[f"r{i}", 0] is reason
        assert_right(engine, request)
    everything = [pool_of(engine).allocate() for _ in range(num_usable)]
    assert sorted(everything) == list(range(1, num_usable + 1))


@both_lags
@pytest.mark.parametrize("end", ["abort", "refuse and abort"])
def test_a03_a_request_that_ends_between_lookup_and_admission_leaves_nothing(lag, end):
    config = make_config(num_usable=6, block_size=64, max_model_len=448, max_num_batched_tokens=256)
    engine = make_engine(config, lag=lag)
    pool = pool_of(engine)
    stem = prompt(128)
    digests = fill_cache(engine, "stem", stem)
    holder = engine.add("holder", prompt(129, first=2), greedy(60))
    checked_step(engine)
    for i in range(50):
        late = engine.add(f"late{i}", [*stem, *range(500, 628)], greedy(1))
        checked_step(engine)
        assert late.sequences[0].digests[:2] == digests, "it was looked up"
        assert late.sequences[0].status is Status.WAITING, "and there was no room"
        if end == "refuse and abort":
            with pytest.raises(RequestError):
                engine.add(f"late{i}", stem, greedy(1))
        engine.abort(f"late{i}")
        engine.scheduler.check_invariants()
        assert [pool.ref_counts[pool.lookup(digest)] for digest in digests] == [0, 0]
        assert engine.scheduler.num_waiting == 0
    assert holder.sequences[0].status is Status.RUNNING
    finish_all(engine)
    whole = engine.add("whole", prompt(6 * 64, first=3), greedy(1))
    finish_all(engine)
    assert_right(engine, holder, whole)


@both_lags
def test_a03_a_request_that_waits_for_an_elders_blocks_can_be_aborted(lag):
    config = make_config(num_usable=6, block_size=64, max_model_len=448, max_num_batched_tokens=8)
    engine = make_engine(config, lag=lag)
    scheduler = engine.scheduler
    stem = prompt(256)
    elder = engine.add("elder", [*stem, 6], greedy(1))
    checked_step(engine)
    num_parked = 0
    for i in range(25):
        late = engine.add(f"late{i}", [*stem, 7], greedy(1))
        checked_step(engine)
        assert elder.sequences[0].num_computed_tokens < 256
        assert late.sequences[0].status is Status.WAITING
        assert pool_of(engine).num_available > 1 and scheduler.rows.num_free, "it has room"
        num_parked += scheduler.num_waiting == 1 and len(scheduler.waiting) == 0
        engine.abort(f"late{i}")
        assert scheduler.num_waiting == 0
        scheduler.check_invariants()
    assert num_parked > 15
    last = engine.add("last", [*stem, 7], greedy(4))
    finish_all(engine)
    assert last.num_cached_tokens == 256
    assert num_computed_for(engine, last) == 1 + 3
    whole = engine.add("whole", prompt(6 * 64, first=3), greedy(1))
    finish_all(engine)
    assert_right(engine, elder, last, whole)


@both_lags
def test_a03_those_who_waited_for_an_aborted_elder_go_on_from_its_blocks(lag):
    engine = make_engine(make_config(num_usable=64, max_num_batched_tokens=16), lag=lag)
    stem = prompt(120)
    elder = engine.add("elder", stem, greedy(1))
    followers = [engine.add(f"f{i}", [*stem, i, i], greedy(3)) for i in range(3)]
    step_until(engine, lambda: elder.sequences[0].num_computed_tokens > 40)
    assert all(f.sequences[0].status is Status.WAITING for f in followers)
    engine.abort("elder")
    finish_all(engine)
    assert_right(engine, elder, *followers)
    assert followers[0].num_cached_tokens >= 32, "what the elder had done is used"
    assert [f.num_cached_tokens for f in followers[1:]] == [120, 120]


def is_queued(engine: FakeEngine, victim) -> None:
    assert victim.sequences[0].status is Status.WAITING


def is_in_prefill(engine: FakeEngine, victim) -> None:
    checked_step(engine)
    assert victim.sequences[0].status is Status.RUNNING
    assert 0 < victim.sequences[0].num_computed_tokens <= 15


def is_decoding(engine: FakeEngine, victim) -> None:
    step_until(engine, lambda: len(engine.tokens.get(("victim", 0), ())) == 2)
    assert victim.sequences[0].status is Status.RUNNING


def was_preempted_in_prefill(engine: FakeEngine, victim) -> None:
    step_until(engine, lambda: engine.scheduler.num_preemptions > 0)
    assert victim.sequences[0] in engine.outputs[-1].preempted
    assert ("victim", 0) not in engine.tokens


def was_just_preempted(engine: FakeEngine, victim) -> None:
    step_until(engine, lambda: victim.sequences[0].num_preemptions > 0)
    assert victim.sequences[0].status is Status.WAITING
    assert engine.tokens["victim", 0]


def was_preempted_and_waits(engine: FakeEngine, victim) -> None:
    was_just_preempted(engine, victim)
    checked_step(engine)
    assert victim.sequences[0].status is Status.WAITING
    assert victim.sequences[0].num_in_flight == 0


def was_swapped_out(engine: FakeEngine, victim) -> None:
    was_preempted_and_waits(engine, victim)
    assert host_pool_of(engine).num_referenced > 0


def was_just_swapped_out(engine: FakeEngine, victim) -> None:
    step_until(engine, lambda: bool(engine.outputs) and any(engine.outputs[-1].moves.swap_outs))
    assert host_pool_of(engine).num_referenced > 0


def was_just_swapped_in(engine: FakeEngine, victim) -> None:
    step_until(engine, lambda: any(engine.outputs[-1].moves.swap_ins))
    assert victim.sequences[0].status is Status.RUNNING


def is_finished(engine: FakeEngine, victim) -> None:
    step_until(engine, lambda: ("victim", 0) in engine.finished)


def is_aborted(engine: FakeEngine, victim) -> None:
    checked_step(engine)
    engine.abort("victim")


# state: (how it comes about, the victim's prompt and output tokens, ends by end-of-sequence)
STATES = {
    "queued": (is_queued, 40, 5, False),
    "chunk 1 of 3": (is_in_prefill, 40, 5, False),
    "decoding": (is_decoding, 5, 5, False),
    "just preempted": (was_just_preempted, 12, 36, False),
    "preempted": (was_preempted_and_waits, 12, 36, False),
    "preempted in its prefill": (was_preempted_in_prefill, 52, 5, False),
    "just swapped out": (was_just_swapped_out, 12, 36, False),
    "swapped out": (was_swapped_out, 12, 36, False),
    "just swapped in": (was_just_swapped_in, 12, 36, False),
    "finished": (is_finished, 5, 3, False),
    "finished by eos": (is_finished, 5, 3, True),
    "aborted": (is_aborted, 40, 5, False),
}


def swapping(name: str) -> dict:
    """Fields of a configuration that swaps, for the states and moments that speak of it."""
    return {"preemption": "swap", "num_host_blocks": (33,)} if "swapped" in name else {}


@both_lags
@pytest.mark.parametrize("state", STATES)
def test_a04_abort_in_every_state(lag, state):
    reach, num_prompt_tokens, num_output_tokens, by_eos = STATES[state]
    config = make_config(num_usable=14, max_num_batched_tokens=16, **swapping(state))
    engine = make_engine(config, lag=lag)
    # Long enough to preempt the victim, which comes back when there is room again.
    bystander = engine.add("bystander", prompt(5, first=2), greedy(40))
    requests = [bystander]
    step_until(engine, lambda: ("bystander", 0) in engine.tokens)
    if by_eos:
        token_ids = prompt_ending_by_eos(num_prompt_tokens, num_output_tokens)
        victim = engine.add("victim", token_ids, greedy(10, ignore_eos=False))
    else:
        victim = engine.add("victim", prompt(num_prompt_tokens), greedy(num_output_tokens))
    reach(engine, victim)
    if bystander.sequences[0].status is Status.FINISHED:
        assert state == "just swapped in"
        requests.append(engine.add("bystander 2", prompt(5, first=3), greedy(20)))
    had_ended = ("victim", 0) in engine.finished
    for _ in range(2):  # twice is once
        ended = engine.scheduler.abort("victim")
        assert ended == ([] if had_ended else victim.sequences)
        had_ended = True
        engine.scheduler.check_invariants()
    engine.finished.setdefault(("victim", 0), FinishReason.ABORT)
    checked_step(engine)
    assert victim.sequences[0].status is Status.FINISHED
    checked_step(engine)
    held = sum(len(s.blocks[0]) for s in engine.scheduler.running)
    assert pool_of(engine).num_referenced == held, "its blocks are free within two steps"
    if swapping(state):
        assert host_pool_of(engine).num_referenced == 0
    finish_all(engine)
    assert_right(engine, *requests, victim)


@both_lags
def test_a04_abort_of_what_nobody_knows(lag):
    engine = make_engine(make_config(num_usable=14), lag=lag)
    bystander = engine.add("bystander", prompt(5), greedy(5))
    checked_step(engine)
    assert engine.scheduler.abort("never heard of") == []
    assert engine.scheduler.abort("bystander", index=7) == []
    finish_all(engine)
    assert_right(engine, bystander)


@both_lags
@pytest.mark.parametrize("index", [0, 1, 3, None])
@pytest.mark.parametrize("num_steps", [0, 1, 4, 6])
def test_a04_abort_of_samples_before_and_after_they_fork(lag, index, num_steps):
    engine = make_engine(make_config(num_usable=40, max_num_batched_tokens=16), lag=lag)
    bystander = engine.add("bystander", prompt(5, first=2), greedy(12))
    samples = engine.add("samples", prompt(41), greedy(6, n=4, temperature=1.0), seed=3)
    for _ in range(num_steps):
        checked_step(engine)
    assert all(s.status is not Status.FINISHED for s in samples.sequences)
    engine.abort("samples", index)
    engine.scheduler.check_invariants()
    finish_all(engine)
    aborted = {i for i in range(4) if engine.finished["samples", i] is FinishReason.ABORT}
    assert aborted == (set(range(4)) if index is None else {index})
    assert_right(engine, bystander, samples)


@both_lags
def test_a04_what_a_step_in_flight_writes_is_not_free_before_its_update(lag):
    engine = make_engine(make_config(num_usable=6), lag=lag)
    pool = pool_of(engine)
    victim = engine.add("victim", prompt(16), greedy(8))
    step_until(engine, lambda: victim.sequences[0].num_computed_tokens >= 17)
    assert pool.num_referenced == 5
    engine.abort("victim")
    late = engine.add("late", prompt(20, first=2), greedy(4))
    assert engine.scheduler.num_in_flight == lag
    assert pool.num_referenced == 5 * lag
    output = checked_step(engine)
    assert output.is_empty == bool(lag), "the late one needs five blocks"
    output = checked_step(engine)
    assert list(members_of(output)) == late.sequences
    finish_all(engine)
    assert_right(engine, victim, late)


# moment: (what holds of the victim, its prompt and output tokens, the lags in which it occurs)
MOMENTS = {
    "first chunk": (lambda s: 0 < s.num_computed_tokens < 40, 40, 5, (0, 1)),
    "samples": (lambda s: s.num_in_flight == 1, 5, 5, (0, 1)),
    "two tokens in flight": (lambda s: s.num_in_flight == 2, 5, 5, (1,)),
    "preempted": (lambda s: s.num_preemptions == 1, 12, 36, (0, 1)),
    "preempted with a token in flight": (
        lambda s: s.num_preemptions == 1 and s.num_in_flight == 1 and s.row == -1,
        12,
        36,
        (1,),
    ),
    "swapped out": (lambda s: s.num_preemptions == 1 and s.row == -1, 12, 36, (0, 1)),
    "swapped in": (lambda s: s.num_preemptions == 1 and s.row >= 0, 12, 36, (0, 1)),
}


@pytest.mark.parametrize(
    ("lag", "moment"), [(lag, name) for name, (*_, lags) in MOMENTS.items() for lag in lags]
)
def test_a04_abort_between_schedule_and_update(lag, moment):
    holds, num_prompt_tokens, num_output_tokens, _ = MOMENTS[moment]
    config = make_config(num_usable=24, max_num_batched_tokens=16, **swapping(moment))
    engine = make_engine(config, lag=lag)
    bystanders = [
        engine.add("b2", prompt(5, first=2), greedy(40)),
        engine.add("b3", prompt(3, first=3), greedy(40)),
    ]
    step_until(engine, lambda: len(engine.tokens) == 2)
    victim = engine.add("victim", prompt(num_prompt_tokens), greedy(num_output_tokens))

    def abort_now():
        if ("victim", 0) not in engine.finished and holds(victim.sequences[0]):
            engine.abort("victim")
            engine.abort("victim")

    engine.runner.before_update = abort_now
    finish_all(engine)
    assert (engine.scheduler.num_swaps > 0) == bool(swapping(moment))
    assert engine.finished["victim", 0] is FinishReason.ABORT
    assert_right(engine, *bystanders, victim)


@both_lags
def test_a05_a_requests_own_blocks_never_evict_its_hits(lag):
    engine = make_engine(make_config(num_usable=4), lag=lag)
    pool = pool_of(engine)
    old, new = prompt(8), prompt(8, first=2)
    old_digests = fill_cache(engine, "old", old)
    new_digests = fill_cache(engine, "new", new)
    assert pool.num_cached == pool.num_available == 4
    expected = [pool.lookup(digest) for digest in old_digests]
    request = engine.add("hit", [*old, *range(500, 507)], greedy(2))
    checked_step(engine)
    blocks = request.sequences[0].blocks[0]
    assert len(set(blocks)) == 4
    assert blocks[:2] == expected
    assert [pool.lookup(digest) for digest in new_digests] == [None, None]
    finish_all(engine)
    assert request.num_cached_tokens == 8
    assert_right(engine, request)


@both_lags
def test_eviction_takes_the_leaves_of_a_prefix_before_its_root(lag):
    engine = make_engine(make_config(num_usable=6), lag=lag)
    digests = fill_cache(engine, "first", prompt(16))
    fill_cache(engine, "other", prompt(13, first=2))
    found = [pool_of(engine).lookup(digest) is not None for digest in digests]
    assert found == [True, True, False, False]
    again = engine.add("again", prompt(16), greedy(3))
    finish_all(engine)
    assert again.num_cached_tokens == 8
    assert_right(engine, again)


@both_lags
@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a06_a_fully_cached_prompt_still_computes_a_token(lag, num_blocks, max_tokens):
    engine = make_engine(make_config(num_usable=8), lag=lag)
    token_ids = prompt(4 * num_blocks)
    first = engine.add("first", token_ids, greedy(max_tokens))
    finish_all(engine)
    second = engine.add("second", token_ids, greedy(max_tokens))
    finish_all(engine)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 4 * (num_blocks - 1)
    assert num_computed_for(engine, second) == 4 + max_tokens - 1
    assert engine.tokens["second", 0] == engine.tokens["first", 0]
    assert_right(engine, first, second)


def digests_of(token_ids: list[int], salt: bytes = b"", block_size: int = 4) -> list[bytes]:
    """The keys under which a prompt's blocks are found."""
    engine = make_engine(make_config(num_usable=64, block_size=block_size))
    request = engine.add("r", token_ids, greedy(1), salt=salt)
    finish_all(engine)
    digests = request.sequences[0].digests[: len(token_ids) // block_size]
    assert all(pool_of(engine).lookup(digest) is not None for digest in digests)
    return digests


@pytest.mark.parametrize("at", [0, 3, 4, 10, 15])
def test_a07_a_token_changes_its_blocks_digest_and_all_that_follow(at):
    token_ids = prompt(16)
    other = [*token_ids]
    other[at] += 1
    before, after = digests_of(token_ids), digests_of(other)
    changed = [a != b for a, b in zip(before, after, strict=True)]
    assert changed == [block >= at // 4 for block in range(4)]
    for a, b in zip(before[at // 4 :], after[at // 4 :], strict=True):
        num_bits = (int.from_bytes(a) ^ int.from_bytes(b)).bit_count()
        assert 80 < num_bits < 176, "half of 256 bits, give or take six deviations"


def test_a07_digests_tell_apart_what_looks_alike():
    prompts = [
        [1, 2, 3, 4, 1, 2, 3, 4],
        [4, 3, 2, 1, 4, 3, 2, 1],
        [1, 2, 3, 4, 4, 3, 2, 1],
        [12, 3, 4, 1, 2, 3, 4, 1],
        [1, 23, 4, 1, 2, 3, 4, 1],
        [257, 2, 3, 4, 1, 2, 3, 4],
        [1 + 2**16, 2, 3, 4, 1, 2, 3, 4],
        [1 + 2**24, 2, 3, 4, 1, 2, 3, 4],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    digests = {digest for p in prompts for digest in digests_of(p)}
    # the first and the third share their first block
    assert len(digests) == 2 * len(prompts) - 1
    assert len(set(digests_of([5] * 12))) == 3, "the same tokens at another place"


def test_a08_blocks_are_found_by_sha_256(monkeypatch):
    """Nobody can prepare a colliding prompt: the keys are digests of a cryptographic hash."""
    made = []

    class Recorded:
        def __init__(self, data: bytes):
            self._hash = real(data)

        def digest(self) -> bytes:
            made.append(self._hash.digest())
            return made[-1]

    real = hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", Recorded)
    digests = digests_of(prompt(12))
    assert len(digests) == 3
    assert set(digests) <= set(made)


def test_a08_keys_do_not_come_from_pythons_own_hash():
    """Two processes with other seeds of `hash` give one prompt the same keys."""
    script = (
        "from tests.test_scheduler_failures import digests_of\n"
        "print(*(d.hex() for d in digests_of(list(range(12)))))"
    )
    keys = set()
    for seed in "12":
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        )
        keys.add(done.stdout.strip())
    (line,) = keys
    assert [len(bytes.fromhex(key)) for key in line.split()] == [32, 32, 32]


@both_lags
def test_a09_an_evicted_prefix_is_computed_again(lag):
    engine = make_engine(make_config(num_usable=8), lag=lag)
    digests = fill_cache(engine, "first", prompt(12))
    for i in range(3):
        fill_cache(engine, f"other{i}", prompt(20, first=2 + i))
    assert [pool_of(engine).lookup(digest) for digest in digests] == [None] * 3
    again = engine.add("again", prompt(12), greedy(3))
    finish_all(engine)
    assert again.num_cached_tokens == 0
    assert_right(engine, again)


@both_lags
def test_a09_every_key_points_to_the_content_it_names(lag):
    rng = random.Random(lag)
    config = make_config(num_usable=16, max_num_batched_tokens=16)
    engine = make_engine(config, lag=lag)
    pool, slots = pool_of(engine), engine.runner.pools[0]
    size = config.block_size
    stems = [prompt(rng.randrange(1, 24), first=i) for i in range(12)]
    content: dict[bytes, list[list[int]]] = {}  # digest -> (token, position) of its block
    live: list = []
    num_evicted = 0
    findable: set[bytes] = set()
    for i in range(5_000):
        chance = rng.random()
        if chance < 0.3 and len(live) < 8:
            tail = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
            params = greedy(rng.randrange(1, 8), n=rng.choice([1, 1, 1, 3]))
            live.append(engine.add(f"r{i}", [*rng.choice(stems), *tail], params))
        elif chance < 0.36 and live:
            engine.abort(rng.choice(live).request_id)
        else:
            engine.step()
        for sequence in (s for request in live for s in request.sequences):
            for k, digest in enumerate(sequence.digests):
                if digest not in content:
                    tokens = sequence.token_ids[k * size : (k + 1) * size]
                    content[digest] = [[t, k * size + j] for j, t in enumerate(tokens)]
        live = [r for r in live if r.request_id in engine.scheduler.requests]
        was_findable, findable = findable, set()
        for digest, expected in content.items():
            block = pool.lookup(digest)
            if block is not None:
                findable.add(digest)
                assert slots[block * size : (block + 1) * size].tolist() == expected
        num_evicted += len(was_findable - findable)
        engine.scheduler.check_invariants()
    assert num_evicted > 500 and engine.scheduler.num_hit_tokens > 500
    assert engine.scheduler.num_preemptions > 10
    finish_all(engine)


@both_lags
def test_a10_nothing_computed_by_old_weights_is_found_under_new_ones(lag):
    """What is in flight is aborted, then the prefixes are forgotten."""
    config = make_config(num_usable=32, num_host_blocks=(33,), kv_offload=True)
    engine = make_engine(config, lag=lag)
    done = engine.add("done", prompt(17), greedy(2))
    finish_all(engine)
    running = engine.add("running", [*prompt(17), 1, 2, 3, 4, 5], greedy(30))
    for _ in range(5):
        checked_step(engine)
    assert running.num_cached_tokens == 16
    engine.abort("running")
    engine.scheduler.forget_prefixes()
    again = engine.add("again", [*prompt(17), 1, 2, 3, 4, 5], greedy(30))
    finish_all(engine)
    assert again.num_cached_tokens == 0
    assert num_computed_for(engine, again) == 22 + 29
    assert_right(engine, done, running, again)


@both_lags
def test_a10_the_host_forgets_too(lag):
    config = make_config(num_usable=8, num_host_blocks=(33,), kv_offload=True)
    engine = make_engine(config, lag=lag)
    digests = fill_cache(engine, "first", prompt(17))
    fill_cache(engine, "other", prompt(31, first=2))
    assert [pool_of(engine).lookup(digest) for digest in digests] == [None] * 4
    assert all(host_pool_of(engine).lookup(digest) for digest in digests)
    engine.scheduler.forget_prefixes()
    again = engine.add("again", prompt(17), greedy(3))
    finish_all(engine)
    assert again.num_cached_tokens == 0
    assert_right(engine, again)


@both_lags
def test_a12_a_block_is_not_handed_out_while_its_copy_is_in_flight(lag):
    config = make_config(num_usable=14, preemption="swap", num_host_blocks=(33,))
    engine = make_engine(config, lag=lag)
    elder = engine.add("elder", prompt(5, first=2), greedy(40))
    victim = engine.add("victim", prompt(12), greedy(36))
    held = {}

    def note():
        if engine.outputs[-1].preempted:
            held["copied"] = {copy.source for copy in engine.outputs[-1].moves.swap_outs}
            held["free"] = [b for b in held["copied"] if not pool_of(engine).ref_counts[b]]

    engine.runner.before_update = note
    finish_all(engine)
    assert len(held["copied"]) >= 4
    assert held["free"] == [], "all were held until the update of the step that copies them"
    assert engine.scheduler.num_swaps == 1
    swapped_in = [copy for output in engine.outputs for copy in output.moves.swap_ins]
    whole = 12 + 35
    assert num_computed_for(engine, victim) == whole, "nothing was computed twice"
    assert swapped_in
    assert_right(engine, elder, victim)


@both_lags
def test_a12_a_host_block_is_not_handed_out_while_its_copy_is_in_flight(lag):
    """The victim is aborted as soon as it was swapped out: the copy goes on writing."""
    config = make_config(num_usable=14, preemption="swap", num_host_blocks=(33,))
    engine = make_engine(config, lag=lag)
    elder = engine.add("elder", prompt(5, first=2), greedy(40))
    victim = engine.add("victim", prompt(12), greedy(36))
    step_until(engine, lambda: bool(engine.outputs) and any(engine.outputs[-1].moves.swap_outs))
    targets = [copy.target for copy in engine.outputs[-1].moves.swap_outs]
    host_pool = host_pool_of(engine)
    assert all(host_pool.ref_counts[block] for block in targets)
    engine.abort("victim")
    assert [host_pool.ref_counts[block] for block in targets] == [lag] * len(targets)
    checked_step(engine)
    assert host_pool.num_referenced == 0
    finish_all(engine)
    assert_right(engine, elder, victim)


@both_lags
def test_a_host_pool_alone_swaps_nobody(lag):
    """With `preemption="recompute"` it only keeps evicted prefixes."""
    config = make_config(num_usable=14, num_host_blocks=(33,), kv_offload=True)
    engine = make_engine(config, lag=lag)
    elder = engine.add("elder", prompt(5, first=2), greedy(40))
    victim = engine.add("victim", prompt(12), greedy(36))
    finish_all(engine)
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.num_swaps == 0
    assert_right(engine, elder, victim)


@both_lags
def test_a12_without_room_on_the_host_a_victim_is_computed_again(lag):
    config = make_config(num_usable=14, preemption="swap", num_host_blocks=(3,))
    engine = make_engine(config, lag=lag)
    elder = engine.add("elder", prompt(5, first=2), greedy(40))
    victim = engine.add("victim", prompt(12), greedy(36))
    finish_all(engine)
    assert engine.scheduler.num_preemptions == 1
    assert engine.scheduler.num_swaps == 0
    assert_right(engine, elder, victim)


@both_lags
def test_a13_the_host_gives_back_each_prompts_own_blocks(lag):
    config = make_config(num_usable=12, num_host_blocks=(31,), kv_offload=True)
    engine = make_engine(config, lag=lag)
    rng = random.Random(13)
    prompts = [[*prompt(12, first=i), i] for i in range(50)]
    order = [i for _ in range(3) for i in rng.sample(range(50), 50)]
    content = {}
    num_on_host = 0
    for at, i in enumerate(order):
        request = engine.add(f"r{at}", prompts[i], greedy(3))
        while (f"r{at}", 0) not in engine.finished:
            checked_step(engine)
            for digest, tokens in content.items():
                block = host_pool_of(engine).lookup(digest)
                if block is not None:
                    num_on_host += 1
                    assert engine.runner.host[0, block].tolist() == tokens
        for k, digest in enumerate(request.sequences[0].digests[:3]):
            content[digest] = [[prompts[i][4 * k + j], 4 * k + j] for j in range(4)]
        assert_right(engine, request)
    finish_all(engine)
    assert sum(len(output.moves.swap_ins) for output in engine.outputs) >= 10
    assert num_on_host > 1000
    assert engine.scheduler.num_hit_tokens > 50


@both_lags
def test_a_lost_kv_cache_is_computed_again_to_the_same_tokens(lag):
    """A step that failed after the pool was donated: whatever it was, nobody notices."""
    for failing_step in range(24):
        config = make_config(
            num_usable=16,
            max_num_batched_tokens=16,
            preemption="swap",
            num_host_blocks=(9,),
        )
        engine = make_engine(config, lag=lag)
        requests = [
            engine.add("samples", prompt(21), greedy(9, n=3, temperature=1.0), seed=4),
            engine.add("alone", prompt(9, first=2), greedy(12)),
            engine.add("follower", [*prompt(20), 8, 8], greedy(5)),
        ]
        for _ in range(failing_step):
            checked_step(engine)
        engine.pending.clear()
        engine.runner.pools[0][:] = -1
        engine.scheduler.recompute_all()
        engine.scheduler.check_invariants()
        assert engine.scheduler.running == []
        assert pool_of(engine).num_available == 16
        finish_all(engine)
        assert_right(engine, *requests)


@both_lags
def test_blocks_of_a_step_with_bad_numbers_are_never_found(lag):
    """A negative token says that the row's logits were not finite."""
    engine = make_engine(make_config(num_usable=16), lag=lag)
    bad = engine.add("bad", prompt(12), greedy(5))
    good = engine.add("good", prompt(12, first=2), greedy(5))
    output = engine.scheduler.schedule()
    assert [s.sequence for s in output.samples] == [*bad.sequences, *good.sequences]
    digests = bad.sequences[0].digests + good.sequences[0].digests
    if lag:
        later = engine.scheduler.schedule()
    updates = engine.scheduler.update(output, [-1, 5])
    assert [(u.token_id, u.finish_reason) for u in updates] == [
        (None, FinishReason.ERROR),
        (5, None),
    ]
    if lag:
        updates = engine.scheduler.update(later, [7, 7])
        assert [u.sequence for u in updates] == good.sequences
    engine.scheduler.check_invariants()
    found = [pool_of(engine).lookup(digest) for digest in digests]
    assert found[:3] == [None] * 3
    assert all(found[3:])
    assert pool_of(engine).num_referenced == len(good.sequences[0].blocks[0])


@both_lags
def test_blocks_are_found_only_after_the_update_of_the_step_that_fills_them(lag):
    engine = make_engine(make_config(num_usable=16), lag=lag)
    first = engine.add("first", prompt(12), greedy(5))
    output = engine.scheduler.schedule()
    digests = list(first.sequences[0].digests)
    assert [pool_of(engine).lookup(digest) for digest in digests] == [None] * 3
    if lag:
        engine.scheduler.schedule()
        assert [pool_of(engine).lookup(digest) for digest in digests] == [None] * 3
    engine.scheduler.update(output, [5])
    assert all(pool_of(engine).lookup(digest) for digest in digests)


@both_lags
@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 9, 13])
def test_a88_a_window_keeps_what_its_queries_see_and_no_more(lag, window):
    config = make_config(
        num_usable=0,
        num_blocks=(81, 81),
        windows=(None, window),
        max_num_batched_tokens=10,
    )
    engine = make_engine(config, lag=lag)
    requests = [engine.add(f"r{i}", prompt(21 + i, first=i), greedy(40)) for i in range(3)]
    step_until(engine, lambda: len(engine.tokens) == 3)
    full, window_pool = pool_of(engine, 0), pool_of(engine, 1)
    for _ in range(25):
        checked_step(engine)
        # what a row sees, begun blocks at both ends, and one that is dropped with the next
        assert window_pool.num_referenced <= 3 * (-(-window // 4) + 3)
    if window < 13:
        assert window_pool.num_referenced < full.num_referenced
    finish_all(engine)
    again = engine.add("again", [*prompt(21), 7, 7, 7], greedy(9))
    finish_all(engine)
    assert again.num_cached_tokens == 20
    assert_right(engine, *requests, again)


# -- scheduling ---------------------------------------------------------------------------------


@both_lags
def test_a14_a_prompt_that_never_fits_is_refused_and_blocks_nobody(lag):
    engine = make_engine(make_config(num_usable=8, block_size=16), lag=lag)
    with pytest.raises(RequestError, match=r"200 tokens.*holds only 128") as refused:
        engine.add("r1", prompt(200), greedy(8))
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    assert not engine.scheduler.requests
    r2 = engine.add("r2", prompt(10), greedy(8))
    finish_all(engine)
    assert_right(engine, r2)


@both_lags
@pytest.mark.parametrize("num_prompt_tokens", [120, 127, 128])
def test_a14_an_output_that_never_fits_ends_by_length(lag, num_prompt_tokens):
    engine = make_engine(make_config(num_usable=8, block_size=16), lag=lag)
    request = engine.add("r", prompt(num_prompt_tokens), greedy(64))
    finish_all(engine)
    assert engine.finished["r", 0] is FinishReason.LENGTH
    assert len(engine.tokens["r", 0]) == 129 - num_prompt_tokens
    assert_right(engine, request)


@both_lags
def test_a14_requests_that_each_fill_the_pool_take_turns(lag):
    engine = make_engine(make_config(num_usable=8, block_size=16), lag=lag)
    requests = [engine.add(f"r{i}", prompt(100, first=i), greedy(29)) for i in range(4)]
    finish_all(engine)
    assert_right(engine, *requests)


@both_lags
def test_a18_a_long_prefill_stops_nobody(lag):
    config = make_config(num_usable=500, block_size=16, max_model_len=6656)
    engine = make_engine(config, lag=lag)
    r2 = engine.add("r2", prompt(6400), greedy(1))
    alone = finish_all(engine)
    assert_right(engine, r2)

    engine = make_engine(config, lag=lag)
    r1 = engine.add("r1", prompt(8, first=2), greedy(160))
    step_until(engine, lambda: ("r1", 0) in engine.tokens)
    r2 = engine.add("r2", prompt(6400), greedy(1))
    start = len(engine.outputs)
    for _ in range(20):
        checked_step(engine)
    r3 = engine.add("r3", prompt(8, first=3), greedy(1))
    arrival = len(engine.outputs)
    step_until(engine, lambda: ("r2", 0) in engine.finished)
    during_prefill = engine.outputs[start : first_step_of(engine, r2) + 1]
    assert len(during_prefill) > 90
    assert all(r1.sequences[0] in members_of(output) for output in during_prefill)
    assert first_step_of(engine, r3) - arrival < 5
    assert first_step_of(engine, r2) - start <= 1.2 * alone
    finish_all(engine)
    assert_right(engine, r1, r2, r3)


@both_lags
def test_a19_victims_are_not_scheduled_again_in_the_same_pass(lag):
    """Three running sequences need a block at once and none is free."""
    engine = make_engine(make_config(num_usable=6, max_num_seqs=3), lag=lag)
    requests = [engine.add(f"r{i}", prompt(8, first=i), greedy(12)) for i in range(3)]
    checked_step(engine)
    assert pool_of(engine).num_available == 0
    assert len(engine.scheduler.running) == 3
    num_preempted = []

    def note(output):
        num_preempted.append(len(output.preempted))
        assert len(output.preempted) < 3, "the oldest stays"

    step_until(engine, lambda: engine.scheduler.num_preemptions > 0)
    for output in engine.outputs:
        note(output)
    assert max(num_preempted) in (1, 2)
    finish_all(engine, max_steps=10 * 3 * 20)
    assert_right(engine, *requests)
    assert engine.scheduler.num_preemptions <= 4, "no sequence is thrown out time and again"


def test_a20_a_budget_below_the_number_of_rows_is_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=2.*max_num_seqs=4"):
        make_config(num_usable=16, max_num_seqs=4, max_num_batched_tokens=2)


@both_lags
@pytest.mark.parametrize("num_decodes", [0, 1, 3, 7])
def test_a20_a_chunk_takes_just_what_the_decodes_leave(lag, num_decodes):
    config = make_config(num_usable=64, max_num_seqs=8, max_num_batched_tokens=8)
    engine = make_engine(config, lag=lag)
    decoding = [engine.add(f"d{i}", prompt(1, first=i), greedy(40)) for i in range(num_decodes)]
    step_until(engine, lambda: len(engine.tokens) == num_decodes)
    waiting = engine.add("long", prompt(100, first=9), greedy(1))
    for _ in range(3):
        output = checked_step(engine)
        assert members_of(output)[waiting.sequences[0]] == 8 - num_decodes
        assert all(d.sequences[0] in members_of(output) for d in decoding)
    finish_all(engine)
    assert_right(engine, waiting, *decoding)


@both_lags
def test_a20_every_running_sequence_advances_in_every_step(lag):
    engine = make_engine(make_config(num_usable=64, max_num_batched_tokens=4), lag=lag)
    requests = [engine.add(f"r{i}", prompt(4, first=i), greedy(20)) for i in range(4)]
    step_until(engine, lambda: len(engine.tokens) == 4)
    for _ in range(10):
        output = checked_step(engine)
        assert set(members_of(output)) == {r.sequences[0] for r in requests}
    finish_all(engine)
    assert_right(engine, *requests)


@both_lags
def test_a22_a_preempted_sequence_keeps_no_row(lag):
    config = make_config(num_usable=8, max_num_seqs=2)
    engine = make_engine(config, lag=lag, order=LastFirst())
    younger = engine.add("younger", prompt(12, first=1), greedy(16))
    elder = engine.add("elder", prompt(8, first=2), greedy(16))
    step_until(engine, lambda: engine.scheduler.num_preemptions == 1)
    assert younger.sequences[0].status is Status.WAITING
    assert younger.sequences[0].row == -1
    assert engine.scheduler.rows.num_free == 1
    third = engine.add("third", prompt(3, first=3), greedy(2))
    step_until(engine, lambda: third.sequences[0].status is Status.RUNNING, max_steps=3)
    assert younger.sequences[0].status is Status.WAITING, "it was admitted beside the preempted"
    assert elder.sequences[0].status is Status.RUNNING
    finish_all(engine)
    assert_right(engine, younger, elder, third)


class LastFirst:
    """An order policy: whoever came last is served first, and preempted last."""

    def __init__(self):
        self._num_arrivals = 0

    def key(self, request) -> float:
        self._num_arrivals += 1
        return -self._num_arrivals

    def started(self, request) -> None:
        pass

    def ended(self, request) -> None:
        pass


@both_lags
def test_a23_lengths_in_different_buckets_preempt_nobody(lag):
    buckets = Buckets(decodes=(1, 2, 4), chunks=(16, 64, 256), samples=(1, 2, 4))
    config = make_config(num_usable=100, max_num_batched_tokens=256)
    engine = make_engine(config, lag=lag)
    lengths = (3, 17, 130)
    requests = [engine.add(f"r{n}", prompt(n, first=n), greedy(30)) for n in lengths]
    checked_step(engine)
    for _ in range(20):
        output = checked_step(engine)
        assert set(members_of(output)) == {r.sequences[0] for r in requests}
    finish_all(engine)
    assert engine.scheduler.num_preemptions == 0
    programs = {buckets.pick(len(o.decodes), o.num_chunk_tokens) for o in engine.outputs}
    assert programs <= set(buckets.backbones())
    assert_right(engine, *requests)


@both_lags
def test_a24_a_client_that_leaves_stops_its_prefill(lag):
    config = make_config(num_usable=600, block_size=16, max_model_len=8192)
    engine = make_engine(config, lag=lag)
    gone = engine.add("gone", prompt(4096), greedy(16))
    for _ in range(3):
        checked_step(engine)
    assert gone.sequences[0].num_computed_tokens == 3 * 64
    engine.abort("gone")
    late = engine.add("late", prompt(8, first=2), greedy(2))
    output = checked_step(engine)
    assert members_of(output) == {late.sequences[0]: 8}, "no further chunk, and the next at once"
    checked_step(engine)
    assert pool_of(engine).num_referenced <= 1
    finish_all(engine)
    assert num_computed_for(engine, gone) == 3 * 64
    assert_right(engine, gone, late)


@both_lags
def test_a25_abort_ends_every_sample(lag):
    config = make_config(num_usable=200, max_num_seqs=6, max_model_len=512)
    engine = make_engine(config, lag=lag)
    bystander = engine.add("bystander", prompt(5, first=2), greedy(400))
    for i in range(100):
        request = engine.add(f"r{i}", prompt(10), greedy(50, n=4, temperature=1.0), seed=i)
        step_until(engine, lambda request=request: len(engine.tokens) > 1)
        assert sum(s.status is Status.RUNNING for s in request.sequences) == 4
        engine.abort(f"r{i}")
        assert all(s.status is Status.FINISHED for s in request.sequences)
        assert list(engine.scheduler.requests) == ["bystander"]
        for _ in range(lag):
            checked_step(engine)
        assert engine.scheduler.running == bystander.sequences
        held = len(bystander.sequences[0].blocks[0])
        assert pool_of(engine).num_referenced == held
        assert_right(engine, request)
        engine.tokens = {k: v for k, v in engine.tokens.items() if k[0] == "bystander"}
    finish_all(engine)
    assert_right(engine, bystander)


@both_lags
def test_a26_an_id_in_use_is_refused_and_its_owner_goes_on(lag):
    engine = make_engine(make_config(num_usable=16), lag=lag)
    first = engine.add("same", prompt(5), greedy(5))
    for _ in range(4):
        with pytest.raises(RequestError, match="'same' is in use") as refused:
            engine.add("same", prompt(7, first=2), greedy(5))
        assert refused.value.param == "request_id"
        checked_step(engine)
        assert len(engine.scheduler.requests) == 1
    finish_all(engine)
    assert_right(engine, first)
    del engine.finished["same", 0], engine.tokens["same", 0]
    again = engine.add("same", prompt(7, first=2), greedy(5))
    finish_all(engine)
    assert_right(engine, again)


@pytest.mark.parametrize(("lag", "num_requests"), [(0, 2_000), (1, 10_000)])
def test_a27_there_is_always_progress(lag, num_requests):
    rng = random.Random(27)
    config = make_config(num_usable=40, max_num_seqs=16, max_num_batched_tokens=64, watermark=0.05)
    engine = FakeEngine(config, lag=lag)
    scheduler = engine.scheduler
    requests = []
    num_stuck = num_steps = 0
    while len(requests) < num_requests or scheduler.has_unfinished or engine.pending:
        for _ in range(rng.randrange(6)):
            if len(requests) < num_requests and scheduler.num_waiting < 30:
                long = rng.random() < 0.05
                length = rng.randrange(60, 150) if long else rng.randrange(1, 20)
                stem = prompt(length, first=rng.randrange(20))
                params = SamplingParams(
                    temperature=0.0, max_tokens=rng.randrange(1, 8), n=rng.choice([1] * 9 + [3])
                )
                requests.append(engine.add(f"r{len(requests)}", stem, params))
        if rng.random() < 0.05 and scheduler.requests:
            engine.abort(rng.choice(list(scheduler.requests)))
        had_work = scheduler.num_waiting > 0
        output = engine.step()
        num_steps += 1
        stuck = had_work and not scheduler.running and output.is_empty
        num_stuck = num_stuck + 1 if stuck else 0
        assert num_stuck <= 3
    assert scheduler.num_preemptions > 20
    assert scheduler.num_hit_tokens > 1000
    assert_idle_books(engine)
    assert_right(engine, *requests[:: max(1, num_requests // 1000)])
    assert len({request_id for request_id, _ in engine.finished}) == num_requests


BLOCK = 4


@both_lags
@pytest.mark.parametrize("num_prompt_tokens", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_a29_a_chunk_that_samples_nothing_disturbs_nobody(lag, num_prompt_tokens):
    length = num_prompt_tokens
    chunk_sizes = {1, 3, BLOCK - 1, BLOCK, BLOCK + 1, length - 1, length, length + 1}
    for chunk_size in sorted(chunk_sizes):
        config = make_config(num_usable=64, max_num_seqs=3, max_num_batched_tokens=2 + chunk_size)
        engine = make_engine(config, lag=lag)
        decoding = [engine.add(f"d{i}", prompt(2, first=i), greedy(40)) for i in range(2)]
        step_until(engine, lambda engine=engine: len(engine.tokens) == 2)
        request = engine.add("chunked", prompt(length, first=9), greedy(6))
        sequence = request.sequences[0]
        start = len(engine.outputs)
        for _ in range(-(-length // chunk_size)):
            assert ("chunked", 0) not in engine.tokens
            output = checked_step(engine)
            assert len(output.samples) == 2 + (sequence.num_computed_tokens == length)
        sizes = [members_of(output)[sequence] for output in engine.outputs[start:]]
        full, rest = divmod(length, chunk_size)
        assert sizes == [chunk_size] * full + [rest] * (rest > 0)
        for _ in range(lag):
            assert ("chunked", 0) not in engine.tokens
            checked_step(engine)
        assert len(engine.tokens["chunked", 0]) == 1
        finish_all(engine)
        assert_right(engine, request, *decoding)


# -- metrics and security -----------------------------------------------------------------------


@both_lags
def test_a91_nothing_runs_or_waits_after_all_was_aborted(lag):
    engine = make_engine(make_config(num_usable=100, max_num_seqs=12), lag=lag)
    for i in range(20):
        engine.add(f"r{i}", prompt(10, first=i), greedy(50))
    for _ in range(4):
        checked_step(engine)
    assert len(engine.scheduler.running) == 12
    assert engine.scheduler.num_waiting == 8
    for i in range(20):
        engine.abort(f"r{i}")
    assert engine.scheduler.running == []
    assert engine.scheduler.num_waiting == 0
    checked_step(engine)
    assert_idle_books(engine)


@both_lags
def test_a92_lookups_and_hits_are_counted_exactly(lag):
    engine = make_engine(make_config(num_usable=40), lag=lag)
    for i in range(10):
        engine.add(f"r{i}", [*prompt(8), i], greedy(1))
        finish_all(engine)
    engine.add("miss", prompt(9, first=2), greedy(1))
    finish_all(engine)
    assert engine.scheduler.num_lookup_tokens == 11 * 9
    assert engine.scheduler.num_hit_tokens == 9 * 8


@both_lags
def test_a94_a_salt_keeps_tenants_prefixes_apart(lag):
    engine = make_engine(make_config(num_usable=64), lag=lag)
    cached_tokens = []
    for i, salt in enumerate([b"a", b"a", b"b", b""]):
        request = engine.add(f"r{i}", prompt(64), greedy(3), salt=salt)
        finish_all(engine)
        assert_right(engine, request)
        cached_tokens.append(request.num_cached_tokens)
    assert cached_tokens == [0, 60, 0, 0]


@both_lags
def test_a94_a_salted_request_neither_waits_for_nor_shares_with_another(lag):
    engine = make_engine(make_config(num_usable=128, max_num_batched_tokens=128), lag=lag)
    salts = (b"a", b"b", b"a")
    requests = [
        engine.add(f"r{i}", prompt(40), greedy(3), salt=salt) for i, salt in enumerate(salts)
    ]
    output = checked_step(engine)
    assert set(members_of(output)) == {requests[0].sequences[0], requests[1].sequences[0]}
    finish_all(engine)
    assert [r.num_cached_tokens for r in requests] == [0, 0, 36]
    assert_right(engine, *requests)


# -- sharing ------------------------------------------------------------------------------------


@both_lags
@pytest.mark.parametrize("num_prompt_tokens", [7, 8, 9])
def test_samples_share_the_prompts_blocks_and_copy_the_one_they_write(lag, num_prompt_tokens):
    engine = make_engine(make_config(num_usable=40), lag=lag)
    params = greedy(5, n=4, temperature=1.0)
    request = engine.add("r", prompt(num_prompt_tokens), params, seed=11)
    checked_step(engine)
    assert all(s.status is Status.RUNNING for s in request.sequences)
    num_blocks = -(-num_prompt_tokens // 4)
    assert pool_of(engine).num_referenced == num_blocks, "one copy of the prompt for four samples"
    finish_all(engine)
    copies = [copy for output in engine.outputs for copy in copies_of(output)]
    assert len(copies) == (3 if num_prompt_tokens % 4 else 0), "the last holder writes in place"
    assert len({copy.source for copy in copies}) <= 1
    assert len({copy.target for copy in copies}) == len(copies)
    assert_right(engine, request)
    assert len({tuple(engine.tokens["r", i]) for i in range(4)}) > 1


@both_lags
def test_samples_without_a_row_come_later_and_hit_the_prompt(lag):
    engine = make_engine(make_config(num_usable=40, max_num_seqs=2), lag=lag)
    request = engine.add("r", prompt(13), greedy(4, n=5, temperature=1.0), seed=2)
    finish_all(engine)
    assert_right(engine, request)
    assert num_computed_for(engine, request) == 13 + 3 * 1 + 5 * 3, "three recompute a token"
    assert request.num_cached_tokens == 0
