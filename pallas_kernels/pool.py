"""The KV pool: its size, its arrays, and the one place where a block id becomes an index."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

MAX_INT32 = 2**31 - 1
KV_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # with scales; see `quantized_kv`

# Stands for the KV-head axis in a layout's partition specs; callers put their mesh axis there.
KV_HEADS = "kv_heads"


class KVSpec(NamedTuple):
    """Size of one block group's pool. Block 0 is the null block: written by padding, never read."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: jnp.dtype


class PoolLayout(NamedTuple):
    """How a back end stores a pool; axis 0 of every array is `layer * num_blocks + block_id`."""

    arrays: tuple[jax.ShapeDtypeStruct, ...]
    partition_specs: tuple[jax.sharding.PartitionSpec, ...]

    @property
    def num_bytes(self) -> int:
        return sum(a.dtype.itemsize * int(np.prod(a.shape, dtype=object)) for a in self.arrays)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["spec"])
@dataclass(frozen=True)
class KVPool:
    """Keys and values of all layers of one block group; only its back end knows the arrays.

    A value: the functions that write return a new pool. Donate the old one to `jax.jit` and the
    new one takes its memory.
    """

    arrays: tuple[jax.Array, ...]
    spec: KVSpec


def check_spec(spec: KVSpec, *, quantized: bool = False) -> KVSpec:
    """Returns the spec with a canonical dtype, or raises `ValueError` naming what is wrong.

    `quantized` says that the back end can take a pool of one byte a value.

    Block indices and slots are int32, so `num_layers * num_blocks` and
    `num_blocks * block_size` must fit; the elements of a pool may exceed int32.
    """
    for name in ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_size"):
        value = getattr(spec, name)
        if not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"KVSpec.{name} must be a positive integer, got {value!r}")
    dtype = jnp.dtype(spec.dtype)
    allowed = KV_DTYPES + QUANTIZED_DTYPES if quantized else KV_DTYPES
    if dtype.name not in allowed:
        raise ValueError(f"KVSpec.dtype must be one of {', '.join(allowed)}, got {dtype.name}")
    num_layers, num_blocks, block_size = spec.num_layers, spec.num_blocks, spec.block_size
    if num_layers * num_blocks > MAX_INT32:
        raise ValueError(
            f"{num_layers=} times {num_blocks=} is {num_layers * num_blocks}, past the int32"
            f" range {MAX_INT32} of block indices: use fewer or larger blocks"
        )
    if num_blocks * block_size > MAX_INT32:
        raise ValueError(
            f"{num_blocks=} times {block_size=} is {num_blocks * block_size}, past the int32"
            f" range {MAX_INT32} of slots: use a smaller pool"
        )
    return spec._replace(dtype=dtype)


def zeros_pool(layout: PoolLayout, spec: KVSpec) -> KVPool:
    """A pool of zeros on the default device."""
    return KVPool(tuple(jnp.zeros(a.shape, a.dtype) for a in layout.arrays), spec)


def block_in_range(
    spec: KVSpec, layer: Int[Array, ""], block_ids: Int[Array, "..."]
) -> Int[Array, "..."]:
    """Index along axis 0 of a block in a layer, or `num_layers * num_blocks`, which is past the
    end, if the layer or the block does not exist.

    Never negative and never another layer's block, so that a scatter with `mode="drop"` drops it
    and a gather with `mode="fill"` fills it.
    """
    exists = (block_ids >= 0) & (block_ids < spec.num_blocks)
    exists &= (layer >= 0) & (layer < spec.num_layers)
    # An absent block must not enter the product: the sum could wrap around int32.
    index = jnp.where(exists, layer, 0) * spec.num_blocks + jnp.where(exists, block_ids, 0)
    return jnp.where(exists, index, spec.num_layers * spec.num_blocks)
