"""Checks made while tracing, the same for every back end: shapes, dtypes, static values.

Each raises `ValueError` (`TypeError` for a wrong type) that names the argument and its value.
What is only known on the device (ids, lengths) is made harmless there instead.
"""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.pool import MAX_INT32, KVPool

QUERY_DTYPES = ("float32", "bfloat16", "float16")


def check_attention(
    q: jax.Array,
    pool: KVPool,
    attn: AttentionMetadata,
    *,
    layer: Any,
    group: Any,
    decode_rows: Any,
) -> None:
    num_heads, head_size = _shape("q", q, "T H D")[1:]
    _check_dtype("q", q, QUERY_DTYPES)
    spec = pool.spec
    if head_size != spec.head_size:
        raise ValueError(f"q has head_size {head_size}, the pool has {spec.head_size}")
    if num_heads == 0 or num_heads % spec.num_kv_heads:
        raise ValueError(
            f"q has num_heads {num_heads}, not a multiple of the pool's num_kv_heads"
            f" {spec.num_kv_heads}"
        )
    check_layer(layer, spec.num_layers)
    check_group(group, attn)
    num_tokens = q.shape[0]
    check_metadata(attn, num_tokens)
    num_rows = attn.seq_lens.shape[0]
    if not _is_int(decode_rows) or not 0 <= decode_rows <= min(num_rows, num_tokens):
        raise ValueError(
            f"decode_rows must be a Python int from 0 to {min(num_rows, num_tokens)}"
            f" ({num_rows} rows, {num_tokens} tokens), got {decode_rows!r}"
        )
    if num_tokens > decode_rows and num_rows == decode_rows:
        raise ValueError(
            f"{num_tokens} tokens but decode_rows={decode_rows} of {num_rows} rows:"
            " no row is left for the prefill tokens"
        )


def check_write(
    k: jax.Array,
    v: jax.Array,
    pool: KVPool,
    attn: AttentionMetadata,
    *,
    layer: Any,
    group: Any,
) -> None:
    spec = pool.spec
    for name, array in (("k", k), ("v", v)):
        num_tokens, num_kv_heads, head_size = _shape(name, array, "T K D")
        _check_dtype(name, array, QUERY_DTYPES)
        if (num_kv_heads, head_size) != (spec.num_kv_heads, spec.head_size):
            raise ValueError(
                f"{name} has shape {array.shape}, the pool wants"
                f" [T, {spec.num_kv_heads}, {spec.head_size}]"
            )
    if k.shape != v.shape:
        raise ValueError(f"k has shape {k.shape}, v has {v.shape}")
    check_layer(layer, spec.num_layers)
    check_group(group, attn)
    check_metadata(attn, num_tokens)


def check_metadata(attn: AttentionMetadata, num_tokens: int) -> None:
    groups, slots = _shape("slot_mapping", attn.slot_mapping, "G T")
    table_groups, num_rows, table_width = _shape("block_tables", attn.block_tables, "G S B")
    for name in ("slot_mapping", "block_tables", "seq_lens", "query_start_loc"):
        _check_dtype(name, getattr(attn, name), ("int32",))
    if slots != num_tokens:
        raise ValueError(f"slot_mapping has shape {(groups, slots)} for {num_tokens} tokens")
    if table_groups != groups:
        raise ValueError(f"block_tables has {table_groups} groups, slot_mapping has {groups}")
    if table_width == 0:
        raise ValueError("block_tables has no columns")
    if attn.seq_lens.shape != (num_rows,):
        raise ValueError(f"seq_lens has shape {attn.seq_lens.shape}, expected {(num_rows,)}")
    if attn.query_start_loc.shape != (num_rows + 1,):
        raise ValueError(
            f"query_start_loc has shape {attn.query_start_loc.shape}, expected {(num_rows + 1,)}"
        )


def check_layer(layer: Any, num_layers: int) -> None:
    """A Python integer must lie in the pool; a traced one is checked on the device."""
    if _is_int(layer):
        if not 0 <= layer < num_layers:
            raise ValueError(f"layer {layer} is outside the pool's {num_layers} layers")
    elif not isinstance(layer, jax.Array | np.ndarray):
        raise TypeError(f"layer must be an int or an int32 scalar, got {layer!r}")
    elif layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise ValueError(f"layer must be an int32 scalar, got {layer.dtype}{list(layer.shape)}")


def check_group(group: Any, attn: AttentionMetadata) -> None:
    num_groups = attn.slot_mapping.shape[0]
    if not _is_int(group) or not 0 <= group < num_groups:
        raise ValueError(f"group must be a Python int below {num_groups}, got {group!r}")


def check_scoring(
    *,
    num_heads: int,
    num_kv_heads: int,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    if window is not None and (not _is_int(window) or not 1 <= window <= MAX_INT32):
        raise ValueError(f"window must be a positive Python int (int32) or None, got {window!r}")
    if softcap is not None and (not _is_number(softcap) or not 0 < softcap < float("inf")):
        raise ValueError(f"softcap must be a positive finite number or None, got {softcap!r}")
    if _is_number(scale) and not np.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale!r}")
    if not _is_number(scale) and np.shape(scale) != ():
        raise ValueError(f"scale must be a number, got shape {np.shape(scale)}")
    if sinks is not None and np.shape(sinks) != (num_heads,):
        raise ValueError(f"sinks has shape {np.shape(sinks)}, expected {(num_heads,)}")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None and np.shape(value) not in ((), (num_kv_heads,)):
            raise ValueError(
                f"{name} has shape {np.shape(value)}, expected () or {(num_kv_heads,)}"
            )


def check_block_ids(name: str, ids: jax.Array, num_ids: int | None = None) -> None:
    (length,) = _shape(name, ids, "M")
    _check_dtype(name, ids, ("int32",))
    if num_ids is not None and length != num_ids:
        raise ValueError(f"{name} has {length} block ids, expected {num_ids}")


def check_block_values(values: tuple[jax.Array, ...], pool: KVPool, num_ids: int) -> None:
    if len(values) != len(pool.arrays):
        raise ValueError(f"values has {len(values)} arrays, the pool has {len(pool.arrays)}")
    for i, (value, array) in enumerate(zip(values, pool.arrays, strict=True)):
        expected = (num_ids, pool.spec.num_layers, *array.shape[1:])
        if value.shape != expected or value.dtype != array.dtype:
            raise ValueError(
                f"values[{i}] is {value.dtype}{list(value.shape)},"
                f" expected {array.dtype}{list(expected)}"
            )


def _shape(name: str, array: jax.Array, axes: str) -> tuple[int, ...]:
    shape = np.shape(array)
    if len(shape) != len(axes.split()):
        raise ValueError(f"{name} must have axes [{axes}], got shape {shape}")
    return shape


def _check_dtype(name: str, array: jax.Array, allowed: tuple[str, ...]) -> None:
    if array.dtype.name not in allowed:
        raise ValueError(f"{name} must be {' or '.join(allowed)}, got {array.dtype.name}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
