"""`python -m pallas_kernels.report`: what the kernels must move and multiply, beside what each chip
can. With `--compile` also what the compilers make of them, for which no accelerator is needed:
`--compile tpu`, `--compile gpu`, or both.
"""

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from pallas_kernels.gpu_tuning import ROW_TILE_LEN, tune
from pallas_kernels.pool import KVSpec
from pallas_kernels.roofline import CHIPS, Work, attention_work
from pallas_kernels.step_shapes import NUM_HEADS, NUM_KV_HEADS

HEADS = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_size": 128}
STEPS = {
    "decode 64 x 2,048": ([1] * 64, [2048] * 64),
    "prefill 8,192": ([8192], [8192]),
}
HEAD_SIZES = (64, 80, 96, 128, 256)


def roofline_table() -> Iterator[Sequence[str]]:
    """The shortest time of one layer's attention on each chip, and what limits it."""
    yield ("chip", "GB/s", "TFLOP/s", "ridge", *(f"{name}, ms" for name in STEPS), "source")
    for name, chip in CHIPS.items():
        times = []
        for query_lens, seq_lens in STEPS.values():
            work = attention_work(query_lens, seq_lens, **HEADS, kv_itemsize=2)
            times.append(f"{1e3 * work.seconds_on(chip):.3f} ({work.limit_on(chip)})")
        rates = (f"{chip.bytes_per_s / 1e9:.0f}", f"{chip.flops_per_s / 1e12:.0f}")
        yield (name, *rates, f"{chip.ridge:.0f}", *times, chip.source)


def tile_table(chip_name: str = "h200") -> Iterator[Sequence[str]]:
    """One key tile of the Hopper kernel: what it moves and multiplies, padding included, and the
    share of the memory's rate that the matrix unit leaves possible."""
    chip = CHIPS[chip_name]
    yield (
        "kernel",
        "D",
        "rows",
        "stages",
        "smem KiB",
        "B/tile",
        "flop/tile",
        "flop/B",
        "memory share",
    )
    for kind, rows in (("decode", 4), ("prefill", 128)):
        for head_size in HEAD_SIZES:
            spec = KVSpec(1, 1, 16, 8, head_size, jnp.dtype("bfloat16"))
            config = tune(spec, num_tiles=lambda _: 64, rows=rows, capacity=4096)
            num_bytes = 2 * config.tile_len * head_size * 2
            flops = 4 * ROW_TILE_LEN * config.warpgroups * config.tile_len * head_size
            work = Work(num_bytes, flops)
            share = num_bytes / chip.bytes_per_s / work.seconds_on(chip)
            yield (
                kind,
                f"{head_size}",
                f"{config.rows}",
                f"{config.stages}",
                f"{config.smem_bytes(spec, False) // 1024}",
                f"{num_bytes}",
                f"{flops}",
                f"{flops / num_bytes:.0f}",
                f"{share:.2f}",
            )


def gpu_compile_table() -> Iterator[Sequence[str]]:
    """What the assembler says of the Hopper kernel."""
    from pallas_kernels import report_gpu

    return report_gpu.compile_table()


def gpu_generation_table() -> Iterator[Sequence[str]]:
    """Which path each generation of GPUs gets."""
    from pallas_kernels import report_gpu

    return report_gpu.generation_table()


def tpu_compile_table() -> Iterator[Sequence[str]]:
    """What the compiler says of the TPU's kernel on each chip."""
    from pallas_kernels import report_tpu

    return report_tpu.compile_table()


class Table(NamedTuple):
    """A title, and what computes the lines under it, the first of which are the columns' names."""

    title: str
    lines: Callable[[], Iterator[Sequence[str]]]


TABLES = (
    Table("The shortest time of one layer's attention", roofline_table),
    Table("A tile of keys of the Hopper kernel", tile_table),
)
COMPILE_TABLES = {
    "tpu": (Table("Compiled for TPUs", tpu_compile_table),),
    "gpu": (
        Table("Compiled for Hopper", gpu_compile_table),
        Table("Compiled for each generation of GPUs", gpu_generation_table),
    ),
}


def markdown(lines: Iterator[Sequence[str]]) -> Iterator[str]:
    """A table's lines, each as soon as it is there."""
    head = next(lines)
    yield f"| {' | '.join(head)} |"
    yield "|--" * len(head) + "|"
    for line in lines:
        yield f"| {' | '.join(line)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.report", description=__doc__)
    parser.add_argument(
        "--compile",
        nargs="*",
        choices=COMPILE_TABLES,
        metavar="KIND",
        help="compile, too: for tpu, gpu, or both (a quarter of an hour)",
    )
    arguments = parser.parse_args()
    tables = list(TABLES)
    if arguments.compile is not None:
        for kind in arguments.compile or COMPILE_TABLES:
            tables += COMPILE_TABLES[kind]
    for table in tables:
        print(f"## {table.title}\n")
        for line in markdown(table.lines()):
            print(line, flush=True)
        print()


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
