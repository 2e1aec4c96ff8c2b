"""The oracle: plain jnp, slow and obvious. Every row is gathered whole and attended densely."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

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
from pallas_kernels.quantized_kv import decode, decoded, is_quantized, stored, stored_dtype
from pallas_kernels.scoring import Scoring


@dataclass(frozen=True)
class ReferenceBackend:
    """Keys and values side by side, token-major: two arrays `[L*N, b, K, D]`; behind them, where
    they are bytes, their scales `[L*N, b, K]`."""

    name: str = "reference"

    def is_made_for(self, device_kind: str) -> bool:
        return False  # it runs anywhere: what `auto` takes is in `choose_backend`

    def for_device(self, device_kind: str) -> "ReferenceBackend":
        return self

    def refusal(self, spec: KVSpec) -> str | None:
        return None

    def layout(self, spec: KVSpec) -> PoolLayout:
        spec = check_spec(spec, quantized=True)
        rows = (spec.num_layers * spec.num_blocks, spec.block_size, spec.num_kv_heads)
        array = jax.ShapeDtypeStruct((*rows, spec.head_size), stored_dtype(spec.dtype))
        partition = PartitionSpec(None, None, KV_HEADS, None)
        if not is_quantized(spec.dtype):
            return PoolLayout((array, array), (partition, partition))
        scales = jax.ShapeDtypeStruct(rows, jnp.float32)
        of_scales = PartitionSpec(None, None, KV_HEADS)
        return PoolLayout(
            (array, array, scales, scales), (partition, partition, of_scales, of_scales)
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
        arrays = tuple(
            array.at[block, offset].set(new.astype(array.dtype), mode="drop")
            for array, new in zip(pool.arrays, stored(k, v, pool.spec.dtype), strict=True)
        )
        return KVPool(arrays, pool.spec)

    def unpack(
        self, blocks: tuple[jax.Array, ...], spec: KVSpec
    ) -> tuple[Float[Array, "M b K D"], Float[Array, "M b K D"]]:
        return decoded(*blocks, dtype=spec.dtype)

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
        tokens = jnp.arange(q.shape[0], dtype=jnp.int32)

        def one_row(row, out):
            start, end = attn.query_start_loc[row], attn.query_start_loc[row + 1]
            position = attn.seq_lens[row] - (end - start) + (tokens - start)
            in_row = (tokens >= start) & (tokens < end) & (attn.seq_lens[row] > 0)
            position = jnp.where(in_row, position, -1)
            k, v, exists = _gather(pool, layer, attn.block_tables[row])
            return jnp.where(
                in_row[:, None, None], _attend(q, k, v, exists, position, scoring), out
            )

        out = jnp.zeros(q.shape, jnp.float32)
        return lax.fori_loop(0, attn.seq_lens.shape[0], one_row, out).astype(q.dtype)


def _gather(
    pool: KVPool, layer: Int[Array, ""], block_table: Int[Array, " B"]
) -> tuple[Float[Array, "J K D"], Float[Array, "J K D"], Bool[Array, " J"]]:
    """All the row's slots in order: keys and values `[B*b, K, D]` in float32, and which exist."""
    spec = pool.spec
    index = block_in_range(spec, layer, block_table)
    keys, values, *scales = (
        array.at[index].get(mode="fill", fill_value=0) for array in pool.arrays
    )
    if scales:
        keys, values = decode(keys, scales[0], spec.dtype), decode(values, scales[1], spec.dtype)
    k, v = (
        x.astype(jnp.float32).reshape(-1, spec.num_kv_heads, spec.head_size) for x in (keys, values)
    )
    exists = (block_table > 0) & (index < spec.num_layers * spec.num_blocks)
    return k, v, jnp.repeat(exists, spec.block_size)


def _attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "J K D"],
    v: Float[Array, "J K D"],
    exists: Bool[Array, " J"],
    position: Int[Array, " T"],
    scoring: Scoring,
) -> Float[Array, "T H D"]:
    """Every query against every key of one row; queries with a negative position give 0."""
    group_size = q.shape[1] // k.shape[1]
    key_position = jnp.arange(k.shape[0], dtype=jnp.int32)[None, :]
    seen = exists[None, :] & (key_position <= position[:, None])
    if scoring.window is not None:
        seen &= key_position > position[:, None] - scoring.window
    k = jnp.where(seen.any(axis=0)[:, None, None], k, 0)
    v = jnp.where(seen.any(axis=0)[:, None, None], v, 0)
    if scoring.k_scale is not None:
        k = k * scoring.k_scale[None, :, None]
    if scoring.v_scale is not None:
        v = v * scoring.v_scale[None, :, None]
    k, v = jnp.repeat(k, group_size, axis=1), jnp.repeat(v, group_size, axis=1)

    scores = jnp.einsum("thd,jhd->thj", q.astype(jnp.float32), k, precision="highest")
    scores = scores * jnp.float32(scoring.scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    seen = seen[:, None, :]
    top = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-1e30)
    if scoring.sinks is not None:
        top = jnp.maximum(top, scoring.sinks[None, :, None])
    weights = jnp.where(seen, jnp.exp(scores - top), 0)
    total = weights.sum(axis=-1, keepdims=True)
    if scoring.sinks is not None:
        total = total + jnp.exp(scoring.sinks[None, :, None] - top)
    weights = weights / jnp.where(total > 0, total, 1)
    return jnp.einsum("thj,jhd->thd", weights, v, precision="highest")
