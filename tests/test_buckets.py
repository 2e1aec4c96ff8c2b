"""The sizes of step programs: few, rising, and large enough for every step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler import Buckets, make_buckets
from tests.scheduling import assert_right, finish_all, greedy, make_config, make_engine, prompt

GOOD = {"decodes": (1, 4), "chunks": (16, 64), "samples": (1, 4)}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("sizes", [(), (4, 1), (1, 1), (1, 2, 2)])
def test_sizes_must_rise(name, sizes):
    with pytest.raises(ValueError, match=f"{name} must be rising sizes"):
        Buckets(**{**GOOD, name: sizes})


def test_a_step_is_padded_to_the_next_size():
    buckets = Buckets(decodes=(1, 4, 16), chunks=(16, 64), samples=(1, 4, 16))
    assert [buckets.pick(n, 0) for n in (0, 1, 2, 4, 5, 16)] == [
        (1, 0),
        (1, 0),
        (4, 0),
        (4, 0),
        (16, 0),
        (16, 0),
    ]
    assert buckets.pick(0, 1) == (16, 16)
    assert buckets.pick(8, 8) == (16, 16)
    assert buckets.pick(8, 9) == (16, 64)
    assert [buckets.pick_samples(n) for n in (0, 1, 2, 16)] == [1, 1, 4, 16]


@pytest.mark.parametrize(("num_decodes", "num_chunk_tokens"), [(17, 0), (0, 65), (17, 1), (16, 49)])
def test_a_step_larger_than_every_size_has_no_program(num_decodes, num_chunk_tokens):
    buckets = Buckets(decodes=(16,), chunks=(64,), samples=(16,))
    with pytest.raises(IndexError):
        buckets.pick(num_decodes, num_chunk_tokens)


LIMITS = st.tuples(st.integers(1, 600), st.integers(0, 10_000)).map(lambda x: (x[0], sum(x)))


@given(LIMITS)
def test_the_default_sizes_cover_all_steps_and_stay_few(limits):
    max_num_seqs, max_num_batched_tokens = limits
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    assert buckets.decodes[-1] == buckets.samples[-1] == max_num_seqs
    assert buckets.chunks[-1] == max_num_batched_tokens, "the largest chunk is a bucket edge"
    assert buckets.decodes[0] == 1
    programs = list(buckets.backbones())
    assert len(programs) == len(set(programs)) <= 60
    assert programs[0] == (max_num_seqs, max_num_batched_tokens), "the largest first"


@given(LIMITS, st.data())
def test_every_step_within_the_limits_has_a_program_in_the_table(limits, data):
    max_num_seqs, max_num_batched_tokens = limits
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    num_decodes = data.draw(st.integers(0, max_num_seqs))
    num_chunk_tokens = data.draw(st.integers(0, max_num_batched_tokens - num_decodes))
    d, c = buckets.pick(num_decodes, num_chunk_tokens)
    assert (d, c) in set(buckets.backbones())
    assert d >= num_decodes
    assert buckets.num_tokens(num_decodes, num_chunk_tokens) >= num_decodes + num_chunk_tokens
    assert (c == 0) == (num_chunk_tokens == 0)
    assert buckets.pick_samples(num_decodes) >= num_decodes


@given(LIMITS, st.data())
def test_a_step_with_prefill_computes_no_more_than_the_limit(limits, data):
    """Rows that do not decode are not computed beside the chunks."""
    max_num_seqs, max_num_batched_tokens = limits
    buckets = make_buckets(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    num_decodes = data.draw(st.integers(0, min(max_num_seqs, max_num_batched_tokens - 1)))
    num_chunk_tokens = data.draw(st.integers(1, max_num_batched_tokens - num_decodes))
    computed = buckets.num_tokens(num_decodes, num_chunk_tokens)
    assert computed <= max_num_batched_tokens


def test_a_step_with_prefill_is_padded_by_its_decodes_and_chunks_together():
    buckets = make_buckets(max_num_seqs=32, max_num_batched_tokens=256)
    assert buckets.chunks == (16, 64, 96, 128, 160, 192, 224, 256)
    assert [buckets.num_tokens(n, 60) for n in (0, 4, 5, 32)] == [64, 64, 96, 96]
    assert [buckets.num_tokens(n, 0) for n in (1, 3, 17)] == [1, 4, 32]
    larger = make_buckets(max_num_seqs=32, max_num_batched_tokens=1100).chunks
    assert larger[7:] == (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1100)


@pytest.mark.parametrize("largest", [64, 96, 256, 500, 2048])
def test_at_the_top_no_step_is_padded_by_more_than_half(largest):
    """Fourfold steps are for the small sizes only, where padding costs little."""
    buckets = make_buckets(max_num_seqs=largest, max_num_batched_tokens=max(largest, 512))
    for size in range(65, largest + 1):
        assert buckets.pick(size, 0)[0] <= 1.5 * size
    for size in range(65, buckets.chunks[-1] + 1):
        assert buckets.num_tokens(1, size - 1) <= 1.5 * size
    for size in range(129, buckets.chunks[-1] + 1):
        assert buckets.num_tokens(1, size - 1) <= 1.25 * size


def test_a_served_load_stays_within_the_table():
    config = make_config(num_usable=100, max_num_seqs=5, max_num_batched_tokens=40)
    buckets = make_buckets(max_num_seqs=5, max_num_batched_tokens=40)
    engine = make_engine(config, lag=1)
    requests = [
        engine.add(f"r{i}", prompt(1 + 7 * i % 31, first=i), greedy(1 + i % 9)) for i in range(30)
    ]
    finish_all(engine)
    steps = [output for output in engine.outputs if not output.is_empty]
    programs = {buckets.pick(len(o.decodes), o.num_chunk_tokens) for o in steps}
    assert programs <= set(buckets.backbones())
    assert len(programs) > 3
    assert all(buckets.pick_samples(len(o.samples)) >= len(o.samples) for o in steps)
    assert_right(engine, *requests)
