"""Who runs when: long prompts beside short ones, prefixes in common, the token budget."""

import pytest

from scheduler import ORDER_POLICIES, Status
from tests.scheduling import (
    assert_right,
    checked_step,
    finish_all,
    first_step_of,
    greedy,
    make_config,
    make_engine,
    members_of,
    num_computed_for,
    pool_of,
    prompt,
    step_until,
)

both_lags = pytest.mark.parametrize("lag", [0, 1])


# -- long beside short --------------------------------------------------------------------------


@both_lags
@pytest.mark.parametrize("num_long", [1, 2, 5])
def test_long_prompts_never_stop_a_decode(lag, num_long):
    config = make_config(num_usable=400, block_size=16, max_model_len=1024, max_num_seqs=8)
    engine = make_engine(config, lag=lag)
    decoding = [engine.add(f"d{i}", prompt(4, first=i), greedy(100)) for i in range(2)]
    step_until(engine, lambda: len(engine.tokens) == 2)
    long = [engine.add(f"l{i}", prompt(900, first=10 + i), greedy(2)) for i in range(num_long)]
    for _ in range(14 * num_long):
        output = checked_step(engine)
        assert {d.sequences[0] for d in decoding} <= set(members_of(output))
        assert output.num_tokens == 64, "and no token of the budget is left unused"
    finish_all(engine)
    assert_right(engine, *decoding, *long)


@both_lags
def test_short_prompts_behind_a_long_one_start_at_once(lag):
    config = make_config(num_usable=400, block_size=16, max_model_len=4096, max_num_seqs=16)
    engine = make_engine(config, lag=lag)
    long = engine.add("long", prompt(3000), greedy(1))
    for _ in range(3):
        checked_step(engine)
    short = []
    for i in range(12):
        arrival = len(engine.outputs)
        short.append(engine.add(f"s{i}", prompt(8, first=10 + i), greedy(4)))
        before = long.sequences[0].num_computed_tokens
        step_until(engine, lambda i=i: (f"s{i}", 0) in engine.tokens, max_steps=5)
        assert first_step_of(engine, short[-1]) - arrival <= 1
        assert long.sequences[0].num_computed_tokens > before
    assert long.sequences[0].status is Status.RUNNING
    assert ("long", 0) not in engine.tokens
    finish_all(engine)
    assert_right(engine, long, *short)


@both_lags
def test_short_prompts_that_come_at_once_pass_a_long_one(lag):
    config = make_config(num_usable=400, block_size=16, max_model_len=4096, max_num_seqs=16)
    engine = make_engine(config, lag=lag)
    long = engine.add("long", prompt(3000), greedy(1))
    short = [engine.add(f"s{i}", prompt(30, first=10 + i), greedy(2)) for i in range(12)]
    finish_all(engine)
    starts = [first_step_of(engine, request) for request in short]
    assert starts == sorted(starts), "in the order of their arrival"
    # a quarter of 64 tokens each step is theirs: one prompt of 30 tokens in two steps
    assert all(start <= 2 * (i + 1) + 2 for i, start in enumerate(starts))
    assert first_step_of(engine, long) > starts[-1]
    assert_right(engine, long, *short)


@both_lags
def test_a_long_prompt_keeps_most_of_the_budget_while_short_ones_stream_in(lag):
    config = make_config(num_usable=400, block_size=16, max_model_len=4096, max_num_seqs=16)
    engine = make_engine(config, lag=lag)
    long = engine.add("long", prompt(3000), greedy(1))
    short = []
    while ("long", 0) not in engine.tokens:
        short.append(engine.add(f"s{len(short)}", prompt(40, first=10 + len(short)), greedy(1)))
        checked_step(engine)
    assert len(engine.outputs) <= 3000 / 48 + 3
    for request in short:
        engine.abort(request.request_id)
    finish_all(engine)
    assert_right(engine, long)


