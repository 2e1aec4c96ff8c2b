"""The rule that turns a dot product into an attention weight: a value, normalised once."""

from typing import NamedTuple

from jaxtyping import Array, Float


class Scoring(NamedTuple):
    """score = softcap * tanh(scale * k_scale * q.k / softcap), computed in float32.

    `window` w: a query sees itself and the w - 1 keys before it. `sinks`: one more logit for each
    query head that takes weight and carries no value. `v_scale` multiplies the result.
    """

    scale: float | Float[Array, ""]
    window: int | None
    softcap: float | None
    sinks: Float[Array, " H"] | None
    k_scale: Float[Array, " K"] | None
    v_scale: Float[Array, " K"] | None
