"""Small decoders that keep a cache of their own, in the styles of two published Flax packages.

What they have in common: tokens, positions and mask have a batch axis, a layer puts new keys and
values at `end_index`, and attention is over all slots of the cache, behind a mask.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen, nnx

H, K, D, E, VOCAB_SIZE = 4, 2, 8, 32, 40  # query heads, KV heads, head size, hidden size
WINDOW = 5


def update(cache, k, v, positions):
    """Keys and values to attend over, where they stand, and the new cache."""
    if cache is None:
        return k, v, positions, None
    start = cache["end_index"][0]
    new = {"end_index": cache["end_index"] + k.shape[1]}
    put = jax.lax.dynamic_update_slice
    for name, part in (("k", k), ("v", v)):
        new[name] = put(cache[name], part.astype(cache[name].dtype), (0, start, 0, 0))
    if "positions" in cache:
        new["positions"] = put(cache["positions"], positions, (0, start))
    at = new.get("positions", jnp.arange(cache["k"].shape[1])[None])
    return new["k"], new["v"], at, new


def attend(q, k, v, mask):
    """Grouped queries [B, L, H, D] over [B, C, K, D]."""
    grouped = q.reshape(*q.shape[:2], K, H // K, D)
    scores = jnp.einsum("blkgd,bckd->bkglc", grouped, k) * D**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("bkglc,bckd->blkgd", weights, v).reshape(*q.shape[:2], H * D)


def within_window(positions, at):
    return at[:, None, :] > positions[:, :, None] - WINDOW


def layer_cache(cache_len, batch_size=1, *, with_positions=False, dtype=jnp.float32):
    cache = {
        "k": jnp.zeros((batch_size, cache_len, K, D), dtype),
        "v": jnp.zeros((batch_size, cache_len, K, D), dtype),
        "end_index": jnp.zeros((batch_size,), jnp.int32),
    }
    if with_positions:
        cache["positions"] = jnp.zeros((batch_size, cache_len), jnp.int32)
    return cache


class NNXLayer(nnx.Module):
    def __init__(self, windowed: bool, rngs: nnx.Rngs):
        self.windowed = windowed
        self.q, self.k, self.v = (
            nnx.Linear(E, heads * D, use_bias=False, rngs=rngs) for heads in (H, K, K)
        )
        self.out = nnx.Linear(H * D, E, rngs=rngs)

    def __call__(self, x, positions, cache, mask):
        q, k, v = (part(x).reshape(*x.shape[:2], -1, D) for part in (self.q, self.k, self.v))
        k, v, at, cache = update(cache, k, v, positions)
        if self.windowed:
            mask = mask & within_window(positions, at)
        return cache, x + self.out(attend(q, k, v, mask))


class NNXDecoder(nnx.Module):
    """`(scores, cache)` of `(tokens, positions, cache, mask)`; a window counts slots."""

    def __init__(self, num_layers: int = 2):
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(VOCAB_SIZE, E, rngs=rngs, embedding_init=nnx.initializers.normal(1))
        self.places = nnx.Embed(64, E, rngs=rngs, embedding_init=nnx.initializers.normal(0.5))
        self.layers = nnx.List([NNXLayer(i % 2 == 0, rngs) for i in range(num_layers)])

    def __call__(self, tokens, positions, cache, mask):
        x = self.tokens(tokens) + self.places(positions)
        new = None if cache is None else {}
        for i, layer in enumerate(self.layers):
            part, x = layer(x, positions, cache and cache[f"layer_{i}"], mask)
            if cache is not None:
                new[f"layer_{i}"] = part
        return self.tokens.attend(x), new

    def init_cache(self, cache_len, **options):
        return {f"layer_{i}": layer_cache(cache_len, **options) for i in range(len(self.layers))}


@dataclass
class Output:
    logits: jax.Array
    hidden: jax.Array
    cache: dict | None


class LinenDecoder(linen.Module):
    """An `Output` of keywords; the cache knows where its keys stand, and windows go by that."""

    num_layers: int = 2

    def setup(self):
        self.tokens = linen.Embed(VOCAB_SIZE, E, embedding_init=linen.initializers.normal(1))
        self.places = linen.Embed(64, E, embedding_init=linen.initializers.normal(0.5))
        self.qkv = [linen.Dense((H + 2 * K) * D) for _ in range(self.num_layers)]
        self.out = [linen.Dense(E) for _ in range(self.num_layers)]

    def __call__(self, tokens, *, positions, cache=None, attention_mask):
        x = self.tokens(tokens) + self.places(positions)
        new = {}
        for i in range(self.num_layers):
            heads = self.qkv[i](x).reshape(*x.shape[:2], -1, D)
            q, k, v = jnp.split(heads, (H, H + K), axis=2)
            k, v, at, new[f"layer_{i}"] = update(cache and cache[f"layer_{i}"], k, v, positions)
            mask = attention_mask & within_window(positions, at) if i else attention_mask
            x = x + self.out[i](attend(q, k, v, mask))
        return Output(self.logits(x), x, None if cache is None else new)

    def logits(self, hidden):
        return self.tokens.attend(hidden)

    def init_cache(self, cache_len, **options):
        every = range(self.num_layers)
        return {f"layer_{i}": layer_cache(cache_len, with_positions=True, **options) for i in every}
