"""The GPU's part of the report: what XLA and NVIDIA's assembler make of a step on each generation,
and what the Hopper kernel's schedule moves and multiplies, beside what the chip can.
"""

import itertools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from pallas_kernels import aot_gpu, gpu_work
from pallas_kernels.gpu_tuning import (
    ROW_TILE_LEN,
    TuningConfig,
    scale_box_len,
    stored_head_size,
    tune_decodes,
    tune_prefills,
)
from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVSpec
from pallas_kernels.quantized_kv import is_quantized
from pallas_kernels.registry import choose_backend
from pallas_kernels.roofline import CHIPS, Work, attention_work
from pallas_kernels.step_shapes import NUM_HEADS, NUM_KV_HEADS, STEPS, attention_program

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
BLOCK_SIZE, TABLE_WIDTH = 16, 512
DECODE_LENS = [2048] * 64
PREFILL_LEN = 8192


def compile_table(
    chip_name: str = "h200",
    dtypes: Sequence[str] = DTYPES,
    head_sizes: Sequence[int] = HEAD_SIZES,
) -> Iterator[Sequence[str]]:
    """A line for each kernel; raises `SystemExit` where the compilers are not installed."""
    if reason := aot_gpu.why_no_gpu_compiler():
        raise SystemExit(reason)
    yield (
        "kernel",
        "cache",
        "D",
        "compile s",
        "rows",
        "stages",
        "shared KiB",
        "registers",
        "spilled B",
        "temporaries MiB",
        "pool in place",
        "share of roofline",
    )
    for kind, dtype, head_size in itertools.product(STEPS, dtypes, head_sizes):
        spec = KVSpec(2, 4096, BLOCK_SIZE, NUM_KV_HEADS, head_size, jnp.dtype(dtype))
        if stored_head_size(spec) != head_size:
            continue  # the kernel of that size
        backend, _ = choose_backend("auto", aot_gpu.TARGETS[chip_name].name, [spec])
        program, args, pool_bytes = attention_program(
            backend, head_size, dtype=dtype, table_width=TABLE_WIDTH, **STEPS[kind]
        )
        compiled, (kernel,) = aot_gpu.compile_for_gpu(chip_name, program, *args, donate_argnums=0)
        config, share = static_share(kind, spec, chip_name)
        yield (
            kind,
            dtype,
            f"{head_size}",
            f"{compiled.lower_s + compiled.compile_s:.1f}",
            f"{config.rows}",
            f"{config.stages}",
            f"{config.smem_bytes(spec, exact=False) / 1024:.0f}",
            f"{kernel.registers}",
            f"{kernel.spill_bytes}",
            f"{compiled.temporary_bytes / 2**20:.0f}",
            "yes" if compiled.alias_bytes == pool_bytes else "no",
            f"{share:.2f}",
        )


def generation_table(head_size: int = 128) -> Iterator[Sequence[str]]:
    """Which path each generation gets, compiled for it; raises as `compile_table` does."""
    if reason := aot_gpu.why_no_gpu_compiler():
        raise SystemExit(reason)
    yield ("chip", "architecture", "cache", "back end", "compile s", "temporaries MiB", "in place")
    for chip_name, dtype in itertools.product(aot_gpu.TARGETS, ("bfloat16", "int8")):
        target = aot_gpu.TARGETS[chip_name]
        spec = KVSpec(2, 4096, BLOCK_SIZE, NUM_KV_HEADS, head_size, jnp.dtype(dtype))
        backend, _ = choose_backend("auto", target.name, [spec])
        program, args, pool_bytes = attention_program(
            backend, head_size, dtype=dtype, decode_rows=64, chunk_tokens=512
        )
        compiled, _ = aot_gpu.compile_for_gpu(chip_name, program, *args, donate_argnums=0)
        yield (
            chip_name,
            "sm_{}{}".format(*target.capability) + ("a" if backend.name == "gpu" else ""),
            dtype,
            backend.name,
            f"{compiled.lower_s + compiled.compile_s:.1f}",
            f"{compiled.temporary_bytes / 2**20:.0f}",
            "yes" if compiled.alias_bytes == pool_bytes else "no",
        )


def static_share(kind: str, spec: KVSpec, chip_name: str) -> tuple[TuningConfig, float]:
    """How a step is cut, and the share of the roofline that this leaves possible: 64 decodes over
    2,048 keys each, or a prefill of 8,192. Knows of no waits and no exponentials."""
    decode = kind == "decode"
    seq_lens = DECODE_LENS if decode else [PREFILL_LEN]
    query_lens = [1] * len(seq_lens) if decode else seq_lens
    least = attention_work(
        query_lens,
        seq_lens,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=spec.head_size,
        kv_itemsize=spec.dtype.itemsize,
    )
    config, work = scheduled_work(query_lens, seq_lens, spec, decode=decode)
    chip = CHIPS[chip_name]
    return config, least.seconds_on(chip) / work.seconds_on(chip)


def scheduled_work(
    query_lens: list[int], seq_lens: list[int], spec: KVSpec, *, decode: bool
) -> tuple[TuningConfig, Work]:
    """What the kernel's tiles move and multiply, padding included, as `gpu_work` plans them. Of a
    row's tiles that several thread blocks read, the memory sees one: the others find it cached."""
    group_size, tokens = NUM_HEADS // NUM_KV_HEADS, sum(query_lens)
    table_width = -(-max(seq_lens) // spec.block_size)
    rows = len(seq_lens)
    attn = GroupMetadata(
        jnp.zeros(tokens, jnp.int32),
        jnp.ones((rows, table_width), jnp.int32),
        jnp.asarray(seq_lens, jnp.int32),
        jnp.asarray(np.cumsum([0, *query_lens]), jnp.int32),
        jnp.int32(rows if decode else 0),
        jnp.int32(rows),
    )
    capacity = table_width * spec.block_size
    if decode:
        config = tune_decodes(spec, rows, group_size, capacity)
        tiles = gpu_work.decode_tiles(attn, rows, group_size, config.rows)
    else:
        config = tune_prefills(spec, tokens, rows, group_size, capacity)
        tiles = gpu_work.prefill_tiles(attn, 0, tokens, group_size, config.rows)
    spans = np.asarray(gpu_work.plan_work(tiles, attn, spec, None, config).spans, np.int64)
    key_tiles = (spans[..., gpu_work.END] - spans[..., gpu_work.FIRST]).sum()
    seen_tiles = sum(
        spans[np.asarray(tiles.row) == row][..., gpu_work.END].max() for row in range(rows)
    )
    head_size = stored_head_size(spec)
    tile_bytes = 2 * config.tile_len * head_size * spec.dtype.itemsize
    if is_quantized(spec.dtype):
        boxes = max(config.tile_len // spec.block_size, 1)
        tile_bytes += 2 * 4 * boxes * scale_box_len(spec, config.tile_len)
    of_queries = 2 * 2 * tokens * NUM_HEADS * head_size
    if config.splits > 1:  # each split's share, in float32, written and read again
        of_queries += 2 * 4 * config.splits * tokens * NUM_HEADS * head_size
    padded_rows = ROW_TILE_LEN * config.warpgroups
    flops = 4 * padded_rows * config.tile_len * head_size * key_tiles * NUM_KV_HEADS
    return config, Work(seen_tiles * NUM_KV_HEADS * tile_bytes + of_queries, flops)
