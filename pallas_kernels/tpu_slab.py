"""The TPU's pool: how one token's keys and values of all heads lie side by side."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.quantized_kv import is_quantized, stored_dtype

LANES = 128  # of a vector register, and of a tile in memory
WORD_BYTES = 4


class Slab(NamedTuple):
    """One token's keys and values, `[C, p, 128]`: C words of p values each, lane by lane.

    Its C * p rows of 128 lanes are K0, V0, K1, V1, ... padded with zeros; p rows share a 32-bit
    word. A head of more than 128 takes several rows for K, then several for V. One of at most 64
    takes half a row: a row then holds K and V, in lanes 0 and 64.

    Values of one byte are bytes here; their scales lie apart, see `scales_shape`.

    The axis p is explicit because XLA would otherwise choose another order of the pool's axes
    than the kernels need, and copy all of it at every call.
    """

    num_kv_heads: int
    head_size: int
    dtype: jnp.dtype

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.dtype)

    @property
    def stored(self) -> jnp.dtype:
        """Of the array that holds the slabs."""
        return stored_dtype(self.dtype)

    @property
    def packing(self) -> int:
        return WORD_BYTES // self.dtype.itemsize

    @property
    def shares_rows(self) -> bool:
        """K and V of a head are in one row."""
        return self.head_size <= LANES // 2

    @property
    def lanes(self) -> int:
        """Of a head's keys, padded to whole rows."""
        return -(-self.head_size // LANES) * LANES

    @property
    def num_rows(self) -> int:
        """That hold something."""
        return self.num_kv_heads * (1 if self.shares_rows else 2 * self.lanes // LANES)

    @property
    def shape(self) -> tuple[int, int, int]:
        return -(-self.num_rows // self.packing), self.packing, LANES

    @property
    def num_scales(self) -> int:
        """Of a token: K0, V0, K1, V1, ...; padded to rows that XLA keeps side by side."""
        count = 2 * self.num_kv_heads
        return count if count in (2, 4) else -(-count // 8) * 8

    def scales_shape(self, block_size: int) -> tuple[int, int, int]:
        """A block's scales, token by token along the lanes: 128 of them, then the next 128."""
        return -(-block_size // LANES), self.num_scales, LANES

    def key_rows(self, head: int) -> range:
        count = self.lanes // LANES
        start = head if self.shares_rows else 2 * head * count
        return range(start, start + count)

    def value_rows(self, head: int) -> range:
        if self.shares_rows:
            return self.key_rows(head)
        keys = self.key_rows(head)
        return range(keys.stop, keys.stop + len(keys))

    def pack(self, k: Shaped[Array, "T K D"], v: Shaped[Array, "T K D"]) -> Shaped[Array, "T ..."]:
        """Keys and values of new tokens as the pool holds them, `[T, C, p, 128]`."""
        room = LANES // 2 if self.shares_rows else self.lanes
        pair = jnp.stack([k, v], axis=2).astype(self.stored)  # [T,K,2,D]
        pair = jnp.pad(pair, ((0, 0), (0, 0), (0, 0), (0, room - self.head_size)))
        rows = pair.reshape(k.shape[0], self.num_rows, LANES)
        words, packing, lanes = self.shape
        rows = jnp.pad(rows, ((0, 0), (0, words * packing - self.num_rows), (0, 0)))
        return rows.reshape(-1, words, packing, lanes)

    def unpack(
        self, words: Shaped[Array, "*N C p 128"]
    ) -> tuple[Shaped[Array, "*N K D"], Shaped[Array, "*N K D"]]:
        """The keys and values of packed tokens."""
        outer = words.shape[:-3]
        room = LANES // 2 if self.shares_rows else self.lanes
        rows = words.reshape(*outer, -1, LANES)[..., : self.num_rows, :]
        pair = rows.reshape(*outer, self.num_kv_heads, 2, room)[..., : self.head_size]
        return pair[..., 0, :], pair[..., 1, :]

    def pack_scales(
        self, k_scales: Float[Array, "T K"], v_scales: Float[Array, "T K"]
    ) -> Float[Array, "T R"]:
        pair = jnp.stack([k_scales, v_scales], axis=2).reshape(k_scales.shape[0], -1)
        return jnp.pad(pair, ((0, 0), (0, self.num_scales - pair.shape[1])))

    def unpack_scales(
        self, blocks: Float[Array, "M S R 128"], block_size: int
    ) -> tuple[Float[Array, "M b K"], Float[Array, "M b K"]]:
        """The scales of the keys and of the values of whole blocks."""
        by_token = blocks.swapaxes(2, 3).reshape(blocks.shape[0], -1, self.num_scales)
        used = by_token[:, :block_size, : 2 * self.num_kv_heads]
        return used[..., ::2], used[..., 1::2]

    def pad_queries(self, q: Float[Array, "... D"]) -> Float[Array, "... lanes"]:
        """Zeros where the values lie: they then add nothing to a dot product with a whole row."""
        widths = [(0, 0)] * (q.ndim - 1) + [(0, self.lanes - self.head_size)]
        return jnp.pad(q, widths)

    def take_values(self, out: Float[Array, "... lanes"]) -> Float[Array, "... D"]:
        start = LANES // 2 if self.shares_rows else 0
        return jax.lax.slice_in_dim(out, start, start + self.head_size, axis=out.ndim - 1)
