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
from pallas_kernels.quantized_kv import decoded, is_quantized, stored
from pallas_kernels.scoring import Scoring
from pallas_kernels.tpu_attention import Setup, attend_decodes, attend_prefills
from pallas_kernels.tpu_loads import Loads
from pallas_kernels.tpu_slab import LANES, Slab
from pallas_kernels.tpu_tuning import CHIPS, INTERPRETED, Chip
from pallas_kernels.tpu_write import write_scales, write_tokens


@dataclass(frozen=True)
class TpuBackend:
    """All of a token's keys and values together: one array `[L*N, b, C, p, 128]` of `Slab`s;
    behind it, where they are bytes, their scales `[L*N, S, R, 128]`, a token in a lane.

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
        size = spec.block_size
        if self.chip.name != INTERPRETED.name and size % 8:
            return f"block_size={size}: a TPU wants a multiple of 8"
        if is_quantized(dtype) and LANES % size and size % LANES:
            return f"block_size={size} with dtype {dtype.name}: no power of two below {LANES}"
        return None

    def layout(self, spec: KVSpec) -> PoolLayout:
        spec = self._checked(spec)
        slab, blocks = _slab(spec), spec.num_layers * spec.num_blocks
        slabs = jax.ShapeDtypeStruct((blocks, spec.block_size, *slab.shape), slab.stored)
        partition = PartitionSpec(None, None, KV_HEADS, None, None)
        if not slab.is_quantized:
            return PoolLayout((slabs,), (partition,))
        scales = jax.ShapeDtypeStruct((blocks, *slab.scales_shape(spec.block_size)), jnp.float32)
        return PoolLayout((slabs, scales), (partition, PartitionSpec(None, None, KV_HEADS, None)))

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
        slab = _slab(spec)
        keys, values, *scales = stored(k, v, spec.dtype)
        slabs, *others = pool.arrays
        new = slab.pack(keys, values)
        where = {"index": index, "offset": offset, "interpret": self._interpret}
        slabs = write_tokens(slabs, new, **where)
        if scales:
            others = [write_scales(others[0], slab.pack_scales(*scales), **where)]
        return KVPool((slabs, *others), spec)

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        slab, (slabs, *scales) = _slab(spec), blocks
        of_both = slab.unpack_scales(scales[0], spec.block_size) if scales else ()
        return decoded(*slab.unpack(slabs), *of_both, dtype=spec.dtype)

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
        setup = self.setup(pool.spec)
        decodes = attend_decodes(q[:decode_rows], pool, attn, scoring, layer=layer, setup=setup)
        prefills = attend_prefills(q[decode_rows:], pool, attn, scoring, layer=layer, setup=setup)
        return jnp.concatenate([decodes, prefills])

    def setup(self, spec: KVSpec) -> Setup:
        return Setup(_slab(spec), self.chip, self.loads, self._interpret)

    @property
    def _interpret(self) -> bool | pltpu.InterpretParams:
        return self.interpret if self.chip.name == INTERPRETED.name else False

    def _checked(self, spec: KVSpec) -> KVSpec:
        if refusal := self.refusal(spec):
            raise ValueError(f"the tpu back end cannot take {refusal}")
        return check_spec(spec, quantized=True)


def _slab(spec: KVSpec) -> Slab:
    return Slab(spec.num_kv_heads, spec.head_size, jnp.dtype(spec.dtype))
