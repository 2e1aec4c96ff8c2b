"""What is said of the kernels without running them: the roofline and the report."""

import jax.numpy as jnp
import pytest

from pallas_kernels import KVSpec, report, report_gpu
from pallas_kernels.roofline import CHIPS, attention_work


def test_work_of_a_decode_and_of_a_prefill():
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "kv_itemsize": 2}
    decode = attention_work([1, 1], [10, 20], **heads)
    assert decode.num_bytes == 2 * 30 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2
    assert decode.flops == 4 * 30 * 4 * 8
    prefill = attention_work([3], [5], **heads)  # its queries see 3, 4 and 5 keys
    assert prefill.flops == 4 * (3 + 4 + 5) * 4 * 8


def test_a_decode_is_limited_by_memory_and_a_long_prefill_by_the_matrix_unit():
    for chip in CHIPS.values():
        limits = [
            attention_work(q, s, **report.HEADS, kv_itemsize=2).limit_on(chip)
            for q, s in report.STEPS.values()
        ]
        assert limits == ["memory", "matrix unit"]
    assert CHIPS["h200"].ridge == pytest.approx(206, abs=1)


def test_the_report_has_a_line_for_every_chip_and_every_kernel():
    chips, tiles = list(report.roofline_table()), list(report.tile_table())
    assert [row[0] for row in chips[1:]] == list(CHIPS)
    assert len(tiles) == 1 + 2 * len(report.HEAD_SIZES)
    assert {len(row) for row in tiles} == {len(tiles[0])}
    assert list(report.markdown(iter([("a", "b"), ("1", "2")]))) == [
        "| a | b |",
        "|--|--|",
        "| 1 | 2 |",
    ]


@pytest.mark.parametrize("dtype", report_gpu.DTYPES)
def test_the_hopper_kernel_can_reach_most_of_the_memorys_rate_by_its_schedule(dtype):
    for head_size in report_gpu.HEAD_SIZES:
        spec = KVSpec(2, 4096, 32, 8, head_size, jnp.dtype(dtype))
        config, share = report_gpu.static_share("decode", spec, "h200")
        assert (config.wide_slots > 0) == (spec.dtype.itemsize == 1)
        # Of bytes a head of 80 is stored as 96, and each token has two scales of four bytes.
        assert (0.7 if spec.dtype.itemsize == 1 else 0.95) < share <= 1


def test_a_prefill_wastes_little_of_the_matrix_unit():
    spec = KVSpec(2, 4096, 16, 8, 128, jnp.dtype("bfloat16"))
    config, share = report_gpu.static_share("prefill", spec, "h200")
    assert config.rows == 128
    assert 0.9 < share <= 1  # the rest is masked: tiles on the diagonal
