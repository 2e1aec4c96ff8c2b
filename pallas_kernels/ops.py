"""The public operations on a KV pool. Each checks its arguments and hands over to a back end.

All are pure and may be traced; donate the pool to `jax.jit` so that writing is in place. `layer`
is a Python int or a traced int32 scalar; `group`, `decode_rows`, `window`, `softcap` are static.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from pallas_kernels import block_moves, validate
from pallas_kernels.metadata import AttentionMetadata, of_group
from pallas_kernels.pool import KVPool, block_in_range
from pallas_kernels.registry import Backend
from pallas_kernels.scoring import Scoring


def write_kv(
    pool: KVPool,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    attn: AttentionMetadata,
    *,
    layer: int | Int[Array, ""],
    group: int = 0,
    backend: Backend,
) -> KVPool:
    """Puts each token's key and value into its slot, replacing what was there.

    A slot outside the pool is dropped. Padding tokens all write slot 0, whose content is
    unspecified afterwards.
    """
    validate.check_write(k, v, pool, attn, layer=layer, group=group)
    slots = of_group(attn, group).slot_mapping
    return backend.write_kv(pool, k, v, slots, layer=jnp.asarray(layer, jnp.int32))


def read_kv(
    pool: KVPool,
    block_tables: Int[Array, "R B"],
    *,
    layer: int | Int[Array, ""],
    backend: Backend,
) -> tuple[Float[Array, "R J K D"], Float[Array, "R J K D"]]:
    """Keys and values in all slots of the rows' blocks, in order: `J = B * block_size` of them.

    For models that attend by themselves; it copies what it reads. In the pool's dtype, or in
    float32 where that is one byte. What a slot without a token gives is unspecified.
    """
    spec = pool.spec
    num_rows, table_width = block_tables.shape
    ids = block_tables.reshape(-1)
    validate.check_block_ids("block_tables", ids)
    index = block_in_range(spec, jnp.asarray(layer, jnp.int32), ids)
    blocks = tuple(array.at[index].get(mode="fill", fill_value=0) for array in pool.arrays)
    k, v = backend.unpack(blocks, spec)  # [R*B,b,K,D]
    shape = (num_rows, table_width * spec.block_size, spec.num_kv_heads, spec.head_size)
    return k.reshape(shape), v.reshape(shape)


def paged_attention(
    q: Float[Array, "T H D"],
    pool: KVPool,
    attn: AttentionMetadata,
    *,
    layer: int | Int[Array, ""],
    decode_rows: int,
    group: int = 0,
    scale: float | Float[Array, ""] | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    k_scale: float | Float[ArrayLike, "..."] | None = None,
    v_scale: float | Float[ArrayLike, "..."] | None = None,
    backend: Backend,
) -> Float[Array, "T H D"]:
    """Causal attention of the step's queries over their rows' blocks; this step's keys and values
    must have been written.

    Query i of a row stands at position `seq_len - query_len + i`, sees keys up to itself, and
    with `window` w only itself and the w - 1 before. Scores and softmax are float32; the result
    has q's dtype. `scale` defaults to `D ** -0.5`; `k_scale` and `v_scale` (a number or `[K]`)
    multiply stored keys and values; `softcap` c bounds scores as `c * tanh(score / c)`; `sinks`
    are logits that take weight and carry no value.

    Rows with `seq_len` 0 and tokens past the end give exactly 0. Slots that no query sees never
    matter, whatever they hold. A block id that is 0 or outside the pool is not seen.
    """
    validate.check_attention(q, pool, attn, layer=layer, group=group, decode_rows=decode_rows)
    num_heads, head_size = q.shape[1:]
    num_kv_heads = pool.spec.num_kv_heads
    scale = head_size**-0.5 if scale is None else scale
    validate.check_scoring(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    scoring = Scoring(
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32),
        k_scale=_per_kv_head(k_scale, num_kv_heads),
        v_scale=_per_kv_head(v_scale, num_kv_heads),
    )
    return backend.paged_attention(
        q,
        pool,
        of_group(attn, group),
        scoring,
        layer=jnp.asarray(layer, jnp.int32),
        decode_rows=decode_rows,
    )


def copy_blocks(pool: KVPool, src: Int[Array, " M"], dst: Int[Array, " M"]) -> KVPool:
    """Copies block `src[i]` to block `dst[i]` in every layer; padding pairs are (0, 0).

    All sources are read before any target is written. A pair with an id outside the pool is
    dropped. Equal targets with different sources are the caller's mistake.
    """
    validate.check_block_ids("src", src)
    validate.check_block_ids("dst", dst, num_ids=src.shape[0])
    return block_moves.copy_blocks(pool, src, dst)


def read_blocks(pool: KVPool, ids: Int[Array, " M"]) -> tuple[jax.Array, ...]:
    """The blocks' content in the back end's own layout, axes `[M, L, ...]`; what `write_blocks`
    takes. NaN for an id outside the pool."""
    validate.check_block_ids("ids", ids)
    return block_moves.read_blocks(pool, ids)


def write_blocks(pool: KVPool, ids: Int[Array, " M"], values: tuple[jax.Array, ...]) -> KVPool:
    """Puts `read_blocks`' result into these blocks; an id outside the pool is dropped."""
    validate.check_block_ids("ids", ids)
    validate.check_block_values(values, pool, num_ids=ids.shape[0])
    return block_moves.write_blocks(pool, ids, values)


def _per_kv_head(value: float | ArrayLike | None, num_kv_heads: int) -> jax.Array | None:
    if value is None:
        return None
    return jnp.broadcast_to(jnp.asarray(value, jnp.float32), (num_kv_heads,))
