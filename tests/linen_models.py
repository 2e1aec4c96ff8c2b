"""A small decoder in Flax Linen, with its layers scanned or unrolled over the same parameters."""

import jax
import jax.numpy as jnp
from flax import linen as nn

H, K, D = 4, 2, 8  # query heads, KV heads, head size


class Block(nn.Module):
    """Attention and an MLP over hidden states; `layer` may be traced."""

    @nn.compact
    def __call__(self, x, layer, attend):
        T, E = x.shape
        heads = nn.DenseGeneral((H + 2 * K, D), use_bias=False, name="qkv")(nn.RMSNorm()(x))
        q, k, v = jnp.split(heads, (H, H + K), axis=1)
        seen = attend(q, k, v, layer=layer, window=5)
        x = x + nn.Dense(E, use_bias=False, name="out")(seen.reshape(T, -1))
        return x + nn.Dense(E, name="down")(jax.nn.gelu(nn.Dense(2 * E, name="up")(x))), None


class Decoder(nn.Module):
    """Learned positions and a tied head. `scan` says how the stacked layers are run.

    `checked` is Flax's own check of what a rematerialised layer may not change in a scan.
    """

    vocab_size: int = 50
    hidden_size: int = 32
    num_layers: int = 3
    max_position: int = 64
    scan: bool = True
    remat: bool = False
    checked: bool = False

    def setup(self):
        self.tokens = nn.Embed(self.vocab_size, self.hidden_size)
        self.places = nn.Embed(self.max_position, self.hidden_size)
        block = nn.remat(Block) if self.remat else Block
        if self.scan:
            self.blocks = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast),
                length=self.num_layers,
                check_constancy_invariants=self.checked,
            )()
        else:
            self.blocks = [block(name=f"block_{i}") for i in range(self.num_layers)]

    def __call__(self, token_ids, positions, attend):
        x = self.tokens(token_ids) + self.places(positions)
        if self.scan:
            return self.blocks(x, jnp.arange(self.num_layers), attend)[0]
        for i, block in enumerate(self.blocks):
            x, _ = block(x, jnp.int32(i) if self.remat else i, attend)
        return x

    def logits(self, hidden):
        return self.tokens.attend(hidden)


def unrolled_params(params):
    """The same parameters for `scan=False`: one entry a layer in place of a stack."""
    rest = {name: value for name, value in params.items() if name != "blocks"}
    num_layers = jax.tree.leaves(params["blocks"])[0].shape[0]
    blocks = {
        f"block_{i}": jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
        for i in range(num_layers)
    }
    return {**rest, **blocks}
