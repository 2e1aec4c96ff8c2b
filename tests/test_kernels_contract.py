"""What every attention back end owes, against attention in float64."""

import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import get_backend, paged_attention, read_blocks, write_kv
from tests.kernel_steps import (
    PORTABLE,
    Attn,
    Rows,
    Sequence,
    Shape,
    Step,
    filled_pool,
    make_step,
    random_sequences,
    rounded,
    run_step,
)
from tests.oracles import paged_attention_float64

BACKENDS = PORTABLE
NAN, INF = float("nan"), float("inf")

# Lengths on both sides of a block (16), of a tile of keys (128) and of a tile of queries (64).
BATCHES = {
    "decode": Rows(decodes=(1, 16, 17, 130, 300)),
    "prefill": Rows(chunks=((65, 65), (64, 64), (21, 21))),
    "chunked": Rows(chunks=((1, 129), (100, 257), (49, 300))),
    "mixed": Rows(decodes=(15, 128, 129), chunks=((63, 63), (66, 200))),
    "one": Rows(decodes=(300,)),
    "many": Rows(decodes=(0, 65, 0, 0, 129, 1, 300, *(0, 64, 2, 0) * 3, 17, 128)),
    "empty": Rows(),
}
EVERYTHING = {
    "scale": 0.3,
    "window": 20,
    "softcap": 5.0,
    "sinks": np.linspace(-2, 3, 4, dtype=np.float32),
    "k_scale": np.array([0.5, 2.0], np.float32),
    "v_scale": np.array([3.0, 0.25], np.float32),
}
CONFIGS = {
    "plain": (Shape(), {}),
    "window_1": (Shape(head_size=80, num_heads=2), {"window": 1}),
    "window_8": (Shape(num_heads=3, num_kv_heads=1), {"window": 8}),
    "softcap_and_scales": (
        Shape(head_size=96),
        {"softcap": 2.0, "k_scale": np.array([0.2, 3], np.float32), "v_scale": 0.5},
    ),
    "sinks": (
        Shape(head_size=128, num_heads=6),
        {"sinks": np.array([-np.inf, -9, 0, 1, 3, 80], np.float32)},
    ),
    "everything": (Shape(), EVERYTHING),
    "head_size_256": (Shape(head_size=256, num_heads=2), {"scale": 0.05}),
    "bfloat16": (Shape(dtype="bfloat16", num_heads=9, num_kv_heads=3), {"window": 40}),
    "bfloat16_pool": (Shape(dtype="bfloat16", pool_dtype="bfloat16"), EVERYTHING),
    "decodes_in_many_rows": (
        Shape(decode_rows=24, chunk_rows=0, chunk_tokens=0),
        {"window": 70, "sinks": np.array([-1, 0, 1, 2], np.float32)},
    ),
    "only_decodes_in_blocks_of_1": (
        Shape(chunk_rows=0, chunk_tokens=0, block_size=1, num_blocks=1024, table_width=300),
        {"window": 33},
    ),
    "only_prefills_in_blocks_of_256": (
        Shape(
            decode_rows=0,
            block_size=256,
            num_blocks=16,
            table_width=2,
            dtype="float16",
            pool_dtype="float16",
        ),
        {},
    ),
}
SHORT = Shape(
    decode_rows=0, chunk_rows=5, chunk_tokens=80, table_width=4, num_blocks=24, block_size=4
)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """2e-5 for float32, 1.5e-2 of the norm for shorter types."""
    assert actual.shape == expected.shape
    if actual.dtype == np.float32:
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    else:
        error = np.linalg.norm(actual.astype(np.float64) - expected)
        assert error <= 1.5e-2 * np.linalg.norm(expected)


def expected_output(shape: Shape, step: Step, **scoring) -> np.ndarray:
    """Float64 attention over what the pool holds for the real tokens, 0 for the others."""
    for name in ("k_scale", "v_scale"):
        if name in scoring:
            scoring[name] = np.broadcast_to(scoring[name], shape.num_kv_heads)
    out = np.zeros((shape.num_tokens, shape.num_heads, shape.head_size))
    for tokens, (q, *kv) in step.sequences:
        keys, values = (rounded(x, shape.pool_dtype) for x in kv)
        out[tokens] = paged_attention_float64(q, keys, values, **scoring)
    return out


def fits(shape: Shape, rows: Rows) -> bool:
    return len(rows.decodes) <= shape.decode_rows and len(rows.chunks) <= shape.chunk_rows


