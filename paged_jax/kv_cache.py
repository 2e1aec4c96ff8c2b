"""Which layers share a block group, how large each group's pool is, and where its arrays lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paged_jax.attention import LayerSpec
from pallas_kernels import KV_HEADS, Backend, KVPool, KVSpec

__all__ = [
    "BlockGroup",
    "group_layers",
    "group_num_blocks",
    "init_pool",
    "kv_spec",
    "pool_shapes",
    "values_shardings",
]


@dataclass(frozen=True)
class BlockGroup:
    """Layers whose blocks are handed out together: same window, heads, head size and dtype."""

    window: int | None
    num_kv_heads: int
    head_size: int
    dtype: jnp.dtype
    layers: tuple[int, ...]


def group_layers(
    layers: Sequence[LayerSpec], max_model_len: int
) -> tuple[tuple[BlockGroup, ...], tuple[tuple[int, int], ...]]:
    """Block groups in the order of their first layer, and for each layer (group, index in it).

    A window that no sequence outgrows is full attention.
    """
    members: dict[tuple[int | None, int, int, jnp.dtype], list[int]] = {}
    for number, layer in enumerate(layers):
        window = layer.window if layer.window and layer.window < max_model_len else None
        key = (window, layer.num_kv_heads, layer.head_size, layer.dtype)
        members.setdefault(key, []).append(number)
    groups = tuple(BlockGroup(*key, tuple(numbers)) for key, numbers in members.items())
    slots = {
        number: (g, index)
        for g, group in enumerate(groups)
        for index, number in enumerate(group.layers)
    }
    return groups, tuple(slots[number] for number in range(len(layers)))


def kv_spec(group: BlockGroup, *, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVSpec:
    return KVSpec(
        num_layers=len(group.layers),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=group.num_kv_heads,
        head_size=group.head_size,
        dtype=dtype,
    )


def group_num_blocks(
    groups: Sequence[BlockGroup],
    num_blocks: int,
    *,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> tuple[int, ...]:
    """Blocks of each group, the null block included: a window group needs no more than its
    sequences can see at once, and never more than a full one."""

    def needed(window: int | None) -> int:
        if window is None:
            return num_blocks
        # What a row sees, the part of a step being written, and one block begun at either end.
        seen = max_num_seqs * (-(-window // block_size) + 2)
        return min(num_blocks, seen + -(-max_num_batched_tokens // block_size) + 1)

    return tuple(needed(group.window) for group in groups)


def pool_shapes(backend: Backend, spec: KVSpec, mesh: Mesh) -> KVPool:
    """The arrays of a pool over a mesh, as shapes with shardings. `spec` is of one device's part:
    a back end lays out whole parts, whatever it does with the heads in one."""
    layout = backend.layout(spec)

    def whole(part: jax.ShapeDtypeStruct, partition: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape = list(part.shape)
        shape[partition.index(KV_HEADS)] *= mesh.shape[KV_HEADS]
        return jax.ShapeDtypeStruct(shape, part.dtype, sharding=NamedSharding(mesh, partition))

    return KVPool(tuple(map(whole, layout.arrays, layout.partition_specs)), spec)


def init_pool(backend: Backend, spec: KVSpec, mesh: Mesh) -> KVPool:
    """An empty pool, each device's part made there."""
    parts = []
    for device in mesh.devices.flat:
        with jax.default_device(device):
            parts.append(jax.device_put(backend.init_pool(spec).arrays, device))
    shapes = pool_shapes(backend, spec, mesh).arrays
    arrays = (
        jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, list(of_each))
        for whole, of_each in zip(shapes, zip(*parts, strict=True), strict=True)
    )
    return KVPool(tuple(arrays), spec)


def values_shardings(pool: KVPool) -> tuple[NamedSharding, ...]:
    """Of what `read_blocks` gives of a pool: an axis of layers stands before those of a block."""
    return tuple(
        NamedSharding(array.sharding.mesh, PartitionSpec(None, *array.sharding.spec))
        for array in pool.arrays
    )
