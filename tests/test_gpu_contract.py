"""The Hopper kernel, interpreted: copies, barriers and shared memory as on a GPU, with a watch for
races; products in plain jnp (`tests/test_gpu_aot.py` has the matrix unit). Against float64.

`tests/gpu_interpreter.py` has what it takes. A case has few thread blocks: each takes its time.
"""

import inspect
import types

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gpu_attention, gpu_copies, gpu_kernel
from pallas_kernels.gpu_tuning import unit_dtype
from tests import gpu_interpreter
from tests.kernel_steps import Rows, Shape, _program, make_step, run_step
from tests.test_kernels_contract import assert_close, expected_output

NAN = float("nan")
# One row of 90 tokens, in random blocks, with one KV head; tiles of keys are 64 long.
DECODE = Shape(
    decode_rows=1,
    chunk_rows=0,
    chunk_tokens=0,
    table_width=8,
    num_blocks=12,
    num_heads=2,
    num_kv_heads=1,
    dtype="bfloat16",
    pool_dtype="bfloat16",
)
PREFILL = DECODE._replace(decode_rows=0, chunk_rows=1, chunk_tokens=31, num_heads=1)
ONE, CHUNK = Rows(decodes=(90,)), Rows(chunks=((30, 90),))
HALF = {"dtype": "float16", "pool_dtype": "float16"}
INT8, E4M3, E5M2 = ({"pool_dtype": dtype} for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"))


def sinks(num_heads: int) -> np.ndarray:
    return np.linspace(-1, 3, num_heads, dtype=np.float32)


SCALES = {"k_scale": np.array([0.5], np.float32), "v_scale": np.array([3.0], np.float32)}
# Every head size, block size, group size and option, each with decodes and with chunks.
CASES = {
    "decode": (DECODE, ONE, {}),
    "decode_80_window": (DECODE._replace(head_size=80, num_heads=3), ONE, {"window": 20}),
    "decode_128_all": (
        DECODE._replace(head_size=128, block_size=64, table_width=2, num_heads=5),
        ONE,
        {"window": 64, "softcap": 5.0, "scale": 0.3, "sinks": sinks(5), **SCALES},
    ),
    "decode_float16_blocks_of_8": (
        DECODE._replace(block_size=8, table_width=16, num_blocks=20, **HALF),
        ONE,
        {"softcap": 2.0},
    ),
    "decode_two_splits": (
        DECODE._replace(block_size=128, table_width=4, num_blocks=6),
        Rows(decodes=(300,)),
        {"sinks": sinks(2)},
    ),
    "decode_int8_two_tiles": (DECODE._replace(**INT8), ONE, {"sinks": sinks(2), "window": 50}),
    "prefill": (PREFILL, CHUNK, {}),
    "prefill_two_warpgroups": (
        PREFILL._replace(num_heads=3, chunk_tokens=30),
        CHUNK,
        {"window": 40, "sinks": sinks(3), **SCALES},
    ),
    "prefill_96_softcap": (
        PREFILL._replace(head_size=96, block_size=64, table_width=2),
        CHUNK,
        {"softcap": 5.0, "window": 1},
    ),
    "decode_64_window_1": (DECODE, ONE, {"window": 1}),
    "decode_96": (DECODE._replace(head_size=96, num_heads=1), ONE, SCALES),
    "decode_112": (DECODE._replace(head_size=112, num_heads=7), ONE, {"softcap": 3.0}),
    "decode_256": (
        DECODE._replace(head_size=256, block_size=32, table_width=4),
        ONE,
        {"window": 70, "sinks": sinks(2)},
    ),
    "decode_16": (DECODE._replace(head_size=16, num_heads=9, **HALF), ONE, {}),
    "decode_many_heads": (DECODE._replace(num_heads=71), ONE, {"sinks": sinks(71)}),
    "decode_two_kv_heads": (DECODE._replace(num_heads=6, num_kv_heads=2), ONE, {"window": 30}),
    "decode_blocks_of_256": (
        DECODE._replace(block_size=256, table_width=1, num_blocks=3),
        Rows(decodes=(200,)),
        {"softcap": 4.0, "sinks": sinks(2)},
    ),
    "decode_of_one_token": (DECODE, Rows(decodes=(1,)), {"sinks": sinks(2)}),
    "decode_of_a_whole_tile": (DECODE, Rows(decodes=(64,)), {"window": 64}),
    "decode_of_a_full_table": (DECODE, Rows(decodes=(128,)), {}),
    "prefill_64_groups_of_4": (
        PREFILL._replace(num_heads=4, chunk_tokens=40),
        Rows(chunks=((40, 100),)),
        {},
    ),
    "prefill_80": (PREFILL._replace(head_size=80, **HALF), CHUNK, SCALES),
    "prefill_128": (PREFILL._replace(head_size=128, num_heads=3), CHUNK, {"window": 50}),
    "prefill_256": (PREFILL._replace(head_size=256, num_heads=3), CHUNK, {"softcap": 6.0}),
}
MORE_CASES = {
    "prefill_blocks_of_8": (
        PREFILL._replace(block_size=8, table_width=16, num_blocks=20),
        CHUNK,
        {"sinks": sinks(1)},
    ),
    "prefill_blocks_of_128": (
        PREFILL._replace(block_size=128, table_width=1, num_blocks=3),
        CHUNK,
        {"window": 33, **SCALES},
    ),
    "prefill_two_chunks": (
        PREFILL._replace(chunk_rows=3, chunk_tokens=40),
        Rows(chunks=((7, 7), (30, 90))),
        {},
    ),
    "decode_e4m3_80_blocks_of_8": (
        DECODE._replace(head_size=80, block_size=8, table_width=16, num_blocks=20, **E4M3),
        ONE,
        {"softcap": 5.0, **SCALES},
    ),
    "decode_e5m2_256_blocks_of_128": (
        DECODE._replace(head_size=256, block_size=128, table_width=4, num_blocks=6, **E5M2),
        Rows(decodes=(200,)),
        {"sinks": sinks(2)},
    ),
    "decode_int8_float32_queries": (
        DECODE._replace(pool_dtype="int8", dtype="float32", block_size=64, table_width=8),
        Rows(decodes=(400,)),
        {},
    ),
    "prefill_int8_two_warpgroups": (
        PREFILL._replace(num_heads=3, head_size=128, block_size=32, table_width=4, **INT8),
        CHUNK,
        {"window": 40, **SCALES},
    ),
    "prefill_e4m3": (PREFILL._replace(**E4M3), CHUNK, {"sinks": sinks(1)}),
    "prefill_e5m2_float16_queries": (
        PREFILL._replace(pool_dtype="float8_e5m2", dtype="float16"),
        CHUNK,
        {"softcap": 5.0},
    ),
    "mixed": (
        DECODE._replace(decode_rows=2, chunk_rows=2, chunk_tokens=40, num_blocks=24),
        Rows(decodes=(65,), chunks=((33, 64),)),
        {"window": 40},
    ),
    "prefill_two_splits": (
        PREFILL._replace(block_size=64, table_width=8, num_blocks=10),
        Rows(chunks=((31, 320),)),
        {"window": 290},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    with gpu_interpreter.interpreted_gpu():
        yield


def run(shape: Shape, rows: Rows, *, fill: float = NAN, unused_id: int = 0, **scoring):
    """The step's result and float64's, over a pool that holds `fill` where nothing was written."""
    step = make_step(shape, rows, unused_id=unused_id)
    gpu_interpreter.forget_races()
    out = run_step(gpu_interpreter.NAME, shape, step, fill=fill, **scoring).out
    return out, expected_output(shape, step, **scoring)


def check_case(shape: Shape, rows: Rows, scoring) -> None:
    out, expected = run(shape, rows, **scoring)
    assert out.dtype == jnp.dtype(shape.dtype)
    # Queries are rounded to what the matrix unit multiplies.
    assert_close(out.astype(unit_dtype(shape.spec)), expected)
    assert (out[np.all(expected == 0, axis=(1, 2))] == 0).all()  # padding: exactly
    assert not gpu_interpreter.found_races()


@pytest.mark.parametrize("name", CASES)
def test_a86_attention_is_that_of_float64_over_a_pool_of_nan(name):
    check_case(*CASES[name])


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE_CASES)
def test_attention_is_that_of_float64_in_more_cases(name):
    check_case(*MORE_CASES[name])


def test_there_are_as_many_cases_as_promised():
    assert len(CASES) >= 24


def test_a85_rows_without_keys_give_zero():
    shape = DECODE._replace(decode_rows=2)
    out, expected = run(shape, ONE, unused_id=5)
    assert (out[1] == 0).all()
    assert_close(out, expected)


@pytest.mark.parametrize("bad_id", [0, -(2**31), pytest.param(12, marks=pytest.mark.sweep)])
def test_a82_the_null_block_and_blocks_outside_the_pool_are_not_read(bad_id):
    """Not even as a block of the next layer: its 16 keys are missing from the softmax."""
    step = make_step(DECODE, ONE)
    tables = step.attn.block_tables.copy()
    tables[0, 0, 1] = bad_id
    broken = step._replace(attn=step.attn._replace(block_tables=tables))
    ((tokens, sequence),) = step.sequences
    rest = np.r_[0:16, 32:90]
    fewer = sequence._replace(keys=sequence.keys[rest], values=sequence.values[rest])
    expected = expected_output(DECODE, step._replace(sequences=[(tokens, fewer)]))
    assert_close(run_step(gpu_interpreter.NAME, DECODE, broken, layer=0).out, expected)


VALUES = "acc = unit.add_values(acc, weights, ring.values.at[slot])"
USED = "plgpu.barrier_arrive(ring.used.at[slot])"
LANDED = "plgpu.barrier_wait(landing.landed.at[stage])"
# What must not go wrong: what to change in the kernel's source, and by what it is noticed.
MISTAKES = {
    "no wait for keys": ("plgpu.barrier_wait(ring.keys_ready.at[slot])", "pass", "race"),
    "no wait for values": ("plgpu.barrier_wait(ring.values_ready.at[slot])", "pass", "race"),
    "a reused buffer": (f"{VALUES}\n    {USED}", f"{USED}\n    {VALUES}", "race"),
    "a window too wide by one": ("> position - window", ">= position - window", "result"),
    "a wrong table row": ("tables_ref[row, jnp", "tables_ref[0, jnp", "result"),
    "bytes that are widened before they land": (LANDED, "pass", "race"),
    "values that are not cleaned": ("part[...] = jnp.where", "_ = jnp.where", "result"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_noticed(mistake, monkeypatch):
    right, wrong, noticed_by = MISTAKES[mistake]
    plant(monkeypatch, right, wrong)
    # A second row, whose blocks are others; four tiles where the ring of two slots must turn.
    shape = DECODE._replace(decode_rows=2, num_blocks=40)
    length, window = 90, 3 if "window" in mistake else 80
    if mistake == "a reused buffer":
        shape, length, window = shape._replace(head_size=256, table_width=16), 250, 250
    if "widened" in mistake:
        shape = shape._replace(**INT8)
    try:
        out, expected = run(shape, Rows(decodes=(length, 16)), window=window)
        races = gpu_interpreter.found_races()
    finally:
        _program.cache_clear()
        gpu_interpreter.forget_races()
    if noticed_by == "race":
        assert races
    else:
        with pytest.raises(AssertionError):
            assert_close(out, expected)


def plant(monkeypatch, right: str, wrong: str) -> None:
    """Changes the kernel's source where it says `right`."""
    (module,) = (m for m in (gpu_kernel, gpu_copies) if right in inspect.getsource(m))
    faulty = types.ModuleType("faulty")
    exec(inspect.getsource(module).replace(right, wrong), faulty.__dict__)
    if module is gpu_kernel:
        monkeypatch.setattr(gpu_attention, "gpu_kernel", faulty)
    else:
        for name in ("copy_tiles", "copy_and_widen_tiles"):
            monkeypatch.setattr(gpu_kernel, name, getattr(faulty, name))
    _program.cache_clear()