@both_lags
def test_the_budget_is_used_to_the_last_token(lag):
    config = make_config(num_usable=400, max_num_seqs=8, max_num_batched_tokens=32)
    engine = make_engine(config, lag=lag)
    requests = [engine.add(f"r{i}", prompt(20, first=i), greedy(1)) for i in range(8)]
    finish_all(engine)
    sizes = [output.num_tokens for output in engine.outputs if not output.is_empty]
    assert sizes == [32] * 5
    assert_right(engine, *requests)


@both_lags
@pytest.mark.parametrize("max_num_chunks", [1, 2, 8])
def test_no_step_has_more_chunks_than_allowed(lag, max_num_chunks):
    config = make_config(num_usable=400, max_num_seqs=8, max_num_chunks=max_num_chunks)
    engine = make_engine(config, lag=lag)
    requests = [engine.add(f"r{i}", prompt(5, first=i), greedy(3)) for i in range(8)]
    finish_all(engine)
    num_chunks = [len(output.chunks) for output in engine.outputs]
    assert max(num_chunks) == max_num_chunks
    assert sum(num_chunks) == 8
    assert_right(engine, *requests)


@both_lags
def test_a_request_too_large_for_now_is_not_overtaken_for_ever(lag):
    """The head of the queue waits for blocks; who comes after it waits behind it."""
    engine = make_engine(make_config(num_usable=12), lag=lag)
    holder = engine.add("holder", prompt(20, first=1), greedy(9))
    checked_step(engine)
    large = engine.add("large", prompt(40, first=2), greedy(2))
    small = [engine.add(f"s{i}", prompt(4, first=3 + i), greedy(1)) for i in range(30)]
    finish_all(engine)
    assert first_step_of(engine, large) <= first_step_of(engine, small[0])
    assert_right(engine, holder, large, *small)


@both_lags
def test_the_watermark_keeps_blocks_for_the_running(lag):
    """With a quarter of the pool kept back nobody is thrown out who was just admitted."""
    preemptions = []
    for watermark in (0.0, 0.25):
        engine = make_engine(make_config(num_usable=16, watermark=watermark), lag=lag)
        first = engine.add("first", prompt(40, first=1), greedy(16))
        checked_step(engine)
        second = engine.add("second", prompt(20, first=2), greedy(8))
        finish_all(engine)
        preemptions.append(engine.scheduler.num_preemptions)
        assert_right(engine, first, second)
    without_margin, with_margin = preemptions
    assert without_margin > 0
    assert with_margin == 0


@both_lags
@pytest.mark.parametrize("watermark", [0.0, 0.5, 0.99])
def test_the_watermark_never_keeps_out_the_only_request(lag, watermark):
    engine = make_engine(make_config(num_usable=8, watermark=watermark), lag=lag)
    requests = [engine.add(f"r{i}", prompt(29, first=i), greedy(4)) for i in range(3)]
    finish_all(engine)
    assert_right(engine, *requests)


# -- preemption ---------------------------------------------------------------------------------


@both_lags
def test_the_newest_is_preempted_and_the_oldest_never(lag):
    engine = make_engine(make_config(num_usable=10), lag=lag)
    requests = [engine.add(f"r{i}", prompt(8, first=i), greedy(30)) for i in range(4)]
    finish_all(engine)
    victims = [s.request.request_id for output in engine.outputs for s in output.preempted]
    assert "r0" not in victims
    assert victims[0] == "r3"
    ends = [list(engine.finished).index((f"r{i}", 0)) for i in range(4)]
    assert ends == [0, 1, 2, 3]
    assert_right(engine, *requests)


@both_lags
def test_a_preempted_sequence_uses_what_is_left_of_its_blocks(lag):
    engine = make_engine(make_config(num_usable=14), lag=lag)
    elder = engine.add("elder", prompt(8, first=1), greedy(24))
    younger = engine.add("younger", prompt(28, first=2), greedy(10))
    finish_all(engine)
    assert younger.sequences[0].num_preemptions == 1
    whole = 28 + 9
    computed = num_computed_for(engine, younger)
    assert whole < computed < 2 * whole, "some of it twice, not all of it"
    assert younger.num_cached_tokens == 0, "its own blocks are no hits of the request's"
    assert_right(engine, elder, younger)


