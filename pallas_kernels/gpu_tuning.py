"""Tile sizes of the Hopper kernel: which, for what, and how much shared memory they take."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.pool import KVSpec
from pallas_kernels.quantized_kv import is_quantized

ROW_TILE_LEN = 64  # rows that one warpgroup's matrix instruction multiplies
NUM_SMS = 132  # of H100 and H200 (SXM)
MAX_SMEM_BYTES = 232448  # that one thread block may take
OTHER_SMEM_BYTES = 3072  # of it, at most, for barriers, positions and sums
SCALE_BOX_LEN = 32  # scales of a block's keys, at least: copies want a place of 128 bytes
MIN_SPLIT_KEYS = 256  # fewer keys than this are not worth a thread block and a share in the combine
MAX_SPLITS = 32


@dataclass(frozen=True)
class TuningConfig:
    """How one call is cut: `rows` (query, head) pairs of a KV head against `tile_len` keys a time.

    `warpgroups` compute, 64 rows each, one more copies, `stages` tiles ahead. `splits` thread
    blocks share a row's keys. `fast_tiles` compiles a second loop for tiles that need no mask.
    Tiles of one byte a value are copied as they are and then widened, into `wide_slots`.
    """

    rows: int
    warpgroups: int
    tile_len: int
    stages: int
    splits: int
    fast_tiles: bool
    wide_slots: int = 0

    def __post_init__(self) -> None:
        if self.rows % 8 or not 8 <= self.rows <= ROW_TILE_LEN * self.warpgroups:
            raise ValueError(f"{self.rows=} must be a multiple of 8, 64 at most a warpgroup")
        if self.warpgroups > 1 and self.rows != ROW_TILE_LEN * self.warpgroups:
            raise ValueError(f"{self.rows=} must fill {self.warpgroups=}, 64 rows each")
        if self.tile_len % ROW_TILE_LEN or not 64 <= self.tile_len <= 256:
            raise ValueError(f"{self.tile_len=} must be 64, 128, 192 or 256")
        if self.stages + self.wide_slots < 2 or self.stages < 1 or self.splits < 1:
            raise ValueError(f"{self.stages=} must be at least 2, and {self.splits=} at least 1")

    @property
    def ring_len(self) -> int:
        """How many tiles can lie ready to be multiplied."""
        return self.wide_slots or self.stages

    def smem_bytes(self, spec: KVSpec, exact: bool) -> int:
        """Shared memory that the copies and the results take."""
        itemsize = unit_dtype(spec).itemsize
        out_itemsize = 4 if exact or self.splits > 1 else itemsize
        of_rows = ROW_TILE_LEN * self.warpgroups * (itemsize + out_itemsize)
        of_keys = 2 * self.ring_len * self.tile_len * itemsize
        if not self.wide_slots:
            return (of_rows + of_keys) * spec.head_size
        of_keys += 2 * self.stages * self.tile_len
        boxes = max(self.tile_len // spec.block_size, 1)
        of_scales = 4 * self.stages * boxes * scale_box_len(spec, self.tile_len)
        of_scales += 4 * self.tile_len
        return (of_rows + of_keys) * stored_head_size(spec) + 2 * of_scales


def unit_dtype(spec: KVSpec) -> jnp.dtype:
    """What the matrix unit multiplies: the pool's own dtype, or bfloat16, which holds whatever one
    byte does."""
    return jnp.dtype("bfloat16") if is_quantized(spec.dtype) else spec.dtype


def stored_head_size(spec: KVSpec) -> int:
    """Values of a head in the pool: where they are bytes, rows of a whole pattern of 32."""
    return -(-spec.head_size // 32) * 32 if is_quantized(spec.dtype) else spec.head_size


def scale_box_len(spec: KVSpec, tile_len: int) -> int:
    """Scales that one copy fetches, those that stand for no token included."""
    return max(min(spec.block_size, tile_len), SCALE_BOX_LEN)


def swizzle_bytes(head_size: int, itemsize: int) -> int:
    """The widest pattern of shared memory that divides a head's row: 128, 64 or 32 bytes."""
    row_bytes = head_size * itemsize
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)


def refusal(spec: KVSpec) -> str | None:
    """What the kernel cannot take about a pool, by name and value, or None."""
    if spec.dtype.name not in ("bfloat16", "float16") and not is_quantized(spec.dtype):
        return f"dtype {spec.dtype.name}: the matrix unit multiplies bfloat16 and float16"
    if spec.head_size % 16 or not 16 <= spec.head_size <= 256:
        return f"head_size {spec.head_size}: the kernel takes multiples of 16 up to 256"
    block_size = spec.block_size
    if block_size % 8 or (ROW_TILE_LEN % block_size and block_size % ROW_TILE_LEN):
        return f"block_size {block_size}: the kernel takes 8, 16, 32, 64 and multiples of 64"
    return None


_DEPTHS = ((4, 0), (3, 0), (2, 0))  # stages, wide slots
_BYTE_DEPTHS = ((4, 2), (3, 2), (2, 2), (2, 1), (1, 1))


def tune_decodes(
    spec: KVSpec, num_rows: int, group_size: int, capacity: int, exact: bool = False
) -> TuningConfig:
    """For `num_rows` queries, one each: a tile holds the heads of one KV head, or a part."""
    pieces = -(-group_size // ROW_TILE_LEN)
    return tune(
        spec,
        num_tiles=lambda _: num_rows * pieces,
        rows=-(-group_size // pieces),
        capacity=capacity,
        exact=exact,
    )


def tune_prefills(
    spec: KVSpec, num_tokens: int, num_chunks: int, group_size: int, capacity: int, exact=False
) -> TuningConfig:
    """For the queries of a few chunks: a tile holds those of one chunk, heads side by side."""
    return tune(
        spec,
        num_tiles=lambda rows: num_tokens * group_size // rows + num_chunks,
        rows=min(num_tokens * group_size, 2 * ROW_TILE_LEN),
        capacity=capacity,
        exact=exact,
    )


def tune(
    spec: KVSpec, *, num_tiles: Callable[[int], int], rows: int, capacity: int, exact: bool = False
) -> TuningConfig:
    """For tiles of at most `rows` rows a KV head, over `capacity` keys.

    `num_tiles` says how many tiles there are of so many rows each. `exact` results are float32
    until the splits, or the sinks, are in.
    """
    depths = _BYTE_DEPTHS if is_quantized(spec.dtype) else _DEPTHS
    configs = [
        config
        for warpgroups in ((2, 1) if rows > ROW_TILE_LEN else (1,))
        for depth in depths
        for config in [_config(spec, num_tiles, rows, warpgroups, depth, capacity)]
        if config.smem_bytes(spec, exact) <= MAX_SMEM_BYTES - OTHER_SMEM_BYTES
    ]
    return configs[0]


def _config(
    spec: KVSpec,
    num_tiles: Callable[[int], int],
    rows: int,
    warpgroups: int,
    depth: tuple[int, int],
    capacity: int,
) -> TuningConfig:
    rows = min(-(-rows // 8) * 8, ROW_TILE_LEN) if warpgroups == 1 else ROW_TILE_LEN * warpgroups
    blocks_per_split = max(num_tiles(rows) * spec.num_kv_heads, 1)
    wanted = -(-2 * NUM_SMS // blocks_per_split)
    splits = max(min(wanted, -(-capacity // MIN_SPLIT_KEYS), MAX_SPLITS), 1)
    stages, wide_slots = depth
    return TuningConfig(rows, warpgroups, ROW_TILE_LEN, stages, splits, warpgroups > 1, wide_slots)
