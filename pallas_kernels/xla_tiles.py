"""A layer's keys and values in tiles of a few blocks, and what queries see of one tile."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from pallas_kernels.pool import MAX_INT32, KVPool, block_in_range
from pallas_kernels.quantized_kv import decode
from pallas_kernels.scoring import Scoring

KV_TILE_LEN = 64  # keys of a row taken together, in whole blocks; measured on CPUs
FEW_QUERIES = 32  # of a row and KV head
MASKED = -1e30  # finite, so that a query that sees nothing gives no NaN


@dataclass(frozen=True)
class KVTiles:
    """A layer's keys and values as the rows of `block_tables[S, B]` order them."""

    pool: KVPool
    block_tables: Int[Array, "S B"]
    scoring: Scoring
    layer: Int[Array, ""]

    @property
    def tile_blocks(self) -> int:
        return min(max(KV_TILE_LEN // self.pool.spec.block_size, 1), self.block_tables.shape[1])

    @property
    def tile_len(self) -> int:
        return self.tile_blocks * self.pool.spec.block_size

    def span(self, position: Int[Array, "R Q"]) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
        """First tile that any query of a row sees, and the one after the last."""
        table_end = -(-self.block_tables.shape[1] // self.tile_blocks)
        end = jnp.minimum(jnp.max(position, axis=1) // self.tile_len + 1, table_end)
        if self.scoring.window is None:
            return jnp.zeros_like(end), end
        lowest = jnp.min(jnp.where(position >= 0, position, MAX_INT32), axis=1)
        first = jnp.maximum(lowest - self.scoring.window + 1, 0) // self.tile_len
        return jnp.minimum(first, end), end

    def scale_queries(self, q: Float[Array, "R Q H D"]) -> Float[Array, "R K M D"]:
        """Queries of a KV head together (M = Q * G), with everything linear folded in."""
        num_rows, num_queries, num_heads, head_size = q.shape
        num_kv_heads = self.pool.spec.num_kv_heads
        q = q.astype(jnp.float32) * jnp.asarray(self.scoring.scale, jnp.float32)
        q = q.reshape(num_rows, num_queries, num_kv_heads, num_heads // num_kv_heads, head_size)
        if self.scoring.k_scale is not None:
            q = q * self.scoring.k_scale[None, None, :, None, None]
        return q.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_kv_heads, -1, head_size)

    def start(self, shape: tuple[int, int, int]) -> tuple[Float[Array, "R K M"], ...]:
        """The softmax's running maximum and sum before any key: a sink is a key seen already."""
        sinks = self.scoring.sinks
        if sinks is None:
            return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
        num_rows, num_kv_heads, num_queries = shape
        sinks = sinks.reshape(1, num_kv_heads, 1, -1)
        repeats = num_queries // sinks.shape[3]
        sinks = jnp.broadcast_to(sinks, (num_rows, num_kv_heads, repeats, sinks.shape[3]))
        return jnp.maximum(sinks.reshape(shape), MASKED), jnp.ones(shape, jnp.float32)

    def scores_and_values(
        self,
        queries: Float[Array, "R K M D"],
        rows: Int[Array, " R"],
        tile: Int[Array, " R"],
        position: Int[Array, "R #M"],
        precision: lax.Precision,
    ) -> tuple[Float[Array, "R K M J"], Bool[Array, "R 1 #M J"], Float[Array, "R K J D"]]:
        """Scores of M queries against a tile of each of these rows, which of its J keys each of
        them sees, and the values there. An unseen key's score is `MASKED`."""
        block_size = self.pool.spec.block_size
        of_tile = jnp.arange(self.tile_blocks, dtype=jnp.int32)[None]
        index, exists = self._blocks(rows, tile[:, None] * self.tile_blocks + of_tile)
        lane = jnp.arange(self.tile_len, dtype=jnp.int32)[None, None]
        key_position = tile[:, None, None] * self.tile_len + lane  # [R,1,J]
        position = position[:, :, None]
        seen = jnp.repeat(exists, block_size, axis=1)[:, None] & (key_position <= position)
        if self.scoring.window is not None:
            seen &= key_position > position - self.scoring.window
        keys, values = self._keys_and_values(index)  # [R,K,t,D,b] [R,K,J,D]
        # Zero times NaN is NaN: an unseen slot's value must not meet its zero weight.
        values = jnp.where(seen.any(axis=1)[:, None, :, None], values, 0)
        seen = seen[:, None]
        scores = _multiply_keys(queries, keys, precision)
        if self.scoring.softcap is not None:
            scores = self.scoring.softcap * jnp.tanh(scores / self.scoring.softcap)
        return jnp.where(seen, scores, MASKED), seen, values

    def finish(
        self, total: Float[Array, "R K M"], out: Float[Array, "R K M D"], num_queries: int
    ) -> Float[Array, "R Q H D"]:
        """The weighted values over the sum of their weights; 0 where nothing was seen."""
        out = out / jnp.where(total > 0, total, 1)[..., None]
        if self.scoring.v_scale is not None:
            out = out * self.scoring.v_scale[None, :, None, None]
        num_rows, num_kv_heads, _, head_size = out.shape
        out = out.reshape(num_rows, num_kv_heads, num_queries, -1, head_size)
        return out.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_queries, -1, head_size)

    def _blocks(
        self, rows: Int[Array, " R"], column: Int[Array, "R t"]
    ) -> tuple[Int[Array, "R t"], Bool[Array, "R t"]]:
        """Where these columns of the rows' tables lie in the pool, and which of them exist.

        An absent one lies past the pool's end.
        """
        spec, table_width = self.pool.spec, self.block_tables.shape[1]
        inside = jnp.clip(column, 0, table_width - 1)
        ids = self.block_tables.at[rows[:, None], inside].get(mode="promise_in_bounds")
        index = block_in_range(spec, self.layer, ids)
        exists = (ids > 0) & (index < spec.num_layers * spec.num_blocks)
        return index, exists & (column == inside)

    def _keys_and_values(
        self, index: Int[Array, "R t"]
    ) -> tuple[Float[Array, "R K t D b"], Float[Array, "R K J D"]]:
        """Those of these blocks, in float32."""
        keys, values, *scales = (_gather(array, index) for array in self.pool.arrays)
        if scales:
            dtype = self.pool.spec.dtype
            keys = decode(keys.swapaxes(-1, -2), scales[0], dtype).swapaxes(-1, -2)
            values = decode(values, scales[1], dtype)
        num_rows, num_kv_heads, *_, head_size = values.shape
        values = values.reshape(num_rows, num_kv_heads, -1, head_size)
        return keys.astype(jnp.float32), values.astype(jnp.float32)


def product_precision(query_dtype: DTypeLike, pool: KVPool) -> lax.Precision:
    """Exact float32 products unless both sides are short: an accelerator's default is less."""
    short = jnp.dtype(query_dtype).itemsize == pool.arrays[0].dtype.itemsize == 2
    return lax.Precision.DEFAULT if short else lax.Precision.HIGHEST


def _gather(array: Shaped[Array, "N K ..."], index: Int[Array, "R t"]) -> jax.Array:
    """Blocks by KV head `[R, K, t, ...]`; for an absent block, some other one.

    One index for each slice that lies together: XLA's CPU copies those fastest.
    """
    num_blocks, num_kv_heads, *inner = array.shape
    heads = jnp.arange(num_kv_heads, dtype=jnp.int32)[None, :, None]
    index = jnp.minimum(index, num_blocks - 1)[:, None] * num_kv_heads + heads  # [R,K,t]
    flat = array.reshape(num_blocks * num_kv_heads, -1)
    tile = flat.at[index.reshape(-1)].get(mode="promise_in_bounds")
    return tile.reshape(*index.shape, *inner)


def _multiply_keys(
    queries: Float[Array, "R K M D"],
    keys: Float[Array, "R K t D b"],
    precision: lax.Precision,
) -> Float[Array, "R K M J"]:
    """Each query times each key. A few queries meet the blocks one by one, as they lie; for many
    it pays to put the blocks side by side first."""
    num_rows, num_kv_heads, num_queries, head_size = queries.shape
    tile_blocks, block_size = keys.shape[2], keys.shape[4]
    if num_queries <= FEW_QUERIES:
        queries = jnp.broadcast_to(
            queries[:, :, None], (num_rows, num_kv_heads, tile_blocks, num_queries, head_size)
        )
        scores = jnp.einsum("rktmd,rktdb->rktmb", queries, keys, precision=precision)
        scores = scores.transpose(0, 1, 3, 2, 4)
    else:
        scores = jnp.einsum("rkmd,rktdb->rkmtb", queries, keys, precision=precision)
    return scores.reshape(num_rows, num_kv_heads, num_queries, tile_blocks * block_size)
