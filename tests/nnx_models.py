"""Small decoders in Flax NNX, as a user of the engine would write one."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

H, D, E = 4, 8, 32  # query heads, head size, hidden size


def _normal(rngs: nnx.Rngs, *shape: int, stddev: float) -> nnx.Param:
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape))


class Layer(nnx.Module):
    """Attention of its own window and number of KV heads, and an MLP."""

    def __init__(self, index: int, window: int | None, num_kv_heads: int, rngs: nnx.Rngs):
        self.index, self.window, self.num_kv_heads = index, window, num_kv_heads
        self.qkv = _normal(rngs, E, (H + 2 * num_kv_heads) * D, stddev=1.5 * E**-0.5)
        self.out = _normal(rngs, H * D, E, stddev=1.5 * E**-0.5)
        self.up = _normal(rngs, E, 2 * E, stddev=1.5 * E**-0.5)
        self.down = _normal(rngs, 2 * E, E, stddev=(2 * E) ** -0.5)

    def __call__(self, x, attend):
        heads = (_norm(x) @ self.qkv[...]).reshape(len(x), -1, D)
        q, k, v = jnp.split(heads, (H, H + self.num_kv_heads), axis=1)
        seen = attend(q, k, v, layer=self.index, window=self.window)
        x = x + seen.reshape(len(x), -1) @ self.out[...]
        return x + jax.nn.silu(_norm(x) @ self.up[...]) @ self.down[...]


class Decoder(nnx.Module):
    """Layers of the given (window, KV heads), learned positions, a head of its own."""

    def __init__(
        self,
        layers: Sequence[tuple[int | None, int]],
        *,
        vocab_size: int = 100,
        max_position: int = 128,
    ):
        rngs = nnx.Rngs(0)
        self.tokens = _normal(rngs, vocab_size, E, stddev=1.0)
        self.places = _normal(rngs, max_position, E, stddev=0.5)
        self.layers = nnx.List([Layer(i, *kind, rngs) for i, kind in enumerate(layers)])
        self.head = _normal(rngs, E, vocab_size, stddev=0.5)

    def __call__(self, token_ids, positions, attend):
        x = self.tokens[...][token_ids] + self.places[...][positions]
        for layer in self.layers:
            x = layer(x, attend)
        return _norm(x)

    def logits(self, hidden):
        return hidden @ self.head[...]


class Uniform(nnx.Module):
    """Every token is as likely as any other."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.table = _normal(nnx.Rngs(0), vocab_size, D, stddev=1.0)

    def __call__(self, token_ids, positions, attend):
        x = self.table[...][token_ids]
        heads = x[:, None, :]
        x = x + attend(heads, heads, heads, layer=0)[:, 0]
        return x + 0 * positions[:, None].astype(x.dtype)

    def logits(self, hidden):
        return jnp.zeros((len(hidden), self.vocab_size))


def _norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)
