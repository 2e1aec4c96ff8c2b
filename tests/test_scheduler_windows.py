"""Sliding windows with no more blocks than they need, and fewer."""

import pytest

from paged_jax.kv_cache import group_num_blocks
from scheduler import RequestError
from tests.scheduling import assert_right, finish_all, greedy, make_config, make_engine, prompt

both_lags = pytest.mark.parametrize("lag", [0, 1])


class Group:
    def __init__(self, window):
        self.window = window


def windowed(num_blocks, **fields):
    """Block counts as the engine chooses them for a full group and a window of four tokens."""
    counts = group_num_blocks(
        [Group(None), Group(4)],
        num_blocks,
        block_size=4,
        max_num_seqs=fields["max_num_seqs"],
        max_num_batched_tokens=fields["max_num_batched_tokens"],
    )
    return make_config(num_usable=0, num_blocks=counts, windows=(None, 4), **fields)


@both_lags
def test_a_prompt_of_many_chunks_runs_in_a_window_groups_few_blocks(lag):
    engine = make_engine(windowed(65, max_num_seqs=1, max_num_batched_tokens=32), lag=lag)
    request = engine.add("r", prompt(100), greedy(4))
    finish_all(engine, max_steps=200)
    assert_right(engine, request)


@both_lags
def test_a_preempted_sequence_comes_back_to_a_window_groups_few_blocks(lag):
    engine = make_engine(windowed(40, max_num_seqs=2, max_num_batched_tokens=8), lag=lag)
    requests = [engine.add(f"r{i}", prompt(40, first=i), greedy(60)) for i in range(2)]
    finish_all(engine, max_steps=600)
    assert engine.scheduler.num_preemptions > 0
    assert_right(engine, *requests)


@both_lags
def test_reserved_blocks_of_a_window_group(lag):
    engine = make_engine(
        windowed(65, max_num_seqs=2, max_num_batched_tokens=32, allocation="reserved"), lag=lag
    )
    request = engine.add("r", prompt(20), greedy(4))
    finish_all(engine, max_steps=200)
    assert_right(engine, request)


@both_lags
def test_a_model_of_windows_only_refuses_or_runs_what_it_accepts(lag):
    """`capacity_tokens` is max_model_len when every group has a window, whatever the pool."""
    config = make_config(num_usable=0, num_blocks=(6,), windows=(16,), max_num_batched_tokens=32)
    engine = make_engine(config, lag=lag)
    try:
        request = engine.add("r", prompt(60), greedy(4))
    except RequestError:
        return
    finish_all(engine, max_steps=300)
    assert_right(engine, request)
