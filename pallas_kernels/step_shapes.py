"""One layer's write and attention, as a function and the shapes of its arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.metadata import GroupMetadata
from pallas_kernels.pool import KVPool, KVSpec
from pallas_kernels.registry import Backend
from pallas_kernels.scoring import Scoring

NUM_HEADS, NUM_KV_HEADS = 32, 8  # Llama-3-8B's
STEPS = {  # tokens of a step
    "decode": {"decode_rows": 64},
    "prefill": {"chunk_tokens": 2048},
}


def attention_program(
    backend: Backend,
    head_size: int,
    *,
    dtype: str = "bfloat16",
    block_size: int = 16,
    decode_rows: int = 0,
    chunk_tokens: int = 0,
    table_width: int = 256,
) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """For 32 heads over 8 KV heads in a pool of `dtype`: a function `(pool, q, k, v, attn)`, the
    shapes of its arguments, and the pool's size in bytes. Queries are float32 over a pool of that,
    and bfloat16 over any other."""
    spec = KVSpec(2, 4096, block_size, NUM_KV_HEADS, head_size, jnp.dtype(dtype))
    layout = backend.layout(spec)
    layer = jnp.int32(1)

    def program(pool, q, k, v, attn):
        pool = backend.write_kv(pool, k, v, attn.slot_mapping, layer=layer)
        scoring = Scoring(head_size**-0.5, None, None, None, None, None)
        out = backend.paged_attention(q, pool, attn, scoring, layer=layer, decode_rows=decode_rows)
        return out, pool

    tokens, rows = decode_rows + chunk_tokens, decode_rows + (4 if chunk_tokens else 0)

    def integers(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.int32)

    attn = GroupMetadata(
        integers(tokens),
        integers(rows, table_width),
        integers(rows),
        integers(rows + 1),
        integers(),
        integers(),
    )
    q_dtype = jnp.float32 if dtype == "float32" else jnp.bfloat16
    q = jax.ShapeDtypeStruct((tokens, NUM_HEADS, head_size), q_dtype)
    kv = jax.ShapeDtypeStruct((tokens, NUM_KV_HEADS, head_size), q_dtype)
    return program, (KVPool(layout.arrays, spec), q, kv, kv, attn), layout.num_bytes
