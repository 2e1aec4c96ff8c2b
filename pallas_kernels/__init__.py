"""Attention over a paged KV cache, as pure JAX functions.

A pool holds the keys and values of all layers in blocks; a back end, chosen once by name, owns
its layout. Everything above sees block ids only.
"""

from pallas_kernels.gpu import GpuBackend
from pallas_kernels.metadata import AttentionMetadata, GroupMetadata
from pallas_kernels.ops import (
    copy_blocks,
    paged_attention,
    read_blocks,
    read_kv,
    write_blocks,
    write_kv,
)
from pallas_kernels.pool import KV_HEADS, KVPool, KVSpec, PoolLayout
from pallas_kernels.reference import ReferenceBackend
from pallas_kernels.registry import (
    Backend,
    backend_names,
    choose_backend,
    get_backend,
    register_backend,
)
from pallas_kernels.scoring import Scoring
from pallas_kernels.tpu import TpuBackend
from pallas_kernels.xla import XlaBackend

register_backend(ReferenceBackend())
register_backend(XlaBackend())
register_backend(GpuBackend())
register_backend(TpuBackend())

__all__ = [
    "KV_HEADS",
    "AttentionMetadata",
    "Backend",
    "GpuBackend",
    "GroupMetadata",
    "KVPool",
    "KVSpec",
    "PoolLayout",
    "Scoring",
    "TpuBackend",
    "backend_names",
    "choose_backend",
    "copy_blocks",
    "get_backend",
    "paged_attention",
    "read_blocks",
    "read_kv",
    "register_backend",
    "write_blocks",
    "write_kv",
]