@pytest.mark.parametrize(
    ("config", "batch"),
    [
        (config, batch)
        for (config, (shape, _)), (batch, rows) in itertools.product(
            CONFIGS.items(), BATCHES.items()
        )
        if fits(shape, rows)
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_that_of_float64(backend, config, batch):
    shape, scoring = CONFIGS[config]
    step = make_step(shape, BATCHES[batch])
    out = run_step(backend, shape, step, **scoring).out
    assert out.dtype == jnp.dtype(shape.dtype)
    expected = expected_output(shape, step, **scoring)
    assert_close(out, expected)
    assert (out[np.all(expected == 0, axis=(1, 2))] == 0).all()  # padding: exactly


@st.composite
def some_rows(draw) -> Rows:
    length = st.integers(1, 300)
    decodes = draw(st.lists(length, max_size=5))
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        room = 150 - sum(query_len for query_len, _ in chunks)
        if room:
            seq_len = draw(length)
            chunks.append((draw(st.integers(1, min(room, seq_len))), seq_len))
    return Rows(tuple(decodes), tuple(chunks))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25)
@given(rows=some_rows(), seed=st.integers(0, 2**31))
def test_any_batch_is_that_of_float64(backend, rows, seed):
    shape = Shape()
    step = make_step(shape, rows, seed=seed)
    out = run_step(backend, shape, step, **EVERYTHING).out
    assert_close(out, expected_output(shape, step, **EVERYTHING))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a11_writing_replaces_what_was_in_the_slot(backend):
    shape = Shape()
    step = make_step(shape, BATCHES["mixed"])
    used = np.setdiff1d(step.attn.block_tables[0], [0])
    full = used[[(step.past_slots // 16 == block).sum() == 16 for block in used]]
    assert len(full) > 10
    fresh = run_step(backend, shape, step, fill=0.0)
    reused = run_step(backend, shape, step, fill=1e4)
    np.testing.assert_array_equal(fresh.out, reused.out)
    assert_close(reused.out, expected_output(shape, step))
    ids = jnp.asarray(full)
    for a, b in zip(
        read_blocks(fresh.pool, ids),
        read_blocks(reused.pool, ids),
        strict=True,
    ):
        np.testing.assert_array_equal(a[:, 1], b[:, 1])  # the layer written
        assert (a[:, 0] == 0).all() and (b[:, 0] == 1e4).all()  # the other one


def check_slots_outside_the_pool(backend: str, shape: Shape) -> None:
    n, b = shape.num_blocks, shape.block_size
    bad = [n * b, (n + 5) * b + 1, -1, -b, -n * b, -3 * n * b, 2**31 - 1, -(2**31)]
    slots = np.array([bad], np.int32)
    attn = Attn(slots, np.zeros((1, 1, 1)), np.zeros(1), np.zeros(2), np.int32(0), np.int32(0))
    attn = attn._replace(**{f: np.int32(getattr(attn, f)) for f in attn._fields})
    pool = filled_pool(backend, shape.spec, 7.0)
    new = jnp.ones((len(bad), shape.num_kv_heads, shape.head_size))

    @jax.jit
    def write(slots, layer):
        metadata = attn._replace(slot_mapping=slots)
        written = write_kv(pool, new, new, metadata, layer=layer, backend=get_backend(backend))
        return sum(jnp.sum(array == 1.0) for array in written.arrays)

    for layer in range(3):
        assert write(slots, layer) == 0
    good = np.full_like(slots, (n - 1) * b)  # the last block: written when it is meant
    assert write(good, 2) == 2 * shape.num_kv_heads * shape.head_size
    for layer in (-1, 3, 2**31 - 1, -(2**31)):
        assert write(good, layer) == 0
    with pytest.raises(ValueError, match="layer 3 is outside the pool's 3 layers"):
        write_kv(pool, new, new, attn, layer=3, backend=get_backend(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a82_a_slot_outside_the_pool_is_dropped(backend):
    shape = Shape(num_blocks=6, block_size=4, num_layers=3, head_size=8)
    check_slots_outside_the_pool(backend, shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad_id", [0, 128, 133, -1, -128, 2**31 - 1, -(2**31)])
def test_a82_the_null_block_and_blocks_outside_the_pool_are_not_read(backend, bad_id):
    """Not even as a block of the next layer: its 16 keys are missing from the softmax."""
    shape = Shape()
    step = make_step(shape, Rows(decodes=(48,)))
    tables = step.attn.block_tables.copy()
    tables[0, 0, 1] = bad_id
    broken = step._replace(attn=step.attn._replace(block_tables=tables))
    tokens, (q, keys, values) = step.sequences[0]
    rest = np.r_[0:16, 32:48]
    expected = paged_attention_float64(q, keys[rest], values[rest])
    for layer in (0, 1):
        out = run_step(backend, shape, broken, layer=layer, fill=1.0).out
        assert_close(out[tokens], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_longer_than_its_table_sees_what_the_table_has(backend):
    shape = Shape(chunk_rows=0, chunk_tokens=0, table_width=9)  # 144 slots, not whole tiles
    step = make_step(shape, Rows(decodes=(144,)))
    longer = step._replace(attn=step.attn._replace(seq_lens=step.attn.seq_lens + 6))
    out = run_step(backend, shape, longer).out
    assert_close(out, expected_output(shape, step))


def check_ragged_lengths(backend: str, counts: Iterable[int], shape: Shape = SHORT) -> None:
    lengths = (1, 3, 4, 5, 8, 9)
    for count in counts:
        for seed, order in enumerate(itertools.permutations(lengths, count)):
            chunks = tuple((length, length) for length in order)
            step = make_step(shape, Rows(chunks=chunks), seed=seed)
            out = run_step(backend, shape, step).out
            assert_close(out, expected_output(shape, step))


@pytest.mark.parametrize("counts", [(2, 3), pytest.param((4, 5), marks=pytest.mark.sweep)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a84_ragged_lengths_in_all_orders(backend, counts):
    check_ragged_lengths(backend, counts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a85_rows_without_keys_give_zero_and_change_nothing(backend):
    shape = Shape()
    rows = Rows(decodes=(17, 300), chunks=((30, 30),))
    plain = make_step(shape, rows)
    out = run_step(backend, shape, plain).out
    padding = np.ones(shape.num_tokens, bool)
    for tokens, _ in plain.sequences:
        padding[tokens] = False
    assert padding.sum() == 123
    for unused_id, garbage in ((5, 0.0), (128, INF), (-1, 1e30)):
        tables = plain.attn.block_tables.copy()
        tables[0, [2, 3, 4, 6, 7]] = unused_id
        q = plain.q.copy()
        q[padding] = garbage
        step = plain._replace(q=q, attn=plain.attn._replace(block_tables=tables))
        other = run_step(backend, shape, step).out
        assert (other[padding] == 0).all()
        np.testing.assert_array_equal(other, out)


@pytest.mark.parametrize("decodes", [(300, 17, 130), (17, 65, 300)])
@pytest.mark.parametrize("config", ["plain", "everything", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a90_a_row_does_not_feel_its_neighbours(backend, config, decodes):
    """The same bits alone and in company, at another place and over other blocks."""
    shape, scoring = CONFIGS[config]
    chunks = ((66, 200), (40, 40))
    company = random_sequences(shape, Rows(decodes, chunks))
    step = make_step(shape, Rows(decodes, chunks), company)
    together = run_step(backend, shape, step, **scoring).out
    for i, (tokens, sequence) in enumerate(step.sequences):
        rows = Rows((decodes[i],)) if i < 3 else Rows((), (chunks[i - 3],))
        alone = make_step(shape, rows, [sequence], seed=i + 1)
        out = run_step(backend, shape, alone, **scoring).out
        np.testing.assert_array_equal(out[alone.sequences[0][0]], together[tokens])


def check_nan_spoils_no_other(backend: str, shape: Shape, rows: Rows) -> None:
    """Each row in turn has values that are not numbers: the others have the same bits."""
    whole = random_sequences(shape, rows)
    step = make_step(shape, rows, whole)
    expected = run_step(backend, shape, step).out
    for spoilt in range(len(whole)):
        sequences = list(whole)
        sequences[spoilt] = whole[spoilt]._replace(values=np.full_like(whole[spoilt].values, NAN))
        out = run_step(backend, shape, make_step(shape, rows, sequences)).out
        for i, (tokens, _) in enumerate(step.sequences):
            if i == spoilt:
                assert np.isnan(out[tokens].astype(np.float32)).all()
            else:
                np.testing.assert_array_equal(out[tokens], expected[tokens])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_nan_spoils_no_other(backend):
    rows = Rows(decodes=(17, 130, 300), chunks=((66, 66), (40, 90)))
    check_nan_spoils_no_other(backend, Shape(), rows)


@pytest.mark.parametrize("config", ["plain", "everything", "bfloat16_pool"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a86_unused_slots_never_matter(backend, config):
    shape, scoring = CONFIGS[config]
    for rows in (BATCHES["mixed"], BATCHES["chunked"]):
        # Unused columns of the tables point at a block full of poison, or outside the pool.
        steps = [make_step(shape, rows, unused_id=i) for i in (0, shape.num_blocks - 1, -1)]
        outs = [
            run_step(backend, shape, step, fill=fill, **scoring).out
            for step in steps
            for fill in (NAN, INF, -INF, 0.0)
        ]
        assert np.isfinite(outs[0].astype(np.float32)).all()
        for out in outs[1:]:
            np.testing.assert_array_equal(out, outs[0])


def check_softcap_of_huge_scores(backend: str, shape: Shape) -> None:
    raw = np.array([1, -1, 100, -100, 4400, -4400, 1e4, -1e4], np.float32)
    rows = Rows(chunks=((1, 8), (1, 2), (8, 8)))
    sequences = []
    for sequence in random_sequences(shape, rows):
        q, keys, values = (np.zeros_like(array) for array in sequence)
        q[..., 0] = 1
        keys[:, 0, 0] = raw[: len(keys)]
        weights = np.eye(8, shape.head_size)  # as values, so that the output is the weights
        values[:, 0] = weights[: len(values)]
        sequences.append(Sequence(q, keys, values))
    step = make_step(shape, rows, sequences)
    options = {"softcap": 50.0, "scale": 1.0}
    out = run_step(backend, shape, step, **options).out
    assert np.isfinite(out.astype(np.float32)).all()
    assert_close(out, expected_output(shape, step, **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a87_softcap_of_huge_scores(backend, dtype):
    shape = Shape(decode_rows=0, head_size=8, num_heads=1, num_kv_heads=1, dtype=dtype)
    check_softcap_of_huge_scores(backend, shape)


def check_window(backend: str, rows: Rows, shape: Shape) -> None:
    window = 8
    (sequence,) = random_sequences(shape, rows)

    def last_output(distance: int | None) -> np.ndarray:
        values = sequence.values.copy()
        if distance is not None:
            values[23 - distance] += 1
        step = make_step(shape, rows, [sequence._replace(values=values)])
        out = run_step(backend, shape, step, window=window).out
        return out[step.sequences[0][0][-1]]

    assert (last_output(0) != last_output(None)).any()
    assert (last_output(window - 1) != last_output(None)).any()
    np.testing.assert_array_equal(last_output(window), last_output(None))


@pytest.mark.parametrize(
    "rows",
    [Rows(decodes=(24,)), Rows(chunks=((24, 24),)), Rows(chunks=((5, 24),))],
    ids=["decode", "prefill", "chunk"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a88_a_window_is_the_query_and_the_keys_just_before(backend, rows):
    check_window(backend, rows, CONFIGS["window_8"][0])


def check_lengths(backend: str, longest: int = 16, shape: Shape = SHORT) -> None:
    pairs = [(q_len, kv_len) for kv_len in range(1, longest + 1) for q_len in range(1, kv_len + 1)]
    for start in range(0, len(pairs), shape.chunk_rows):
        step = make_step(shape, Rows(chunks=tuple(pairs[start : start + shape.chunk_rows])))
        assert_close(run_step(backend, shape, step).out, expected_output(shape, step))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a89_every_query_length_of_every_key_length(backend):
    check_lengths(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_metadata_may_be_numpy_of_many_groups_and_jit_is_not_needed(backend):
    shape, value = Shape(chunk_rows=0, chunk_tokens=0), get_backend(backend)
    steps = [make_step(shape, Rows(decodes=(9, 130)), seed=seed) for seed in (1, 2)]
    both = steps[0].attn._replace(
        slot_mapping=np.concatenate([step.attn.slot_mapping for step in steps]),
        block_tables=np.concatenate([step.attn.block_tables for step in steps]),
    )
    for group, step in enumerate(steps):
        q, k, v = map(jnp.asarray, (step.q, step.k, step.v))
        pool = run_step(backend, shape, step).pool
        last = write_kv(pool, 2 * k, -v, both, layer=1, group=group, backend=value)
        out = paged_attention(q, last, both, layer=1, group=group, decode_rows=5, backend=value)
        for tokens, sequence in step.sequences:
            sequence.keys[-1] *= 2
            sequence.values[-1] *= -1
            expected = paged_attention_float64(*sequence)
            assert_close(np.asarray(out)[tokens], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_64_bit_mode_changes_nothing(backend):
    shape = Shape()
    step = make_step(shape, BATCHES["mixed"])
    with jax.enable_x64(True):
        out = run_step(backend, shape, step, **EVERYTHING).out
    assert out.dtype == np.float32
    assert_close(out, expected_output(shape, step, **EVERYTHING))
