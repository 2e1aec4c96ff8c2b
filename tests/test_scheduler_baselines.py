"""Static batches, reserved blocks and dedicated prefill really are what their names say."""

import pytest

from scheduler import FinishReason, Scheduler, SchedulerConfig, Status, record_step
from tests.fakes import FakeEngine
from tests.scheduling import (
    assert_right,
    checked_step,
    finish_all,
    greedy,
    make_config,
    make_engine,
    members_of,
    pool_of,
    prompt,
    step_until,
)

both_lags = pytest.mark.parametrize("lag", [0, 1])


class Clock:
    """Seconds that a test moves by hand."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def static_engine(clock: Clock, *, lag: int, **fields) -> FakeEngine:
    chosen = {"num_usable": 64, "batching": "static", "batch_timeout_s": 2.0}
    engine = make_engine(make_config(**(chosen | fields)), lag=lag)
    engine.scheduler = Scheduler(engine.config, clock=clock)
    return engine


# -- static batches -----------------------------------------------------------------------------


@both_lags
def test_a_static_batch_waits_until_it_is_full(lag):
    engine = static_engine(Clock(), lag=lag)
    for i in range(3):
        engine.add(f"r{i}", prompt(5, first=i), greedy(3))
        assert checked_step(engine).is_empty
    engine.add("r3", prompt(5, first=3), greedy(3))
    assert len(members_of(checked_step(engine))) == 4


@both_lags
def test_a_static_batch_that_is_not_full_starts_when_its_time_is_over(lag):
    clock = Clock()
    engine = static_engine(clock, lag=lag)
    engine.add("r0", prompt(5), greedy(3))
    clock.now_s += 1.5
    engine.add("r1", prompt(5, first=2), greedy(3))
    assert checked_step(engine).is_empty
    clock.now_s += 0.5
    assert len(members_of(checked_step(engine))) == 2, "two seconds after the first came"
    finish_all(engine)
    late = engine.add("late", prompt(5), greedy(3))
    assert checked_step(engine).is_empty, "each batch has its own time"
    clock.now_s += 2.0
    finish_all(engine)
    assert_right(engine, late)


@both_lags
def test_nobody_joins_a_static_batch_before_its_longest_member_ends(lag):
    engine = static_engine(Clock(), lag=lag)
    first = [engine.add(f"r{i}", prompt(5, first=i), greedy(2 + 6 * i)) for i in range(4)]
    checked_step(engine)
    second = [engine.add(f"s{i}", prompt(5, first=10 + i), greedy(2)) for i in range(4)]
    while ("r3", 0) not in engine.finished:
        output = checked_step(engine)
        if not output.is_empty and ("r3", 0) not in engine.finished:
            assert {s.request for s in members_of(output)} <= set(first)
            assert output.num_slots_held == 4, "the ended ones' slots do nothing"
    assert ("r0", 0) in engine.finished
    finish_all(engine)
    assert_right(engine, *first, *second)


@both_lags
def test_a_member_of_a_static_batch_may_need_several_steps_for_its_prompt(lag):
    clock = Clock()
    engine = static_engine(clock, lag=lag, max_num_batched_tokens=16, max_num_seqs=2)
    requests = [engine.add(f"r{i}", prompt(40, first=i), greedy(12)) for i in range(2)]
    finish_all(engine)
    assert max(len(members_of(output)) for output in engine.outputs) == 2
    assert_right(engine, *requests)


@both_lags
def test_a_static_batch_of_aborted_members_lets_the_next_begin(lag):
    clock = Clock()
    engine = static_engine(clock, lag=lag)
    for i in range(4):
        engine.add(f"r{i}", prompt(5, first=i), greedy(30))
    checked_step(engine)
    next_one = engine.add("next", prompt(5), greedy(3))
    for i in range(4):
        engine.abort(f"r{i}")
    checked_step(engine)
    clock.now_s += 2.0
    finish_all(engine)
    assert_right(engine, next_one)


def test_continuous_batching_holds_no_slots():
    engine = make_engine(make_config(num_usable=64))
    engine.add("r", prompt(5), greedy(3))
    assert checked_step(engine).num_slots_held == 0


# -- reserved blocks ----------------------------------------------------------------------------


def reserved_config(**fields) -> SchedulerConfig:
    chosen = {"num_usable": 24, "max_model_len": 32, "allocation": "reserved"}
    return make_config(**(chosen | fields))


@both_lags
def test_reserved_blocks_are_taken_at_the_start_for_the_longest_output(lag):
    engine = make_engine(reserved_config(enable_prefix_caching=False), lag=lag)
    requests = [engine.add(f"r{i}", prompt(3, first=i), greedy(9)) for i in range(5)]
    output = checked_step(engine)
    assert len(members_of(output)) == 3, "24 blocks hold three of 32 tokens"
    assert pool_of(engine).num_referenced == 24
    assert requests[3].sequences[0].status is Status.WAITING, "though a row is free"
    assert engine.scheduler.rows.num_free == 1
    record = record_step(engine.scheduler, output)
    assert record.capacity_tokens == 96
    assert record.block_utilization < 0.1
    finish_all(engine)
    assert engine.scheduler.num_preemptions == 0, "nobody ever lacks a block"
    assert_right(engine, *requests)


@both_lags
def test_paged_blocks_serve_more_at_once_than_reserved_ones(lag):
    num_steps = {}
    for allocation in ("reserved", "paged"):
        config = reserved_config(allocation=allocation, max_num_seqs=8)
        engine = make_engine(config, lag=lag)
        requests = [engine.add(f"r{i}", prompt(3, first=i), greedy(9)) for i in range(24)]
        num_steps[allocation] = finish_all(engine)
        assert_right(engine, *requests)
    assert num_steps["paged"] < 0.6 * num_steps["reserved"]


# -- dedicated prefill --------------------------------------------------------------------------


@both_lags
def test_a_step_of_dedicated_prefill_never_decodes(lag):
    config = make_config(num_usable=64, prefill="dedicated", max_num_batched_tokens=16)
    engine = make_engine(config, lag=lag)
    requests = [engine.add(f"r{i}", prompt(30, first=i), greedy(12)) for i in range(3)]
    kinds = []
    while engine.scheduler.has_unfinished or engine.pending:
        before = {r.sequences[0]: r.sequences[0].num_computed_tokens for r in requests}
        output = checked_step(engine)
        is_prefill = {before[sequence] < 29 for sequence in members_of(output)}
        assert len(is_prefill) <= 1, "prompts and outputs in one step"
        kinds += is_prefill
    assert kinds.count(True) >= 6
    assert_right(engine, *requests)


@both_lags
def test_decodes_go_on_in_every_second_step_of_a_long_dedicated_prefill(lag):
    config = make_config(num_usable=120, prefill="dedicated", max_num_batched_tokens=16)
    engine = make_engine(config, lag=lag)
    decoding = engine.add("decoding", prompt(3, first=1), greedy(60))
    step_until(engine, lambda: ("decoding", 0) in engine.tokens)
    engine.add("long", prompt(200, first=2), greedy(1))
    for _ in range(10):
        pair = [members_of(checked_step(engine)) for _ in range(2)]
        ran = [decoding.sequences[0] in members for members in pair]
        assert ran.count(True) == 1
        assert all(len(members) == 1 for members in pair)
    finish_all(engine)
    assert engine.finished["long", 0] is FinishReason.LENGTH
    assert_right(engine, decoding)


@both_lags
@pytest.mark.parametrize("num_prompt_tokens", [4, 12, 16, 60])
def test_a_static_batch_has_all_its_members_however_long_the_prompts(lag, num_prompt_tokens):
    """Eight wait from the start and there are eight rows: one batch of eight, not several."""
    config = make_config(
        num_usable=400,
        max_num_seqs=8,
        batching="static",
        batch_timeout_s=0.0,
        max_num_batched_tokens=16,
    )
    engine = make_engine(config, lag=lag)
    requests = [
        engine.add(f"r{i}", prompt(num_prompt_tokens, first=i), greedy(30)) for i in range(8)
    ]
    finish_all(engine)
    assert max(len(members_of(output)) for output in engine.outputs) == 8
    assert_right(engine, *requests)
