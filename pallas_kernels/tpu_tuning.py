"""Tile sizes of the TPU kernels: a table keyed by chip, head size, dtype and block size."""

import math
from typing import NamedTuple

import jax.numpy as jnp

MIB = 2**20


class Chip(NamedTuple):
    """What the kernels need to know of a TPU."""

    name: str
    num_cores: int  # that one device of JAX's drives
    vmem_bytes: int  # of a core, that a kernel may use


# Each of the vendor's names of a chip: two cores of a v4 and a v5p are one device.
_V4 = Chip("v4", 2, 14 * MIB)
_V5E = Chip("v5e", 1, 100 * MIB)
_V5P = Chip("v5p", 2, 50 * MIB)
_V6E = Chip("v6e", 1, 100 * MIB)
_V7X = Chip("v7x", 1, 50 * MIB)
CHIPS = {
    "TPU v4": _V4,
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": _V7X,
}
# Not a chip: the kernels are interpreted on whatever device there is.
INTERPRETED = Chip("interpreted", 1, 100 * MIB)
MAX_FETCH_BLOCKS = 32


class TuningConfig(NamedTuple):
    """Tile sizes, in tokens."""

    fetch_len: int  # keys copied together
    tile_len: int  # keys attended to together
    query_tile: int  # queries of a row attended to together; a power of two


class Tiles(NamedTuple):
    """What fits a block size: `fetch_blocks * block_size` is a multiple of `tile_len`."""

    fetch_blocks: int
    tile_len: int
    query_tile: int


# (chip, what, lanes of a row, bytes of a value): the first match is taken; None matches anything.
_TABLE: tuple[tuple[tuple[str | None, str, int | None, int | None], TuningConfig], ...] = (
    (("interpreted", "decode", None, None), TuningConfig(128, 64, 1)),
    (("interpreted", "prefill", None, None), TuningConfig(128, 64, 32)),
    (("v4", "decode", None, None), TuningConfig(256, 256, 1)),
    (("v4", "prefill", None, None), TuningConfig(256, 256, 64)),
    ((None, "decode", None, None), TuningConfig(512, 256, 1)),
    ((None, "prefill", None, None), TuningConfig(512, 256, 64)),
)


def tuning(chip: Chip, what: str, *, lanes: int, dtype: jnp.dtype) -> TuningConfig:
    """The table's line for `what`, which is "decode" or "prefill"."""
    key = (chip.name, what, lanes, jnp.dtype(dtype).itemsize)
    for pattern, config in _TABLE:
        if all(p is None or p == k for p, k in zip(pattern, key, strict=True)):
            return config
    raise AssertionError(f"no line for {key}")


def tiles_for(config: TuningConfig, block_size: int, table_width: int) -> Tiles:
    """The nearest tiles that are made of whole blocks."""
    fetch_blocks = min(max(config.fetch_len // block_size, 1), MAX_FETCH_BLOCKS, table_width)
    tile_blocks = max(config.tile_len // block_size, 1)
    if fetch_blocks > tile_blocks:
        fetch_blocks -= fetch_blocks % tile_blocks
    fetch_len = fetch_blocks * block_size
    tile_len = math.gcd(fetch_len, config.tile_len)
    if fetch_len <= config.tile_len or tile_len < 8:
        tile_len = fetch_len
    return Tiles(fetch_blocks, tile_len, config.query_tile)
