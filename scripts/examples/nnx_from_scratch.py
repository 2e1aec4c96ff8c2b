"""A Flax NNX model written from scratch: trained a few steps on text, then served.

    python scripts/examples/nnx_from_scratch.py

The module knows one thing about serving: it calls `attend` where it attends. While it trains, that
is `dense`, plain causal attention; the engine hands in another one that reads a paged KV cache.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paged_jax import LLM, Engine, SamplingParams
from paged_jax.attention import dense
from paged_jax.testing import check_model

TEXT = (
    "the cat sat on the mat and the dog sat on the log. "
    "the cat saw the dog and the dog saw the cat. "
) * 8
LETTERS = sorted(set(TEXT))
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, LAYERS, CONTEXT = 64, 4, 2, 16, 2, 64


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def decode(token_ids) -> str:
    return "".join(LETTERS[i] for i in token_ids)


class Layer(nnx.Module):
    """Grouped-query attention and an MLP."""

    def __init__(self, index: int, rngs: nnx.Rngs):
        self.index = index
        self.norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.qkv = nnx.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_SIZE, HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 2 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x, attend):
        heads = self.qkv(self.norm(x)).reshape(len(x), -1, HEAD_SIZE)
        q, k, v = jnp.split(heads, (HEADS, HEADS + KV_HEADS), axis=1)
        x = x + self.out(attend(q, k, v, layer=self.index).reshape(len(x), -1))
        return x + self.down(nnx.gelu(self.up(x)))


class LetterModel(nnx.Module):
    """Letters in, hidden states out; `logits` turns those that are asked for into scores."""

    def __init__(self, rngs: nnx.Rngs):
        self.letters = nnx.Embed(len(LETTERS), HIDDEN, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, HIDDEN, rngs=rngs)
        self.layers = nnx.List([Layer(i, rngs) for i in range(LAYERS)])
        self.head = nnx.Linear(HIDDEN, len(LETTERS), rngs=rngs)

    def __call__(self, token_ids, positions, attend):
        x = self.letters(token_ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, attend)
        return x

    def logits(self, hidden):
        return self.head(hidden)


def train(model: LetterModel, *, steps: int, batch_size: int = 4) -> list[float]:
    """Predict the next letter of random pieces of TEXT; the loss of every step."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    data = np.array(encode(TEXT), np.int32)
    rng = np.random.default_rng(0)
    # The pieces of a batch lie one behind the other: segments keep them apart.
    segments = jnp.repeat(jnp.arange(batch_size), CONTEXT)
    positions = jnp.tile(jnp.arange(CONTEXT), batch_size)

    @nnx.jit
    def step(model, optimizer, inputs, targets):
        def loss(model):
            hidden = model(inputs, positions, dense(segments))
            scores = model.logits(hidden)
            return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    losses = []
    for _ in range(steps):
        starts = rng.integers(0, len(data) - CONTEXT - 1, batch_size)
        pieces = np.stack([data[s : s + CONTEXT + 1] for s in starts])
        inputs, targets = pieces[:, :-1].ravel(), pieces[:, 1:].ravel()
        losses.append(float(step(model, optimizer, inputs, targets)))
    return losses


def main(steps: int = 60) -> dict:
    model = LetterModel(nnx.Rngs(0))
    losses = train(model, steps=steps)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} steps")

    checked = check_model(model)  # paged = dense, chunked = whole, batched = alone
    print(f"served as trained: the largest difference is {max(checked.errors.values()):.1e}")

    engine = Engine.from_nnx(model, max_model_len=CONTEXT, max_num_seqs=4, num_blocks=32)
    prompts = ["the cat ", "the dog sat on ", "and "]
    answers = LLM(engine).generate(
        [{"prompt_token_ids": encode(prompt)} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=24),
    )
    texts = [decode(answer.outputs[0].token_ids) for answer in answers]
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"{prompt!r} -> {text!r}")
    engine.close()
    return {"losses": losses, "model": model, "prompts": prompts, "texts": texts}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
