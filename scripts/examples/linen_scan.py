"""A Flax Linen model whose layers are one `nn.scan`, served.

    python scripts/examples/linen_scan.py

A scanned layer is traced once, whatever the depth, and gets its number as a traced value: the
engine keeps the KV cache of all layers in one array, and has to be told `num_layers`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from paged_jax import LLM, Engine, SamplingParams
from paged_jax.attention import dense
from paged_jax.testing import check_model

VOCAB, HIDDEN, HEADS, HEAD_SIZE, LAYERS, CONTEXT = 97, 48, 3, 16, 6, 128


class Block(nn.Module):
    """One layer; `nn.scan` stacks the parameters of all of them along axis 0."""

    @nn.compact
    def __call__(self, x, index, attend):
        heads = nn.DenseGeneral((3 * HEADS, HEAD_SIZE), name="qkv")(nn.LayerNorm()(x))
        q, k, v = jnp.split(heads, 3, axis=1)
        seen = attend(q, k, v, layer=index)
        x = x + nn.Dense(HIDDEN, name="out")(seen.reshape(len(x), -1))
        return x + nn.Dense(HIDDEN, name="down")(nn.gelu(nn.Dense(4 * HIDDEN, name="up")(x))), None


class ScannedModel(nn.Module):
    def setup(self):
        self.tokens = nn.Embed(VOCAB, HIDDEN)
        self.places = nn.Embed(CONTEXT, HIDDEN)
        self.blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),  # a number for each layer, the same `attend` for all
            length=LAYERS,
        )()

    def __call__(self, token_ids, positions, attend):
        x = self.tokens(token_ids) + self.places(positions)
        return self.blocks(x, jnp.arange(LAYERS), attend)[0]

    def logits(self, hidden):
        return self.tokens.attend(hidden)


def main() -> dict:
    module = ScannedModel()
    ids = jnp.arange(4)
    params = module.init(jax.random.key(0), ids, ids, dense(jnp.zeros_like(ids)))["params"]

    checked = check_model(module, params, num_layers=LAYERS)
    print(f"{len(checked.layers)} layers; largest difference {max(checked.errors.values()):.1e}")

    engine = Engine.from_linen(
        module, params, num_layers=LAYERS, max_model_len=CONTEXT, max_num_seqs=4, num_blocks=40
    )
    prompts = [[1, 2, 3], [10, 20, 30, 40, 50, 60], list(range(40))]
    answers = LLM(engine).generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=8),
    )
    outputs = [list(answer.outputs[0].token_ids) for answer in answers]
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"{len(prompt)} tokens -> {output}")
    engine.close()
    return {"module": module, "params": params, "prompts": prompts, "outputs": outputs}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
