"""What the copying warpgroup of the Hopper kernel does: it looks up each block of its row in the
table and sends the copy engine (TMA) for it, a few tiles ahead.

Numbers of one byte cannot be multiplied with queries of two. Such tiles land somewhere else, and
the same warpgroup widens them into the ring, with the copies of later tiles on their way.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu_matrix_unit import MatrixUnit
from pallas_kernels.gpu_tuning import TuningConfig, scale_box_len
from pallas_kernels.pool import KVSpec

Ref = Any


class Ring(NamedTuple):
    """Tiles of keys and values in shared memory, ready to be multiplied, slot after slot."""

    keys: Ref  # [slots, J, D]
    values: Ref
    keys_ready: Ref  # barriers, one a slot
    values_ready: Ref
    used: Ref


class Landing(NamedTuple):
    """Where tiles of one byte a value arrive."""

    keys: Ref  # [stages, J, D]
    values: Ref
    key_scales: Ref  # [stages, scales of all copies]
    value_scales: Ref
    tight_scales: Ref  # [2, J], of keys and values of the tile at hand
    landed: Ref  # barriers, one a stage


class Place(NamedTuple):
    """Which keys a thread block walks: tiles `first` to `end` of a row, for one KV head."""

    row: Any
    head: Any
    first: Any
    end: Any


def copy_tiles(
    pool_refs, tables_ref, first_block_ref, ring: Ring, place: Place, spec: KVSpec, config
) -> None:
    """Fills the ring's slots in turn, each as soon as all warpgroups are done with it."""
    (pool_ref,) = pool_refs
    boxes = _Boxes(tables_ref, first_block_ref, place, spec, config)

    def copy_tile(i, nothing):
        slot = lax.rem(i - place.first, jnp.int32(config.stages))
        _await_use(ring, i - place.first, slot, config)
        for key_box, value_box, at in boxes.of_tile(i):
            plgpu.copy_gmem_to_smem(
                pool_ref.at[key_box], ring.keys.at[slot, at], ring.keys_ready.at[slot]
            )
            plgpu.copy_gmem_to_smem(
                pool_ref.at[value_box], ring.values.at[slot, at], ring.values_ready.at[slot]
            )
        return nothing

    lax.fori_loop(place.first, place.end, copy_tile, ())
    _drain(ring, place, config)


def copy_and_widen_tiles(
    pool_refs,
    tables_ref,
    first_block_ref,
    ring: Ring,
    landing: Landing,
    place: Place,
    spec: KVSpec,
    config: TuningConfig,
    unit: MatrixUnit,
) -> None:
    """The same for a pool of bytes and its scales: each tile lands, is widened, and is ready."""
    pool_ref, scales_ref = pool_refs
    boxes = _Boxes(tables_ref, first_block_ref, place, spec, config)

    scale_len = scale_box_len(spec, config.tile_len)

    def start_copies(i):
        stage = lax.rem(i - place.first, jnp.int32(config.stages))
        landed = landing.landed.at[stage]
        for number, (key_box, value_box, at) in enumerate(boxes.of_tile(i)):
            scales_at = pl.ds(number * scale_len, scale_len)
            for box, numbers, scales in (
                (key_box, landing.keys, landing.key_scales),
                (value_box, landing.values, landing.value_scales),
            ):
                plgpu.copy_gmem_to_smem(pool_ref.at[box], numbers.at[stage, at], landed)
                plgpu.copy_gmem_to_smem(scales_ref.at[box], scales.at[stage, scales_at], landed)

    def tight(which: int, scales, stage):
        """The scales of a tile's tokens, without those between that stand for none."""
        if scale_len == boxes.len:
            return scales.at[stage]
        for box in range(boxes.count):
            of_box = unit.column_vector(scales.at[stage, pl.ds(box * scale_len, boxes.len)])
            landing.tight_scales[which, pl.ds(box * boxes.len, boxes.len)] = of_box
        return landing.tight_scales.at[which]

    def widen(i):
        stage = lax.rem(i - place.first, jnp.int32(config.stages))
        slot = lax.rem(i - place.first, jnp.int32(config.wide_slots))
        plgpu.barrier_wait(landing.landed.at[stage])
        key_scales = tight(0, landing.key_scales, stage)
        value_scales = tight(1, landing.value_scales, stage)
        if scale_len != boxes.len:
            plgpu.commit_smem()  # each thread reads what others wrote
        _await_use(ring, i - place.first, slot, config)
        for narrow, scales, wide, ready in (
            (landing.keys, key_scales, ring.keys, ring.keys_ready),
            (landing.values, value_scales, ring.values, ring.values_ready),
        ):
            unit.widen(narrow.at[stage], scales, spec.dtype, wide.at[slot])
            # Also: no thread still reads what the next copies will overwrite.
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready.at[slot])

    def step(i, nothing):
        pl.when(i < place.end)(lambda: start_copies(i))
        behind = i - (config.stages - 1)
        pl.when(behind >= place.first)(lambda: widen(behind))
        return nothing

    steps_end = jnp.where(place.end > place.first, place.end + (config.stages - 1), place.end)
    lax.fori_loop(place.first, steps_end, step, ())
    _drain(ring, place, config)


class _Boxes:
    """The pieces of blocks that make up a tile: one copy each."""

    def __init__(
        self, tables_ref, first_block_ref, place: Place, spec: KVSpec, config: TuningConfig
    ):
        self.len = min(spec.block_size, config.tile_len)
        self.count = config.tile_len // self.len
        self._pieces = spec.block_size // self.len
        self._tables_ref, self._first_block = tables_ref, first_block_ref[0]
        self._place, self._spec = place, spec

    def of_tile(self, i):
        """Where the keys and the values of each box lie in the pool, and where in the tile."""
        pieces, last = jnp.int32(self._pieces), jnp.int32(self._tables_ref.shape[1] - 1)
        tables_ref, row = self._tables_ref, self._place.row
        for number in range(self.count):
            box = i * self.count + number  # among the row's boxes
            block = tables_ref[row, jnp.minimum(lax.div(box, pieces), last)]
            # An absent block's keys are masked: any block will do, the null block is always there.
            real = (block > 0) & (block < self._spec.num_blocks)
            block = jnp.where(real, block, 0) + self._first_block
            pair = (block * self._spec.num_kv_heads + self._place.head) * 2
            key_box = pair * self._pieces + lax.rem(box, pieces)
            yield key_box, key_box + self._pieces, pl.ds(number * self.len, self.len)


def _await_use(ring: Ring, count, slot, config: TuningConfig) -> None:
    """Waits until the tile that lies in the slot has been used, if one does."""

    @pl.when(count >= config.ring_len)
    def _():
        plgpu.barrier_wait(ring.used.at[slot])


def _drain(ring: Ring, place: Place, config: TuningConfig) -> None:
    """No barrier is left half used: whoever waits must have seen all that happened."""

    def drain(i, nothing):
        slot = lax.rem(i - place.first, jnp.int32(config.ring_len))
        plgpu.barrier_wait(ring.used.at[slot])
        return nothing

    lax.fori_loop(jnp.maximum(place.first, place.end - config.ring_len), place.end, drain, ())
