"""The GPU back end: Mosaic GPU kernels for NVIDIA Hopper (compute capability 9.0)."""

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu_tuning
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
from pallas_kernels.quantized_kv import decode, is_quantized, stored, stored_dtype
from pallas_kernels.scoring import Scoring

HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


@dataclass(frozen=True)
class GpuBackend:
    """A block's tokens together for each KV head, keys before values: one `[L*N, K, 2, b, D]`;
    behind it, where it holds bytes, their scales `[L*N, K, 2, b]`. Of bytes D is a multiple of 32,
    and b of the scales at least 32, since copies go to places of 128 bytes.

    `interpret` holds parameters of Mosaic GPU's interpreter, to run without a GPU.
    """

    name: str = "gpu"
    interpret: Any = None

    def is_made_for(self, device_kind: str) -> bool:
        return HOPPER.search(device_kind) is not None

    def for_device(self, device_kind: str) -> "GpuBackend":
        return self

    def refusal(self, spec: KVSpec) -> str | None:
        return gpu_tuning.refusal(spec)

    def layout(self, spec: KVSpec) -> PoolLayout:
        spec = check_spec(spec, quantized=True)
        if refusal := self.refusal(spec):
            raise ValueError(f"attention back end gpu cannot take {refusal}")
        pairs = (spec.num_layers * spec.num_blocks, spec.num_kv_heads, 2)
        shape = (*pairs, spec.block_size, gpu_tuning.stored_head_size(spec))
        array = jax.ShapeDtypeStruct(shape, stored_dtype(spec.dtype))
        partition = PartitionSpec(None, KV_HEADS, None, None, None)
        if not is_quantized(spec.dtype):
            return PoolLayout((array,), (partition,))
        room = max(spec.block_size, gpu_tuning.SCALE_BOX_LEN)
        scales = jax.ShapeDtypeStruct((*pairs, room), jnp.float32)
        return PoolLayout((array, scales), (partition, PartitionSpec(None, KV_HEADS, None, None)))

    def init_pool(self, spec: KVSpec) -> KVPool:
        return zeros_pool(self.layout(spec), check_spec(spec, quantized=True))

    def write_kv(
        self,
        pool: KVPool,
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        slots: Int[Array, " T"],
        *,
        layer: Int[Array, ""],
    ) -> KVPool:
        block = block_in_range(pool.spec, layer, slots // pool.spec.block_size)
        offset = slots % pool.spec.block_size
        padding = gpu_tuning.stored_head_size(pool.spec) - pool.spec.head_size
        keys, values, *scales = stored(k, v, pool.spec.dtype)
        pairs = [jnp.pad(jnp.stack([keys, values], axis=2), ((0, 0),) * 3 + ((0, padding),))]
        pairs += [jnp.stack(scales, axis=2)] if scales else []  # [T,K,2,D] [T,K,2]
        arrays = tuple(
            array.at[block, :, :, offset].set(new.astype(array.dtype), mode="drop")
            for array, new in zip(pool.arrays, pairs, strict=True)
        )
        return KVPool(arrays, pool.spec)

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        pairs, *scales = blocks  # [M,K,2,b,D] [M,K,2,b]
        pairs = pairs[..., : spec.head_size]
        if scales:
            pairs = decode(pairs, scales[0][..., : spec.block_size], spec.dtype)
        return pairs[:, :, 0].swapaxes(1, 2), pairs[:, :, 1].swapaxes(1, 2)

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
        # Here, since Pallas takes a second to import and most machines have no use for it.
        from pallas_kernels.gpu_attention import attend_decodes, attend_prefills

        where = {"layer": layer, "interpret": self.interpret}
        decodes = attend_decodes(q[:decode_rows], pool, attn, scoring, **where)
        prefills = attend_prefills(q[decode_rows:], pool, attn, scoring, **where)
        return jnp.concatenate([decodes, prefills])