@both_lags
def test_no_more_are_preempted_than_needed(lag):
    """The victim's blocks come back with the step in flight: wait for them, take no second one."""
    engine = make_engine(make_config(num_usable=8), lag=lag)
    requests = [engine.add("r0", prompt(7, first=9), greedy(12))]
    requests += [engine.add(f"r{i}", prompt(4, first=i), greedy(4)) for i in range(1, 4)]
    finish_all(engine)
    preempted = [s for output in engine.outputs for s in output.preempted]
    assert preempted == [requests[3].sequences[0]]
    assert_right(engine, *requests)


@both_lags
def test_a_victim_comes_back_only_when_it_can_stay(lag):
    """When the first ends there is room for the victim, but not for it beside a growing elder."""
    engine = make_engine(make_config(num_usable=18), lag=lag)
    requests = [
        engine.add("short", prompt(5, first=1), greedy(20)),
        engine.add("growing", prompt(5, first=2), greedy(40)),
        engine.add("victim", prompt(30, first=3), greedy(20)),
    ]
    finish_all(engine)
    assert [r.sequences[0].num_preemptions for r in requests] == [0, 0, 1]
    assert_right(engine, *requests)


# -- a prefix in common -------------------------------------------------------------------------

NUM_SIBLINGS, PREFIX_LEN = 63, 208


