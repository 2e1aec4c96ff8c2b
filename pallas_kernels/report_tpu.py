"""The TPU's part of the report: what the compiler makes of a step of decodes on each chip."""

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pallas_kernels import aot, roofline
from pallas_kernels.pool import KVSpec
from pallas_kernels.step_shapes import STEPS, attention_program
from pallas_kernels.tpu import TpuBackend
from pallas_kernels.tpu_kernel import BLOCKS_AT_ONCE
from pallas_kernels.tpu_schedule import CLOCK_HZ, Schedule, dump_arguments, read_schedule

DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
HEAD_SIZE = 128
OTHER_HEAD_SIZES = (64, 256)  # 80 and 96 are padded to 128: the same kernel
BLOCK_SIZE = 64
TABLE_WIDTH = 256
HEADER = (
    "chip",
    "cache",
    "D",
    "compile s",
    "VMEM MiB",
    "temporaries MiB",
    "pool in place",
    "cycles a fetch",
    "memory's",
    "memory share",
)


class Case(NamedTuple):
    """A step to compile: for a key of `aot.TPU_TOPOLOGIES`, over a pool of this dtype."""

    chip: str
    dtype: str
    head_size: int


def cases() -> Iterator[Case]:
    """Every chip with every dtype; the other head sizes on v5e only, of two dtypes."""
    for chip, dtype in itertools.product(aot.TPU_TOPOLOGIES, DTYPES):
        yield Case(chip, dtype, HEAD_SIZE)
    for head_size, dtype in itertools.product(OTHER_HEAD_SIZES, ("bfloat16", "int8")):
        yield Case("v5e", dtype, head_size)


def compile_table() -> Iterator[Sequence[str]]:
    """A line for each kernel: the cycles of its schedule for a fetch of keys, those in which the
    memory delivers them, and the share of the memory's rate that this leaves possible.

    For a process that has not loaded libtpu yet; raises `SystemExit` where it is not installed.
    """
    if reason := aot.why_no_tpu_compiler():
        raise SystemExit(reason)
    yield HEADER
    with tempfile.TemporaryDirectory(prefix="aot-tpu-") as folder:
        os.environ["LIBTPU_INIT_ARGS"] = dump_arguments(Path(folder))
        for chip, dtype, head_size in cases():
            device = aot.tpu_device(chip)
            backend = TpuBackend().for_device(device.device_kind)
            program, args, pool_bytes = attention_program(
                backend,
                head_size,
                dtype=dtype,
                block_size=BLOCK_SIZE,
                table_width=TABLE_WIDTH,
                **STEPS["decode"],
            )
            compiled = aot.compile_for(device, program, *args, donate_argnums=0)
            schedule = read_schedule(Path(folder))
            yield (
                chip,
                dtype,
                f"{head_size}",
                f"{compiled.lower_s + compiled.compile_s:.1f}",
                f"{schedule.vmem_bytes / 2**20:.1f}",
                f"{compiled.temporary_bytes / 2**20:.1f}",
                "yes" if compiled.alias_bytes == pool_bytes else "no",
                *_estimate(schedule, backend, args[0].spec),
            )


def _estimate(schedule: Schedule, backend: TpuBackend, spec: KVSpec) -> tuple[str, str, str]:
    """Cycles of a core for a fetch, those of the memory, and the smaller in the larger."""
    chip = backend.chip
    tiles = backend.setup(spec).tiles("decode", spec.block_size, TABLE_WIDTH)
    cycles = schedule.cycles(
        groups=-(-tiles.fetch_blocks // BLOCKS_AT_ONCE),
        blocks=tiles.fetch_blocks,
        tiles=tiles.fetch_blocks * spec.block_size // tiles.tile_len,
    )
    if chip.name not in CLOCK_HZ:
        return f"{cycles}", "", ""
    one_block = spec._replace(num_layers=1, num_blocks=1)
    num_bytes = tiles.fetch_blocks * backend.layout(one_block).num_bytes
    bytes_per_s = roofline.CHIPS[chip.name].bytes_per_s / chip.num_cores
    of_memory = num_bytes / bytes_per_s * CLOCK_HZ[chip.name]
    return f"{cycles}", f"{of_memory:.0f}", f"{min(of_memory / cycles, 1):.2f}"
