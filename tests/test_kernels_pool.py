"""The pool: its size and indices, blocks moved whole, and a step that never copies it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    KVPool,
    KVSpec,
    copy_blocks,
    get_backend,
    paged_attention,
    read_blocks,
    read_kv,
    write_blocks,
    write_kv,
)
from pallas_kernels.pool import block_in_range
from tests.kernel_steps import PORTABLE, Attn, Rows, Shape, filled_pool, make_step

BACKENDS = PORTABLE
SPEC = KVSpec(3, 6, 4, 2, 8, jnp.dtype("float32"))
OUTSIDE = (6, 11, -1, -6, 2**31 - 1, -(2**31))


def numbered_pool(backend: str) -> KVPool:
    """A pool in which every element is different."""
    pool = filled_pool(backend, SPEC, 0.0)
    size = 0
    arrays = []
    for array in pool.arrays:
        arrays.append(jnp.arange(size, size + array.size, dtype=jnp.float32).reshape(array.shape))
        size += array.size
    return KVPool(tuple(arrays), SPEC)


def blocks_of(backend: str, pool: KVPool) -> list[np.ndarray]:
    """`[N, L, ...]` for each of the pool's arrays, read without the code under test."""
    return [
        np.asarray(a).reshape(SPEC.num_layers, SPEC.num_blocks, *a.shape[1:]).swapaxes(0, 1)
        for a in pool.arrays
    ]


def ids(*numbers: int) -> jax.Array:
    return jnp.asarray(np.array(numbers, np.int32))


# (back end, heads, head size, dtype): for the TPU heads of half a row, of one and of several.
READ_BACK = [
    ("reference", 3, 8, "float32"),
    ("reference", 2, 16, "int8"),
    ("xla", 3, 8, "float32"),
    ("xla", 2, 16, "float8_e4m3fn"),
    ("gpu", 2, 64, "bfloat16"),
    ("gpu", 2, 80, "int8"),
    ("tpu", 3, 8, "bfloat16"),
    ("tpu", 2, 80, "float32"),
    ("tpu", 3, 256, "bfloat16"),
    ("tpu", 3, 8, "int8"),
    ("tpu", 2, 128, "float8_e5m2"),
]


