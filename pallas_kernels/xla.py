"""The fast portable back end: plain XLA operations, tuned for the CPU."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
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
from pallas_kernels.quantized_kv import decoded, is_quantized, stored, stored_dtype
from pallas_kernels.scoring import Scoring
from pallas_kernels.xla_attention import attend_decodes, attend_prefills


@dataclass(frozen=True)
class XlaBackend:
    """Keys and values apart, each KV head's share of a block together: keys by feature
    `[L*N, K, D, b]`, which is how a CPU multiplies a few queries fastest, values `[L*N, K, b, D]`;
    behind them, where they are bytes, their scales `[L*N, K, b]`.

    On the CPU give it a float32 pool: XLA's bfloat16 scatter there copies the whole pool.
    """

    name: str = "xla"

    def is_made_for(self, device_kind: str) -> bool:
        return False  # it runs anywhere: what `auto` takes is in `choose_backend`

    def for_device(self, device_kind: str) -> "XlaBackend":
        return self

    def refusal(self, spec: KVSpec) -> str | None:
        return None

    def layout(self, spec: KVSpec) -> PoolLayout:
        spec = check_spec(spec, quantized=True)
        by_head = (spec.num_layers * spec.num_blocks, spec.num_kv_heads)
        dtype, block_size = stored_dtype(spec.dtype), spec.block_size
        keys = jax.ShapeDtypeStruct((*by_head, spec.head_size, block_size), dtype)
        values = jax.ShapeDtypeStruct((*by_head, block_size, spec.head_size), dtype)
        partition = PartitionSpec(None, KV_HEADS, None, None)
        if not is_quantized(spec.dtype):
            return PoolLayout((keys, values), (partition, partition))
        scales = jax.ShapeDtypeStruct((*by_head, block_size), jnp.float32)
        of_scales = PartitionSpec(None, KV_HEADS, None)
        return PoolLayout(
            (keys, values, scales, scales), (partition, partition, of_scales, of_scales)
        )

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
        keys, *others = pool.arrays
        new_keys, *new_others = stored(k, v, pool.spec.dtype)
        keys = keys.at[block, :, :, offset].set(new_keys.astype(keys.dtype), mode="drop")
        others = [
            array.at[block, :, offset].set(new.astype(array.dtype), mode="drop")
            for array, new in zip(others, new_others, strict=True)
        ]
        return KVPool((keys, *others), pool.spec)

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        keys, values, *scales = blocks  # [M,K,D,b] [M,K,b,D]
        k, v = decoded(keys.swapaxes(2, 3), values, *scales, dtype=spec.dtype)
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

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
        decodes = attend_decodes(q[:decode_rows], pool, attn, scoring, layer=layer)
        prefills = attend_prefills(q[decode_rows:], pool, attn, scoring, layer=layer)
        return jnp.concatenate([decodes, prefills])
