"""Which layers share a block group, and how large each group's pool is."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp

from paged_jax.attention import LayerSpec
from pallas_kernels import KVSpec

__all__ = ["BlockGroup", "group_layers", "group_num_blocks", "kv_spec"]


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
