"""What a request changes about the logits before they are drawn from: biases and masks."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

__all__ = ["BITS", "LogitEdits", "add_biases", "mask_tokens", "no_edits", "num_words"]

BITS = 32  # of a word of the mask


class LogitEdits(NamedTuple):
    """Of each sampled row. R sampled rows, K biased tokens a row, W = ceil(V / 32) words."""

    has_bias: Bool[Array, ""]  # whether any row has one
    bias_ids: Int[Array, "R K"]  # padded with token 0 and a bias of 0
    bias: Float[Array, "R K"]
    has_mask: Bool[Array, ""]
    mask: Int[Array, "R W"]  # bit i of word w is set where token 32 w + i may be drawn


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // BITS)


def no_edits(rows: int, vocab_size: int, num_biased: int) -> LogitEdits:
    """Edits that leave every row alone, as NumPy arrays that the caller may fill."""
    return LogitEdits(
        has_bias=np.zeros((), np.bool_),
        bias_ids=np.zeros((rows, num_biased), np.int32),
        bias=np.zeros((rows, num_biased), np.float32),
        has_mask=np.zeros((), np.bool_),
        mask=np.full((rows, num_words(vocab_size)), -1, np.int32),
    )


def add_biases(logits: Float[Array, "R V"], edits: LogitEdits) -> Float[Array, "R V"]:
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return lax.cond(
        edits.has_bias,
        lambda: logits.at[rows, edits.bias_ids].add(edits.bias.astype(logits.dtype)),
        lambda: logits,
    )


def mask_tokens(logits: Float[Array, "R V"], edits: LogitEdits) -> Float[Array, "R V"]:
    """-inf for every token whose bit is not set."""
    return lax.cond(edits.has_mask, lambda: _masked(logits, edits.mask), lambda: logits)


def _masked(logits: Float[Array, "R V"], mask: Int[Array, "R W"]) -> Float[Array, "R V"]:
    bits = jnp.arange(BITS, dtype=jnp.int32)
    allowed = (lax.shift_right_logical(mask[:, :, None], bits[None, None, :]) & 1) == 1
    allowed = allowed.reshape(mask.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(allowed, logits, -jnp.inf)
