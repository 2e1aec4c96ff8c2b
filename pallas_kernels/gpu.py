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
from pallas_kernels.scoring import Scoring

HOPPER = re.compile(r"\bG?H(20|100|200|800)\b")


@dataclass(frozen=True)
class GpuBackend:
    """A block's tokens together for each KV head, keys before values: one `[L*N, K, 2, b, D]`.

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
        spec = check_spec(spec)
        if refusal := self.refusal(spec):
            raise ValueError(f"attention back end gpu cannot take {refusal}")
        layers, blocks, block_size, num_kv_heads, head_size, dtype = spec
        shape = (layers * blocks, num_kv_heads, 2, block_size, head_size)
        partition = PartitionSpec(None, KV_HEADS, None, None, None)
        return PoolLayout((jax.ShapeDtypeStruct(shape, dtype),), (partition,))

    def init_pool(self, spec: KVSpec) -> KVPool:
        return zeros_pool(self.layout(spec), check_spec(spec))

    def write_kv(
        self,
        pool: KVPool,
        k: Float[Array, "T K D"],
        v: Float[Array, "T K D"],
        slots: Int[Array, " T"],
        *,
        layer: Int[Array, ""],
    ) -> KVPool:
        (array,) = pool.arrays
        block = block_in_range(pool.spec, layer, slots // pool.spec.block_size)
        offset = slots % pool.spec.block_size
        new = jnp.stack([k, v], axis=2).astype(array.dtype)  # [T,K,2,D]
        written = array.at[block, :, :, offset].set(new, mode="drop")
        return KVPool((written,), pool.spec)

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        (pairs,) = blocks  # [M,K,2,b,D]
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
