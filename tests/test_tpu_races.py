"""The TPU kernels in JAX's TPU interpreter: copies that really are asynchronous, memory that starts
as NaN, accesses out of bounds refused, races detected. And mistakes, to see each check fail.

A copy is carried out either when it is started or only when it is waited for: each hides mistakes
that the other shows.
"""

import itertools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import (
    TpuBackend,
    register_backend,
    registry,
    tpu_attention,
    tpu_kernel,
    tpu_write,
)
from pallas_kernels.tpu_tuning import INTERPRETED
from tests import test_kernels_contract as contract
from tests.kernel_steps import Rows, Shape, make_step, run_step

pytestmark = pytest.mark.usefixtures("quick_compiles")  # nothing here is compiled twice

DECODE = Shape(
    decode_rows=4,
    chunk_rows=0,
    chunk_tokens=0,
    table_width=10,
    num_blocks=16,
    block_size=16,
    num_heads=2,
    num_kv_heads=1,
)
PREFILL = DECODE._replace(decode_rows=0, chunk_rows=2, chunk_tokens=44)
TWO_CORES = INTERPRETED._replace(num_cores=2)
# One fetch of 128 keys and two; padding rows after them.
DECODES = Rows(decodes=(3, 146))
CHUNKS = Rows(chunks=((40, 140), (3, 3)))
CASES = {
    "decode": (DECODE, DECODES, {}, INTERPRETED),
    "decode_window": (DECODE, DECODES, {"window": 20}, INTERPRETED),
    "decode_bfloat16_two_cores": (
        DECODE._replace(dtype="bfloat16", pool_dtype="bfloat16", head_size=128),
        DECODES,
        {"softcap": 5.0},
        TWO_CORES,
    ),
    "decode_bfloat16_sinks": (
        DECODE._replace(dtype="bfloat16", pool_dtype="bfloat16", head_size=96),
        DECODES,
        {"sinks": np.array([-1, 2], np.float32)},
        INTERPRETED,
    ),
    "decode_int8": (DECODE._replace(pool_dtype="int8"), DECODES, {}, INTERPRETED),
    "prefill": (PREFILL, CHUNKS, {}, INTERPRETED),
    "prefill_e4m3_two_cores": (
        PREFILL._replace(dtype="bfloat16", pool_dtype="float8_e4m3fn"),
        CHUNKS,
        {},
        TWO_CORES,
    ),
    "prefill_window_two_cores": (PREFILL, CHUNKS, {"window": 20}, TWO_CORES),
}
MODES = ("on_wait", "eager")
SWEPT = ("decode_window", "decode_bfloat16_sinks")
RUNS = [
    pytest.param(case, mode, marks=[pytest.mark.sweep] if case in SWEPT else [])
    for case in CASES
    for mode in MODES
]


@pytest.fixture
def run(monkeypatch) -> Callable[..., set[str]]:
    """Runs a case and says what is wrong: nothing, "race", "values", or the exception's type."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    numbers = itertools.count()

    def run(case: str, mode: str) -> set[str]:
        shape, rows, scoring, chip = CASES[case]
        name = f"tpu_{mode}_{next(numbers)}_{id(monkeypatch)}"  # a program of its own
        params = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
        register_backend(TpuBackend(name=name, chip=chip, interpret=params, loads="plain"))
        step = make_step(shape, rows)
        pltpu.reset_tpu_interpret_mode_state()
        try:
            # The past is no step of its own here: plainly interpreted, it is there at once.
            out = run_step(name, shape, step, past_backend="tpu", **scoring).out
            assert interpreter.races is not None
            wrong = {"race"} if interpreter.races.races_found else set()
        except Exception as error:
            wrong = {type(error).__name__}
        else:
            try:
                contract.assert_close(out, contract.expected_output(shape, step, **scoring))
            except AssertionError:
                wrong.add("values")
        finally:
            pltpu.reset_tpu_interpret_mode_state()
        return wrong

    return run


@pytest.mark.parametrize(("case", "mode"), RUNS)
def test_there_is_no_race_and_no_value_is_wrong(run, case, mode):
    assert run(case, mode) == set()


def no_wait(monkeypatch):
    monkeypatch.setattr(tpu_kernel, "_await_fetch", lambda *_: None)


def one_buffer(monkeypatch):
    """What is attended to is overwritten by the next copies."""
    tokens = tpu_kernel._tokens
    monkeypatch.setattr(
        tpu_kernel, "_tokens", lambda buffers, turn, *place: tokens(buffers, 0, *place)
    )


def wide_window(monkeypatch):
    """By one key."""
    work = tpu_attention.decode_work
    monkeypatch.setattr(
        tpu_attention,
        "decode_work",
        lambda attn, rows, room, window: work(attn, rows, room, window and window + 1),
    )


def next_row(monkeypatch):
    """Each row reads the block table of the one after it."""
    work = tpu_attention.decode_work
    monkeypatch.setattr(
        tpu_attention,
        "decode_work",
        lambda *args: (w := work(*args))._replace(row=jnp.roll(w.row, -1)),
    )


def no_clearing(monkeypatch):
    """What lies behind a row's last key is NaN, times a weight of zero."""
    monkeypatch.setattr(tpu_kernel, "_clear_unseen", lambda *_: None)


def no_scales(monkeypatch):
    """Bytes come, their scales do not."""
    copies = tpu_kernel._copies
    monkeypatch.setattr(tpu_kernel, "_copies", lambda *args: copies(*args)[:1])


def own_lines(monkeypatch):
    """Each token reads, changes and writes the scales around it, whoever else does."""
    monkeypatch.setattr(
        tpu_write,
        "_first_of_line",
        lambda index, _: jnp.arange(index.shape[0], dtype=jnp.int32) % tpu_write.LANES,
    )


# (mistake, case, what each mode must notice)
MISTAKES = {
    "no_wait": (no_wait, "decode", {"on_wait": {"values"}, "eager": {"race"}}),
    "one_buffer": (one_buffer, "decode", {"on_wait": {"race"}, "eager": {"race"}}),
    "wide_window": (wide_window, "decode_window", {"on_wait": {"values"}}),
    "next_row": (next_row, "decode", {"on_wait": {"values"}}),
    "no_clearing": (no_clearing, "decode", {"on_wait": {"values"}}),
    "no_scales": (no_scales, "decode_int8", {"on_wait": {"values"}}),
    "own_lines": (own_lines, "prefill_e4m3_two_cores", {"eager": {"values"}}),
}


@pytest.mark.parametrize(
    ("mistake", "mode"),
    [(name, mode) for name, (_, _, noticed) in MISTAKES.items() for mode in noticed],
)
def test_a_mistake_is_noticed(run, monkeypatch, mistake, mode):
    plant, case, noticed = MISTAKES[mistake]
    plant(monkeypatch)
    assert run(case, mode) >= noticed[mode]
