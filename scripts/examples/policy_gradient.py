"""A small policy-gradient loop: sample with the engine, learn, hand the weights back, every turn.

    python scripts/examples/policy_gradient.py

The reward is the share of even tokens. What makes such a loop sound is asserted on the way: weights
change without compiling anything, no cached block of older weights is found again, and the engine's
log-probabilities are those that the trainer computes, but for rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from paged_jax import LLM, Engine, SamplingParams
from paged_jax.attention import dense

VOCAB, HIDDEN, HEADS, HEAD_SIZE, LAYERS, CONTEXT = 32, 32, 2, 16, 2, 48
PROMPT = list(range(1, 18))
NUM_SAMPLES, NUM_TOKENS = 8, 12


class Policy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.places = nnx.Embed(CONTEXT, HIDDEN, rngs=rngs)
        self.qkv = nnx.List(
            [nnx.Linear(HIDDEN, 3 * HEADS * HEAD_SIZE, rngs=rngs) for _ in range(LAYERS)]
        )
        self.out = nnx.List(
            [nnx.Linear(HEADS * HEAD_SIZE, HIDDEN, rngs=rngs) for _ in range(LAYERS)]
        )
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, token_ids, positions, attend):
        x = self.tokens(token_ids) + self.places(positions)
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = jnp.split(qkv(x).reshape(len(x), 3 * HEADS, HEAD_SIZE), 3, axis=1)
            x = x + out(attend(q, k, v, layer=layer).reshape(len(x), -1))
        return x

    def logits(self, hidden):
        return self.head(hidden)


def logprobs_of(model: Policy, tokens: jax.Array) -> jax.Array:
    """float32[N, C]: of the C output tokens of each of N sequences [N, P + C]."""
    num, length = tokens.shape
    segments = jnp.repeat(jnp.arange(num), length)
    positions = jnp.tile(jnp.arange(length), num)
    hidden = model(tokens.ravel(), positions, dense(segments)).reshape(num, length, -1)
    before = hidden[:, len(PROMPT) - 1 : -1]
    scores = model.logits(before.reshape(-1, HIDDEN)).reshape(num, -1, VOCAB)
    chosen = tokens[:, len(PROMPT) :, None]
    return jnp.take_along_axis(jax.nn.log_softmax(scores), chosen, axis=2)[..., 0]


@nnx.jit
def learn(model, optimizer, tokens, rewards):
    """One step of REINFORCE; the log-probabilities before it."""

    def loss(model):
        logprobs = logprobs_of(model, tokens)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        return -(advantages[:, None] * logprobs).mean(), logprobs

    (_, logprobs), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    return logprobs


def main(iterations: int = 12) -> dict:
    model = Policy(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    engine = Engine.from_nnx(
        model, max_model_len=CONTEXT, max_num_seqs=NUM_SAMPLES, block_size=8, num_blocks=64
    )
    llm = LLM(engine)
    sampling = SamplingParams(n=NUM_SAMPLES, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    rewards_seen, differences, num_cached = [], [], []
    compiles = 0
    for iteration in range(iterations):
        # The same prompt twice: the second time its blocks are found, if these weights wrote them.
        first, second = (
            llm.generate({"prompt_token_ids": PROMPT}, sampling, use_progress=False)[0]
            for _ in range(2)
        )
        num_cached.append((first.num_cached_tokens, second.num_cached_tokens))
        samples = (*first.outputs, *second.outputs)
        tokens = np.array([[*PROMPT, *sample.token_ids] for sample in samples], np.int32)
        rewards = (tokens[:, len(PROMPT) :] % 2 == 0).mean(axis=1).astype(np.float32)
        rollout = np.array([[entry.logprob for entry in s.logprobs] for s in samples])

        training = learn(model, optimizer, tokens, rewards)
        differences.append(float(np.abs(np.asarray(training) - rollout).max()))
        rewards_seen.append(float(rewards.mean()))
        engine.update_params(model, version=f"iteration {iteration}")
        print(
            f"{engine.params_version}: reward {rewards_seen[-1]:.2f}, "
            f"|train - rollout| log-probability at most {differences[-1]:.1e}"
        )
        if iteration == 1:  # everything has run once, with weights of both kinds
            compiles = engine.stats().compiles

    assert engine.stats().compiles == compiles, "an update of the weights compiled something"
    assert all(hits == 0 for hits, _ in num_cached), "blocks of older weights were found"
    assert all(hits == 16 for _, hits in num_cached), "blocks of these weights were not found"
    assert max(differences) < 1e-4
    engine.close()
    return {"rewards": rewards_seen, "differences": differences}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
