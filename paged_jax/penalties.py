"""Penalties for tokens that were said before, counted on the device, a row for each sequence."""

from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["Penalties", "TokenCounts", "add_tokens", "count_row", "penalize"]


class Penalties(Protocol):
    """The arrays that `penalize` reads; the scheduler's `PenaltyMetadata` has this shape."""

    presence: Float[Array, " R"]
    frequency: Float[Array, " R"]
    repetition: Float[Array, " R"]


class TokenCounts(NamedTuple):
    """What each batch row has seen; the last row takes the padding."""

    in_prompt: Bool[Array, "rows V"]
    in_output: Int[Array, "rows V"]


def penalize(
    logits: Float[Array, "R V"],
    counts: TokenCounts,
    rows: Int[Array, " R"],
    penalties: Penalties,
) -> Float[Array, "R V"]:
    """Logits less what was said before makes them worth.

    `repetition` divides (or, below zero, multiplies) tokens of prompt and output (Keskar et al.
    2019, arXiv:1909.05858); `frequency` is taken off for each time in the output, `presence` once.
    """
    said = counts.in_output[rows]
    seen = counts.in_prompt[rows] | (said > 0)
    factor = jnp.where(seen, penalties.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0.0, logits / factor, logits * factor)
    logits = logits - penalties.frequency[:, None] * said.astype(jnp.float32)
    return logits - jnp.where(said > 0, penalties.presence[:, None], 0.0)


def add_tokens(
    counts: TokenCounts, rows: Int[Array, " R"], tokens: Int[Array, " R"]
) -> TokenCounts:
    """Count the tokens just drawn; a negative one, of a failed row, is passed over."""
    new = (tokens >= 0).astype(jnp.int32)
    in_output = counts.in_output.at[rows, jnp.maximum(tokens, 0)].add(new)
    return TokenCounts(counts.in_prompt, in_output)


def count_row(
    counts: TokenCounts,
    row: Int[Array, ""],
    token_ids: Int[Array, " M"],
    num_prompt_tokens: Int[Array, ""],
    num_tokens: Int[Array, ""],
) -> TokenCounts:
    """Start a row over with a sequence's tokens; those from `num_tokens` on are padding."""
    vocab_size = counts.in_output.shape[1]
    at = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    prompt = jnp.zeros(vocab_size, jnp.int32)
    prompt = prompt.at[token_ids].add((at < num_prompt_tokens).astype(jnp.int32))
    output = jnp.zeros(vocab_size, jnp.int32)
    is_output = (at >= num_prompt_tokens) & (at < num_tokens)
    output = output.at[token_ids].add(is_output.astype(jnp.int32))
    return TokenCounts(
        counts.in_prompt.at[row].set(prompt > 0), counts.in_output.at[row].set(output)
    )
