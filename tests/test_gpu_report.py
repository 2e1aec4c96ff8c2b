"""What is said of the kernels without running them: the roofline and the report."""

import pytest

from pallas_kernels import report
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
    assert report.markdown(iter(tiles[:2])).splitlines()[1] == "|--" * len(tiles[0]) + "|"