@pytest.mark.parametrize(("backend", "num_heads", "head_size", "dtype"), READ_BACK)
def test_what_was_written_is_read_back_in_order(backend, num_heads, head_size, dtype):
    block_size = 64 if backend == "gpu" else 4
    spec = KVSpec(2, 6, block_size, num_heads, head_size, jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    table = np.array([[5, 2, 0], [3, 6, 1]], np.int32)  # 6 is outside, 0 holds nothing
    places = (table[:, :, None] * block_size + np.arange(block_size)).reshape(2, -1)
    written = np.isin(table, (1, 2, 3, 5)).repeat(block_size, axis=1)
    slots = jnp.asarray(places[written], jnp.int32)
    k, v = rng.normal(size=(2, len(slots), num_heads, head_size)).astype(np.float32)
    value = get_backend(backend)
    stored = jnp.float32 if spec.dtype.itemsize == 1 else spec.dtype

    @jax.jit
    def write_and_read(k, v):
        pool = value.write_kv(value.init_pool(spec), k, v, slots, layer=jnp.int32(1))
        return [read_kv(pool, jnp.asarray(table), layer=i, backend=value) for i in (0, 1)]

    other, layer = write_and_read(jnp.asarray(k, stored), jnp.asarray(v, stored))
    assert not any(array.any() for array in other)
    off = {1: 0.1, 2: 0.02, 4: 0}[spec.dtype.itemsize]
    for got, wanted in zip(layer, (k, v), strict=True):
        assert got.shape == (2, 3 * block_size, num_heads, head_size) and got.dtype == stored
        got = np.asarray(got, np.float32)
        np.testing.assert_allclose(got[written], wanted, atol=off, rtol=off)
        assert not got[0, 2 * block_size :].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_pool_is_zero_and_has_the_layout(backend):
    value = get_backend(backend)
    layout = value.layout(SPEC)
    pool = value.init_pool(SPEC)
    assert pool.spec == SPEC
    assert [(a.shape, a.dtype) for a in pool.arrays] == [(a.shape, a.dtype) for a in layout.arrays]
    assert all(a.shape[0] == SPEC.num_layers * SPEC.num_blocks for a in layout.arrays)
    assert all((a == 0).all() for a in pool.arrays)
    assert layout.num_bytes == sum(a.nbytes for a in pool.arrays) == 2 * 3 * 6 * 4 * 2 * 8 * 4
    for array, partition in zip(layout.arrays, layout.partition_specs, strict=True):
        assert array.shape[partition.index("kv_heads")] == SPEC.num_kv_heads


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_is_a_pytree_with_a_static_size(backend):
    pool = get_backend(backend).init_pool(SPEC._replace(dtype=jnp.float32))
    leaves, tree = jax.tree.flatten(pool)
    assert len(leaves) == len(pool.arrays)
    assert tree == jax.tree.structure(get_backend(backend).init_pool(SPEC))  # one dtype, one tree
    assert hash(tree)


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_copied_in_every_layer(backend):
    pool = numbered_pool(backend)
    before = blocks_of(backend, pool)
    copied = jax.jit(copy_blocks)(pool, ids(4, 5, 2, 0, 0), ids(5, 4, 1, 0, 0))
    for old, new in zip(before, blocks_of(backend, copied), strict=True):
        # 4 and 5 change places: every source is read before any target is written.
        np.testing.assert_array_equal(new, old[[0, 2, 2, 3, 5, 4]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_go_out_and_come_back_elsewhere(backend):
    pool = numbered_pool(backend)
    before = blocks_of(backend, pool)
    values = jax.jit(read_blocks)(pool, ids(3, 1, 0))
    for read, old in zip(values, before, strict=True):
        np.testing.assert_array_equal(read, old[[3, 1, 0]])
    written = jax.jit(write_blocks)(pool, ids(2, 5, 0), values)
    for old, new in zip(before, blocks_of(backend, written), strict=True):
        np.testing.assert_array_equal(new, old[[0, 1, 3, 3, 4, 1]])


@pytest.mark.parametrize("backend", [*BACKENDS, "tpu"])
def test_a82_blocks_outside_the_pool_are_neither_copied_nor_written(backend):
    pool = numbered_pool(backend)
    before = blocks_of(backend, pool)
    outside, inside = ids(*OUTSIDE), ids(*[5] * len(OUTSIDE))
    values = read_blocks(pool, inside)
    for changed in (
        copy_blocks(pool, inside, outside),
        copy_blocks(pool, outside, inside),
        write_blocks(pool, outside, values),
    ):
        for old, new in zip(before, blocks_of(backend, changed), strict=True):
            np.testing.assert_array_equal(new, old)
    assert all(np.isnan(array).all() for array in read_blocks(pool, outside))


def test_a83_block_indices_of_a_very_large_pool():
    """2^20 blocks of 32 tokens, 8 heads, 128 dims: more elements than int32, fewer blocks."""
    spec = KVSpec(2047, 2**20, 32, 8, 128, jnp.dtype("bfloat16"))
    ends = (0, 1, 2**19, 2**20 - 1)
    for layer in (0, 1, 1023, 2046):
        index = block_in_range(spec, jnp.int32(layer), ids(*ends))
        assert index.dtype == jnp.int32
        assert index.tolist() == [layer * 2**20 + block for block in ends]
    past_the_end = spec.num_layers * spec.num_blocks
    for layer, block in ((2046, 2**20), (0, -1), (2047, 0), (-1, 5), (2**31 - 1, 2**31 - 1)):
        assert block_in_range(spec, jnp.int32(layer), ids(block)).tolist() == [past_the_end]


def check_very_large_pool(backend: str, dtype: str) -> None:
    """Traced only. Every integer in the program is an int32 that counts blocks, tokens or rows."""
    value = get_backend(backend)
    spec = KVSpec(32, 2**20, 32, 8, 128, jnp.dtype(dtype))
    layout = value.layout(spec)
    assert layout.num_bytes == 2 * 32 * 2**20 * 32 * 8 * 128 * spec.dtype.itemsize
    shape = Shape(
        block_size=32, num_kv_heads=8, num_heads=8, head_size=128, num_blocks=128, dtype=dtype
    )
    step = make_step(shape, Rows(decodes=(70,), chunks=((5, 5),)))

    def run(pool, q, k, v, attn):
        pool = write_kv(pool, k, v, attn, layer=31, backend=value)
        return paged_attention(q, pool, attn, layer=31, decode_rows=5, backend=value), pool

    pool = KVPool(layout.arrays, spec)
    out, after = jax.eval_shape(run, pool, step.q, step.k, step.v, step.attn)
    assert out.shape == step.q.shape
    assert jax.tree.map(lambda a: a.shape, after) == jax.tree.map(lambda a: a.shape, pool)
    jaxpr = str(jax.make_jaxpr(run)(pool, step.q, step.k, step.v, step.attn))
    assert "i32[" in jaxpr and "i64[" not in jaxpr
    token_elements = 8 * 128
    # A flat index would multiply by the elements of a token, of a head's block or of a block.
    for size in (token_elements, 32 * 128, 32 * token_elements):
        assert f" {size}:i32" not in jaxpr


@pytest.mark.parametrize("backend", BACKENDS)
def test_a83_a_step_over_a_very_large_pool_has_no_wide_index(backend):
    check_very_large_pool(backend, "float32")


@pytest.mark.parametrize("backend", [*BACKENDS, "tpu"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 2048, "num_blocks": 2**20}, "num_layers=2048 times num_blocks=1048576"),
        ({"num_blocks": 2**26, "block_size": 32}, "num_blocks=67108864 times block_size=32"),
        ({"num_blocks": 0}, "KVSpec.num_blocks must be a positive integer, got 0"),
        ({"head_size": 64.0}, "KVSpec.head_size must be a positive integer, got 64.0"),
        ({"dtype": jnp.dtype("uint4")}, "KVSpec.dtype must be one of .*, got uint4"),
    ],
)
def test_a83_a_pool_that_cannot_be_indexed_is_refused(backend, change, message):
    for make in (get_backend(backend).layout, get_backend(backend).init_pool):
        with pytest.raises(ValueError, match=message):
            make(SPEC._replace(**change))


# One program that writes and attends in each of two layers, four ways to hold the pool.
NUM_LAYERS = 2


def unrolled(one_layer):
    def step(x, pool, attn):
        for layer in range(NUM_LAYERS):
            x, pool = one_layer(x, pool, attn, layer)
        return x, pool

    return step


def scanned(one_layer):
    def step(x, pool, attn):
        def body(carry, layer):
            return one_layer(*carry, attn, layer), None

        return jax.lax.scan(body, (x, pool), jnp.arange(NUM_LAYERS, dtype=jnp.int32))[0]

    return step


def with_refs(loop):
    """The pool's arrays in `jax.new_ref` cells, read and replaced in every layer."""

    def wrap(one_layer):
        def step(x, pool, attn):
            cells = tuple(map(jax.new_ref, pool.arrays))

            def one_layer_in_cells(x, nothing, attn, layer):
                in_cells = KVPool(tuple(cell[...] for cell in cells), pool.spec)
                x, written = one_layer(x, in_cells, attn, layer)
                for cell, array in zip(cells, written.arrays, strict=True):
                    cell[...] = array
                return x, nothing

            x, _ = loop(one_layer_in_cells)(x, (), attn)
            return x, KVPool(tuple(cell[...] for cell in cells), pool.spec)

        return step

    return wrap


LOOPS = {
    "unrolled": unrolled,
    "scanned": scanned,
    "unrolled_refs": with_refs(unrolled),
    "scanned_refs": with_refs(scanned),
}


@cache
def compiled_memory(backend: str, loop: str, *, num_blocks: int, table_width: int = 24):
    """(bytes of the pool, the compiler's memory analysis) with the pool donated."""
    value = get_backend(backend)
    shape = Shape(num_layers=NUM_LAYERS, num_blocks=num_blocks, table_width=table_width)

    def one_layer(x, pool, attn, layer):
        k, v = x[:, : shape.num_kv_heads], x[:, shape.num_kv_heads :]
        pool = write_kv(pool, k, v, attn, layer=layer, backend=value)
        decode_rows = shape.decode_rows
        return paged_attention(
            x, pool, attn, layer=layer, decode_rows=decode_rows, backend=value
        ), pool

    def array(*size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(size, dtype)

    attn = Attn(
        array(1, shape.num_tokens),
        array(1, shape.num_rows, table_width),
        array(shape.num_rows),
        array(shape.num_rows + 1),
        array(),
        array(),
    )
    layout = value.layout(shape.spec)
    x = array(shape.num_tokens, shape.num_heads, shape.head_size, dtype=jnp.float32)
    step = jax.jit(LOOPS[loop](one_layer), donate_argnums=1)
    lowered = step.lower(x, KVPool(layout.arrays, shape.spec), attn)
    return layout.num_bytes, lowered.compile().memory_analysis()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_never_copies_the_pool(backend, loop):
    large_bytes, large = compiled_memory(backend, loop, num_blocks=2000)
    assert large.alias_size_in_bytes == large_bytes
    assert large.temp_size_in_bytes < large_bytes / 10


@pytest.mark.parametrize("loop", ["unrolled", "scanned"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_takes_no_memory_for_the_size_of_the_pool(backend, loop):
    small_bytes, small = compiled_memory(backend, loop, num_blocks=200)
    large_bytes, large = compiled_memory(backend, loop, num_blocks=2000)
    assert large_bytes == 10 * small_bytes
    assert large.temp_size_in_bytes <= small.temp_size_in_bytes + 4096


def test_a_step_of_xla_takes_no_memory_for_the_width_of_the_tables():
    _, narrow = compiled_memory("xla", "unrolled", num_blocks=200, table_width=24)
    _, wide = compiled_memory("xla", "unrolled", num_blocks=200, table_width=24 * 256)
    assert wide.temp_size_in_bytes <= narrow.temp_size_in_bytes + 4096


@pytest.mark.parametrize("backend", BACKENDS)
def test_moving_blocks_never_copies_the_pool(backend):
    value = get_backend(backend)
    temporaries = []
    for num_blocks in (200, 2000):
        spec = SPEC._replace(num_blocks=num_blocks, head_size=64)
        layout = value.layout(spec)
        pool = KVPool(layout.arrays, spec)
        some = jax.ShapeDtypeStruct((8,), jnp.int32)
        values = jax.eval_shape(read_blocks, pool, some)
        copy = jax.jit(copy_blocks, donate_argnums=0)
        write = jax.jit(write_blocks, donate_argnums=0)
        for lowered in (copy.lower(pool, some, some), write.lower(pool, some, values)):
            memory = lowered.compile().memory_analysis()
            assert memory.alias_size_in_bytes == layout.num_bytes
            temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[:2] == temporaries[2:]


@cache
def layer_after_layer(backend: str):
    """A step of small layers, and what it gives when each layer is a program of its own."""
    value = get_backend(backend)
    shape = Shape(num_layers=NUM_LAYERS)
    step = make_step(shape, Rows(decodes=(1, 1), chunks=((20, 20),)))
    attn = jax.tree.map(jnp.asarray, step.attn)
    real = np.concatenate([tokens for tokens, _ in step.sequences])

    def one_layer(x, pool, attn, layer):
        k, v = x[:, : shape.num_kv_heads], x[:, shape.num_kv_heads :]
        pool = write_kv(pool, k, v, attn, layer=layer, backend=value)
        out = paged_attention(x, pool, attn, layer=layer, decode_rows=5, backend=value)
        return x + out, pool

    start = (jnp.asarray(step.q), filled_pool(backend, shape.spec, 0.0), attn)
    x, pool = start[:2]
    program = jax.jit(one_layer)
    for layer in range(NUM_LAYERS):
        x, pool = program(x, pool, attn, jnp.int32(layer))
    return one_layer, start, real, x, pool


@pytest.mark.parametrize("loop", ["unrolled", "scanned_refs"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_in_one_program_are_layers_one_by_one(backend, loop):
    one_layer, start, real, expected_x, expected_pool = layer_after_layer(backend)
    x, pool = jax.jit(LOOPS[loop](one_layer))(*start)
    np.testing.assert_allclose(x[real], expected_x[real], rtol=1e-5, atol=1e-5)
    used = ids(*np.setdiff1d(start[2].block_tables, [0]))
    keys, expected_keys = (read_blocks(p, used)[0] for p in (pool, expected_pool))
    np.testing.assert_allclose(keys, expected_keys, rtol=1e-5, atol=1e-5)
    assert (keys[:, 0] != keys[:, 1]).any()
