"""The TPU back end: Pallas kernels that copy blocks through the block table while they attend."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import (
    KV_HEADS,
    KVPool,
    KVSpec,
    PoolLayout,
    block_in_range,
    check_spec,
    zeros_pool,
)
from pallas_kernels.scoring import Scoring
from pallas_kernels.tpu_attention import Setup, attend_decodes, attend_prefills
from pallas_kernels.tpu_loads import Loads
from pallas_kernels.tpu_slab import Slab
from pallas_kernels.tpu_tuning import CHIPS, INTERPRETED, Chip
from pallas_kernels.tpu_write import write_tokens


@dataclass(frozen=True)
class TpuBackend:
    """All of a token's keys and values together: one array `[L*N, b, C, p, 128]` of `Slab`s.

    Until `for_device` names a TPU the kernels are interpreted: right, and slow.
    """

    name: str = "tpu"
    chip: Chip = INTERPRETED
    interpret: bool | pltpu.InterpretParams = True
    """How, where the chip is `INTERPRETED`."""
    loads: Loads = "strided"

    def is_made_for(self, device_kind: str) -> bool:
        return device_kind in CHIPS

    def for_device(self, device_kind: str) -> "TpuBackend":
        return replace(self, chip=CHIPS.get(device_kind, INTERPRETED))

    def refusal(self, spec: KVSpec) -> str | None:
        dtype = jnp.dtype(spec.dtype)
        if dtype.name == "float16":
            return "a pool of dtype float16: TPUs have none; bfloat16 has the same size"
        if dtype.itemsize == 1:
            return f"a pool of dtype {dtype.name}: it has no place for the scales of each token"
        if self.chip.name != INTERPRETED.name and spec.block_size % 8:
            return f"block_size={spec.block_size}: a TPU wants a multiple of 8"
        return None

    def layout(self, spec: KVSpec) -> PoolLayout:
        spec = self._checked(spec)
        shape = (spec.num_layers * spec.num_blocks, spec.block_size, *_slab(spec).shape)
        partition = PartitionSpec(None, None, KV_HEADS, None, None)
        return PoolLayout((jax.ShapeDtypeStruct(shape, spec.dtype),), (partition,))

    def init_pool(self, spec: KVSpec) -> KVPool:
        return zeros_pool(self.layout(spec), self._checked(spec))

    def write_kv(
        self,
        pool: KVPool,
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        slots: Int[Array, " T"],
        *,
        layer: Int[Array, ""],
    ) -> KVPool:
        spec = pool.spec
        block, offset = slots // spec.block_size, slots % spec.block_size
        index = block_in_range(spec, layer, block)
        # Padding tokens all go to one slot of the null block, which nobody reads.
        index = jnp.where(block == 0, spec.num_layers * spec.num_blocks, index)
        new = _slab(spec).pack(k, v)
        array = write_tokens(pool.arrays[0], new, index, offset, interpret=self._interpret)
        return KVPool((array,), spec)

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        return _slab(spec).unpack(blocks[0])

    def paged_attention(
        self,
        q: Float[Array, "T H D"],
        pool: KVPool,
        attn: GroupMetadata,
        scoring: Scoring,
        *,
        layer: Int[Array, ""],
        decode_rows: int,
    ) -> Float[Array, "T H D"]:
        if q.dtype == jnp.float16:
            raise ValueError("q has dtype float16: the tpu back end takes bfloat16 and float32")
        setup = Setup(_slab(pool.spec), self.chip, self.loads, self._interpret)
        decodes = attend_decodes(q[:decode_rows], pool, attn, scoring, layer=layer, setup=setup)
        prefills = attend_prefills(q[decode_rows:], pool, attn, scoring, layer=layer, setup=setup)
        return jnp.concatenate([decodes, prefills])

    @property
    def _interpret(self) -> bool | pltpu.InterpretParams:
        return self.interpret if self.chip.name == INTERPRETED.name else False

    def _checked(self, spec: KVSpec) -> KVSpec:
        if refusal := self.refusal(spec):
            raise ValueError(f"the tpu back end cannot take {refusal}")
        return check_spec(spec)


def _slab(spec: KVSpec) -> Slab:
    return Slab(spec.num_kv_heads, spec.head_size, jnp.dtype(spec.dtype))
