"""A step's arrays: padding, order, addresses, and that nothing is shared with the scheduler."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from scheduler import Batch, SchedulerOutput, make_batch
from tests.fakes import FakeEngine
from tests.scheduling import (
    assert_right,
    checked_step,
    finish_all,
    greedy,
    make_config,
    make_engine,
    members_of,
    prompt,
    step_until,
)

MAX_NUM_SEQS, MAX_NUM_CHUNKS, BLOCK_SIZE, TABLE_WIDTH = 6, 3, 4, 8
PAD_ROW = MAX_NUM_SEQS


def lay_out(
    engine: FakeEngine, output: SchedulerOutput, *, d: int, c: int, r: int = MAX_NUM_SEQS
) -> Batch:
    return make_batch(
        output,
        engine.scheduler.rows,
        block_size=engine.config.block_size,
        num_decode_rows=d,
        num_chunk_rows=engine.config.max_num_chunks,
        num_chunk_tokens=c,
        num_sample_rows=r,
    )


def leaves(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in zip(batch._fields, batch, strict=True):
        if isinstance(value, tuple):
            for inner, leaf in zip(value._fields, value, strict=True):
                yield f"{name}.{inner}", leaf
        else:
            yield name, value


def mixed_step(**fields) -> tuple[FakeEngine, SchedulerOutput]:
    """Two decodes, at positions 5 and 2, then chunks of six and three tokens."""
    chosen = {
        "num_usable": 40,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_chunks": MAX_NUM_CHUNKS,
        "max_model_len": TABLE_WIDTH * BLOCK_SIZE,
    }
    engine = make_engine(make_config(**(chosen | fields)))
    engine.add("d0", prompt(5, first=50), greedy(9))
    engine.add("d1", prompt(2, first=60), greedy(9, temperature=0.5, top_k=7), seed=2**40 + 3)
    checked_step(engine)
    engine.add("c0", prompt(6, first=70), greedy(9, top_p=0.5, temperature=1.0), seed=9)
    engine.add("c1", prompt(3, first=80), greedy(9, min_p=0.25, temperature=2.0, top_k=-1))
    return engine, engine.scheduler.schedule()


def test_shapes_and_types():
    engine, output = mixed_step()
    batch = lay_out(engine, output, d=4, c=16, r=5)
    tokens, rows = 4 + 16, 4 + MAX_NUM_CHUNKS
    shapes = {name: (leaf.dtype.name, leaf.shape) for name, leaf in leaves(batch)}
    assert all(type(leaf) is np.ndarray for _, leaf in leaves(batch))
    expected = {
        "token_ids": ("int32", (tokens,)),
        "from_device": ("bool", (tokens,)),
        "positions": ("int32", (tokens,)),
        "rows": ("int32", (rows,)),
        "logits_indices": ("int32", (MAX_NUM_SEQS,)),
        "sample_rows": ("int32", (5,)),
        "attn.slot_mapping": ("int32", (1, tokens)),
        "attn.block_tables": ("int32", (1, rows, TABLE_WIDTH)),
        "attn.seq_lens": ("int32", (rows,)),
        "attn.query_start_loc": ("int32", (rows + 1,)),
        "attn.num_decodes": ("int32", ()),
        "attn.num_seqs": ("int32", ()),
        "sampling.temperature": ("float32", (5,)),
        "sampling.top_k": ("int32", (5,)),
        "sampling.top_p": ("float32", (5,)),
        "sampling.min_p": ("float32", (5,)),
        "sampling.seeds": ("uint32", (5, 2)),
        "sampling.positions": ("int32", (5,)),
    }
    assert shapes.items() >= expected.items()


@pytest.mark.parametrize(("d", "c"), [(2, 9), (3, 9), (2, 12), (6, 32)])
def test_decodes_come_first_then_chunks_then_padding(d, c):
    engine, output = mixed_step()
    assert [s.num_tokens for s in output.chunks] == [6, 3]
    batch = lay_out(engine, output, d=d, c=c)
    last = [engine.tokens["d0", 0][-1], engine.tokens["d1", 0][-1]]
    chunks = [*prompt(6, first=70), *prompt(3, first=80)]
    pad = [0] * (d - 2)
    assert batch.token_ids.tolist() == [*last, *pad, *chunks, *[0] * (c - 9)]
    assert batch.positions.tolist() == [5, 2, *pad, *range(6), *range(3), *[0] * (c - 9)]
    assert not batch.from_device.any()
    assert batch.rows.tolist() == [0, 1, *[PAD_ROW] * (d - 2), 2, 3, PAD_ROW]
    assert batch.attn.seq_lens.tolist() == [6, 3, *pad, 6, 3, 0]
    assert batch.attn.query_start_loc.tolist() == [*range(d + 1), d + 6, d + 9, d + 9]
    assert batch.attn.num_decodes == 2
    assert batch.attn.num_seqs == 4


def test_padding_points_at_the_null_block():
    engine, output = mixed_step()
    batch = lay_out(engine, output, d=5, c=20)
    slots = batch.attn.slot_mapping[0]
    real = np.r_[0:2, 5:14]
    assert (slots[real] >= BLOCK_SIZE).all()
    assert not np.delete(slots, real).any()
    tables = batch.attn.block_tables[0]
    assert (tables[[0, 1, 5, 6], 0] > 0).all()
    assert not tables[[2, 3, 4, 7]].any()
    blocks = {s.sequence: s.sequence.blocks[0] for s in (*output.decodes, *output.chunks)}
    for row, held in zip([0, 1, 5, 6], blocks.values(), strict=True):
        assert tables[row].tolist() == held + [0] * (TABLE_WIDTH - len(held))


def test_slots_are_the_blocks_of_the_positions():
    engine, output = mixed_step()
    batch = lay_out(engine, output, d=2, c=9)
    scheduled = (*output.decodes, *output.chunks)
    expected = [
        s.sequence.blocks[0][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for s in scheduled
        for position in range(s.start, s.start + s.num_tokens)
    ]
    assert batch.attn.slot_mapping[0].tolist() == expected
    assert len(set(expected)) == len(expected)


def test_sampled_rows_and_their_parameters():
    engine, output = mixed_step()
    batch = lay_out(engine, output, d=4, c=16, r=6)
    assert batch.sample_rows.tolist() == [0, 1, 2, 3, PAD_ROW, PAD_ROW]
    assert batch.logits_indices.tolist() == [0, 1, 4 + 5, 4 + 8, 0, 0]
    sampling = batch.sampling
    assert sampling.temperature.tolist() == [0.0, 0.5, 1.0, 2.0, 0.0, 0.0]
    assert sampling.top_k.tolist() == [0, 7, 0, 0, 0, 0]
    assert sampling.top_p.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]
    assert sampling.min_p.tolist() == [0.0, 0.0, 0.0, 0.25, 0.0, 0.0]
    assert sampling.positions.tolist() == [6, 3, 6, 3, 0, 0]
    assert sampling.seeds.tolist() == [[0, 0], [3, 2**8], [9, 0], [0, 0], [0, 0], [0, 0]]


def test_samples_of_one_prompt_read_the_same_logits():
    config = make_config(num_usable=40, max_num_seqs=MAX_NUM_SEQS, max_model_len=32)
    engine = make_engine(config)
    engine.add("decode", prompt(3, first=50), greedy(9))
    checked_step(engine)
    engine.add("samples", prompt(7), greedy(9, n=4, temperature=1.0), seed=5)
    output = engine.scheduler.schedule()
    batch = lay_out(engine, output, d=2, c=8)
    assert batch.logits_indices.tolist() == [0, *[2 + 6] * 4, 0]
    assert batch.sample_rows.tolist() == [0, 1, 2, 3, 4, PAD_ROW]
    assert batch.sampling.positions.tolist() == [4, 7, 7, 7, 7, 0]
    seeds = batch.sampling.seeds[1:5]
    assert seeds[0].tolist() == [5, 0]
    assert len({tuple(seed) for seed in seeds.tolist()}) == 4


def test_a_chunk_that_is_not_the_last_samples_nothing():
    config = make_config(num_usable=40, max_num_batched_tokens=8, max_model_len=32)
    engine = make_engine(config)
    engine.add("long", prompt(20), greedy(2))
    for start, num_sampled in ((0, 0), (8, 0), (16, 1)):
        output = engine.step()
        batch = lay_out(engine, output, d=1, c=8, r=4)
        assert batch.positions[1:5].tolist() == [*range(start, start + 4)]
        assert batch.attn.seq_lens.tolist()[1] == min(start + 8, 20)
        assert batch.sample_rows.tolist() == [0] * num_sampled + [4] * (4 - num_sampled)
        assert not batch.logits_indices[num_sampled:].any()


def test_without_chunks_there_are_no_rows_for_them():
    engine = make_engine(make_config(num_usable=40, max_num_seqs=MAX_NUM_SEQS))
    engine.add("r", prompt(3), greedy(4))
    checked_step(engine)
    batch = lay_out(engine, engine.scheduler.schedule(), d=4, c=0)
    assert batch.token_ids.shape == batch.rows.shape == batch.attn.seq_lens.shape == (4,)
    assert batch.attn.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert batch.attn.num_decodes == batch.attn.num_seqs == 1


def test_without_decodes_chunks_start_at_once():
    engine = make_engine(make_config(num_usable=40, max_num_chunks=2))
    engine.add("r", prompt(3), greedy(4))
    batch = lay_out(engine, engine.scheduler.schedule(), d=0, c=4)
    assert batch.token_ids.tolist() == [*prompt(3), 0]
    assert batch.attn.query_start_loc.tolist() == [0, 3, 3]
    assert batch.attn.num_decodes == 0
    assert batch.logits_indices.tolist() == [2, 0, 0, 0]


def test_a_token_that_only_the_device_knows_is_taken_from_its_row():
    engine = make_engine(make_config(num_usable=40, max_num_seqs=MAX_NUM_SEQS))
    first = engine.add("known", prompt(3, first=1), greedy(9))
    checked_step(engine)
    engine.add("new", prompt(2, first=2), greedy(9))
    ahead = engine.scheduler.schedule()
    batch = lay_out(engine, ahead, d=2, c=4)
    assert not batch.from_device.any(), "the host knows all tokens of this step"
    next_output = engine.scheduler.schedule()
    batch = lay_out(engine, next_output, d=4, c=0)
    assert batch.from_device.tolist() == [True, True, False, False]
    assert batch.token_ids.tolist() == [0, 0, 0, 0]
    assert batch.positions.tolist() == [4, 2, 0, 0]
    assert batch.rows.tolist() == [0, 1, PAD_ROW, PAD_ROW]
    engine.scheduler.update(ahead, [11, 12])
    last = engine.scheduler.schedule()
    batch = lay_out(engine, last, d=4, c=0)
    assert batch.from_device.tolist() == [True, True, False, False]
    assert first.sequences[0].token_ids[-1] == 11


def test_known_and_unknown_tokens_stand_side_by_side():
    config = make_config(num_usable=40, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=9)
    engine = make_engine(config)
    engine.add("decoding", prompt(3, first=1), greedy(9))
    engine.add("prefilling", prompt(7, first=2), greedy(9))
    output = engine.scheduler.schedule()
    assert [s.num_tokens for s in output.chunks] == [3, 6]
    ahead = engine.scheduler.schedule()
    batch = lay_out(engine, ahead, d=3, c=0)
    assert batch.from_device.tolist() == [True, False, False]
    assert batch.token_ids.tolist() == [0, prompt(7)[6], 0]
    assert batch.positions.tolist() == [3, 6, 0]


@pytest.mark.parametrize(("d", "c", "r"), [(4, 16, 6), (2, 9, 4)])
def test_nothing_is_shared_with_the_scheduler(d, c, r):
    engine, output = mixed_step()
    batch = lay_out(engine, output, d=d, c=c, r=r)
    rows = engine.scheduler.rows
    owned = [value for value in vars(rows).values() if isinstance(value, np.ndarray)]
    assert any(array is rows.tables for array in owned)
    assert len(owned) >= 6
    for (name, leaf), array in itertools.product(leaves(batch), owned):
        assert not np.shares_memory(leaf, array), f"{name} is the scheduler's own"
    for (name, leaf), (other_name, other) in itertools.combinations(leaves(batch), 2):
        assert not np.shares_memory(leaf, other), f"{name} is {other_name}"


def test_a_batch_stays_as_it_was_while_the_scheduler_goes_on():
    config = make_config(num_usable=12, max_num_batched_tokens=16, windows=(None,))
    engine = make_engine(config)
    batches = []

    def keep():
        output = engine.outputs[-1]
        batch = lay_out(engine, output, d=4, c=16 if output.chunks else 0, r=4)
        batches.append((batch, {name: leaf.copy() for name, leaf in leaves(batch)}))

    engine.runner.before_update = keep
    requests = [engine.add(f"r{i}", prompt(7 + i, first=i), greedy(20)) for i in range(6)]
    finish_all(engine)
    assert engine.scheduler.num_preemptions > 0
    assert len(batches) > 40
    for batch, before in batches:
        for name, leaf in leaves(batch):
            np.testing.assert_array_equal(leaf, before[name], err_msg=name)
    assert_right(engine, *requests)


def test_each_group_has_its_own_table():
    config = make_config(num_usable=0, num_blocks=(40, 30), windows=(None, 6), max_model_len=32)
    engine = make_engine(config)
    engine.scheduler.pools[1].allocate()  # the same block ids in both would hide a mistake
    requests = [engine.add(f"r{i}", prompt(5 + i, first=i), greedy(4)) for i in range(3)]
    engine.step()
    batch = lay_out(engine, engine.scheduler.schedule(), d=4, c=0)
    for row, request in enumerate(requests):
        by_group = request.sequences[0].blocks
        assert all(a != b for a, b in zip(*by_group, strict=True))
        for group, blocks in enumerate(by_group):
            table = batch.attn.block_tables[group, row].tolist()
            assert table == blocks + [0] * (TABLE_WIDTH - len(blocks))
            slot = blocks[1] * BLOCK_SIZE + 1 + row
            assert batch.attn.slot_mapping[group, row] == slot


def test_a_block_that_slid_out_of_a_window_is_null_in_the_table():
    config = make_config(num_usable=0, num_blocks=(40, 30), windows=(None, 3), max_model_len=32)
    engine = make_engine(config)
    request = engine.add("r", prompt(10), greedy(8))
    step_until(engine, lambda: request.sequences[0].num_computed_tokens == 13)
    full, window = request.sequences[0].blocks
    assert 0 not in full
    assert window[:2] == [0, 0], "the query at position 12 sees positions 10 to 12"
    assert 0 not in window[2:]
    batch = lay_out(engine, engine.scheduler.schedule(), d=1, c=0)
    assert batch.attn.block_tables[:, 0, :4].tolist() == [full, window]


@pytest.mark.parametrize("num_requests", [2, 3, 4, 5])
def test_a84_every_mix_of_lengths_reads_its_own_blocks(num_requests):
    """Ragged prompts in every order, each on its own block boundary."""
    lengths = (1, 3, 4, 5, 8, 9)
    orders = list(itertools.permutations(lengths, num_requests))
    config = make_config(num_usable=40, max_num_seqs=5, max_num_batched_tokens=40)
    engine = make_engine(config)
    for at, order in enumerate(orders[:: max(1, len(orders) // 60)]):
        requests = [
            engine.add(f"{at}-{i}", prompt(n, first=1000 * at + i), greedy(3))
            for i, n in enumerate(order)
        ]
        output = checked_step(engine)
        assert list(members_of(output).values()) == sorted(order, key=lambda n: n > 1)
        first_blocks = [r.sequences[0].blocks[0][0] for r in requests]
        assert len(set(first_blocks)) == num_requests
        finish_all(engine)
        assert_right(engine, *requests)


def test_a_freed_row_leaves_nothing_to_its_next_sequence():
    config = make_config(num_usable=40, max_num_seqs=1, max_model_len=32)
    engine = make_engine(config)
    first = engine.add(
        "first", prompt(20), greedy(3, temperature=0.7, top_k=5, top_p=0.5, min_p=0.1), seed=2**33
    )
    finish_all(engine)
    second = engine.add("second", prompt(3, first=2), greedy(3))
    step_until(engine, lambda: second.sequences[0].row == 0)
    output = engine.scheduler.schedule()
    batch = lay_out(engine, output, d=1, c=0, r=1)
    assert np.count_nonzero(batch.attn.block_tables) == 1
    sampling = batch.sampling
    assert (sampling.temperature[0], sampling.top_k[0]) == (0.0, 0)
    assert (sampling.top_p[0], sampling.min_p[0]) == (1.0, 0.0)
    assert sampling.seeds.tolist() == [[0, 0]]
    assert_right(engine, first)