@both_lags
@pytest.mark.parametrize("max_num_batched_tokens", [64, 512])
@pytest.mark.parametrize("elder_tail", [0, 1, 9])
def test_siblings_wait_for_the_first_and_then_hit(lag, max_num_batched_tokens, elder_tail):
    config = make_config(
        num_usable=400,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    engine = make_engine(config, lag=lag)
    prefix = prompt(PREFIX_LEN)
    elder = engine.add("elder", [*prefix, *range(700, 700 + elder_tail)], greedy(2))
    siblings = [
        engine.add(f"s{i}", [*prefix, 1000 + i, 2000 + i], greedy(2)) for i in range(NUM_SIBLINGS)
    ]
    checked_step(engine)
    assert list(members_of(engine.outputs[0])) == elder.sequences, "the others wait"
    assert engine.scheduler.num_waiting == NUM_SIBLINGS
    finish_all(engine)
    computed = num_computed_for(engine, *siblings) - NUM_SIBLINGS * (2 + 1)
    assert 0 <= computed <= 0.05 * NUM_SIBLINGS * PREFIX_LEN
    cached = sum(sibling.num_cached_tokens for sibling in siblings)
    assert cached >= 0.95 * NUM_SIBLINGS * PREFIX_LEN
    assert engine.scheduler.num_hit_tokens == cached
    assert_right(engine, elder, *siblings)


@both_lags
def test_samples_of_a_prompt_compute_it_once(lag):
    config = make_config(num_usable=400, block_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    engine = make_engine(config, lag=lag)
    request = engine.add("r", prompt(PREFIX_LEN + 3), greedy(2, n=64, temperature=1.0))
    finish_all(engine)
    assert num_computed_for(engine, request) == PREFIX_LEN + 3 + 64
    assert_right(engine, request)


@both_lags
def test_who_shares_no_prefix_does_not_wait_behind_those_who_do(lag):
    config = make_config(num_usable=200, block_size=16, max_num_seqs=8)
    engine = make_engine(config, lag=lag)
    prefix = prompt(160)
    elder = engine.add("elder", [*prefix, 1], greedy(2))
    siblings = [engine.add(f"s{i}", [*prefix, 2 + i], greedy(2)) for i in range(3)]
    other = engine.add("other", prompt(10, first=2), greedy(2))
    finish_all(engine)
    assert first_step_of(engine, other) < first_step_of(engine, elder)
    assert all(s.num_cached_tokens == 160 for s in siblings)
    assert_right(engine, elder, other, *siblings)


@both_lags
def test_a_waiting_sibling_goes_on_when_the_first_is_preempted(lag):
    engine = make_engine(make_config(num_usable=20, max_num_batched_tokens=8), lag=lag)
    holder = engine.add("holder", prompt(4, first=2), greedy(60))
    step_until(engine, lambda: pool_of(engine).num_referenced >= 8)
    stem = prompt(60)
    elder = engine.add("elder", [*stem, 1], greedy(2))
    sibling = engine.add("sibling", [*stem, 2], greedy(2))
    step_until(engine, lambda: elder.sequences[0].num_preemptions > 0)
    assert ("elder", 0) not in engine.tokens
    assert sibling.sequences[0].status is Status.WAITING
    finish_all(engine)
    assert_right(engine, holder, elder, sibling)


@both_lags
def test_without_a_prefix_cache_nobody_waits_and_nobody_hits(lag):
    engine = make_engine(make_config(num_usable=64, enable_prefix_caching=False), lag=lag)
    requests = [engine.add(f"r{i}", prompt(12), greedy(3)) for i in range(3)]
    output = checked_step(engine)
    assert len(output.chunks) == 3
    finish_all(engine)
    assert engine.scheduler.num_hit_tokens == engine.scheduler.num_lookup_tokens == 0
    assert pool_of(engine).num_cached == 0
    assert_right(engine, *requests)


@both_lags
def test_forgotten_prefixes_are_computed_again(lag):
    engine = make_engine(make_config(num_usable=64), lag=lag)
    first = engine.add("first", prompt(13), greedy(3))
    finish_all(engine)
    assert pool_of(engine).num_cached == 3
    engine.scheduler.forget_prefixes()
    assert pool_of(engine).num_cached == 0
    second = engine.add("second", prompt(13), greedy(3))
    finish_all(engine)
    third = engine.add("third", prompt(13), greedy(3))
    finish_all(engine)
    assert [r.num_cached_tokens for r in (first, second, third)] == [0, 0, 12]
    assert_right(engine, first, second, third)


@both_lags
@pytest.mark.parametrize("num_long", [1, 2, 3])
@pytest.mark.parametrize("name", ["fcfs", "shortest", "priority"])
def test_a_short_prompt_starts_soon_behind_several_long_ones(lag, num_long, name):
    """Long prompts that have begun may not take every token of a step."""
    config = make_config(num_usable=2000, block_size=16, max_model_len=4096, max_num_seqs=16)
    engine = make_engine(config, lag=lag, order=ORDER_POLICIES[name]())
    for i in range(num_long):
        engine.add(f"l{i}", prompt(3000, first=i), greedy(1), priority=5)
    for _ in range(3):
        checked_step(engine)
    arrival = len(engine.outputs)
    short = engine.add("short", prompt(8, first=99), greedy(1), priority=-5)
    step_until(engine, lambda: ("short", 0) in engine.tokens)
    assert first_step_of(engine, short) - arrival <= 10


@both_lags
def test_who_waits_for_an_elders_blocks_takes_no_tokens_from_it(lag):
    """Nothing is kept back for a sequence that only waits for a prefix hit."""
    num_steps = []
    for num_siblings in (0, 8):
        config = make_config(num_usable=600, block_size=16, max_model_len=4096, max_num_seqs=16)
        engine = make_engine(config, lag=lag)
        elder = engine.add("elder", prompt(2001), greedy(1))
        for i in range(num_siblings):
            engine.add(f"s{i}", [*prompt(2000), i], greedy(1))
        step_until(engine, lambda tokens=engine.tokens: ("elder", 0) in tokens)
        num_steps.append(first_step_of(engine, elder))
    assert num_steps[1] <= num_steps[0] + 1
