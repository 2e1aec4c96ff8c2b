"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and how they are stretched."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paged_jax.errors import ModelLoadError
from paged_jax.rope_scaling import NoScaling, Scaling, read_scaling

__all__ = ["Rope", "declared_rope", "rotate"]

Angles = tuple[Float[Array, "T P"], Float[Array, "T P"]]


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of one kind of layer: planes whose angles grow with position.

    `rotary_size // 2` planes; entries of a head from `rotary_size` on are left as they are.
    """

    rotary_size: int
    theta: float
    scaling: Scaling = dataclasses.field(default_factory=NoScaling)

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        head_size: int,
        theta: float = 10000.0,
        partial: bool = False,
    ) -> "Rope":
        """Read `rope_theta` + `rope_scaling`, or the newer `rope_parameters`, of a config.json.

        `theta` is what the family takes where the config is silent; only with `partial` may
        `partial_rotary_factor` leave a part of each head alone. Raises ModelLoadError, naming the
        key, for what is declared and not supported.
        """
        declared = declared_rope(config)
        if any(isinstance(value, Mapping) for value in declared.values()):
            raise ModelLoadError(f"rope parameters for each kind of layer: {sorted(declared)}")
        return cls.from_declared(
            declared, config, head_size=head_size, theta=theta, partial=partial
        )

    @classmethod
    def from_declared(
        cls,
        declared: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        head_size: int,
        theta: float,
        partial: bool = False,
    ) -> "Rope":
        """As `from_hf`, from one object of parameters; `config` has what it leaves out."""
        both = {**config, **{key: value for key, value in declared.items() if value is not None}}
        share = both.get("partial_rotary_factor") or 1.0
        if share != 1.0 and not partial:
            raise ModelLoadError(f"partial_rotary_factor={share} is not supported, only 1.0")
        rotary_size = int(head_size * _positive(share, "partial_rotary_factor"))
        if rotary_size % 2 or not 0 < rotary_size <= head_size:
            raise ModelLoadError(f"rotary embeddings need an even {head_size=}, got {rotary_size}")
        base = _positive(both.get("rope_theta") or theta, "rope_theta")
        return cls(rotary_size, base, read_scaling(declared, config))

    def for_context(self, context_len: int) -> "Rope":
        """The rotation where no sequence is longer than `context_len` tokens."""
        return dataclasses.replace(self, scaling=self.scaling.for_context(context_len))

    def frequencies(self) -> np.ndarray:
        """float32[P]: radians a position, after scaling."""
        exponents = np.arange(0, self.rotary_size, 2, dtype=np.float64) / self.rotary_size
        return self.scaling(self.theta**-exponents, self.theta).astype(np.float32)

    def __call__(self, positions: Int[Array, " T"]) -> Angles:
        """Cosine and sine of the angles at `positions`, in float32; P = rotary_size / 2 planes."""
        angles = positions.astype(jnp.float32)[:, None] * self.frequencies()[None, :]
        length = self.scaling.length
        return jnp.cos(angles) * length, jnp.sin(angles) * length


def declared_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object of rope parameters in a config.json, under its older or its newer name."""
    declared = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(declared, Mapping):
        raise ModelLoadError(f"rope parameters must be an object, not {declared!r}")
    return declared


@jax.jit  # traced once for all layers
def rotate(x: Float[Array, "T H D"], angles: Angles) -> Float[Array, "T H D"]:
    """Turn each head by the `(cos, sin)` of a Rope. Plane i is made of entries i and i + P."""
    cos, sin = angles
    rotary_size = 2 * cos.shape[-1]
    halves = x[..., :rotary_size].astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)  # [T,H,2,P]
    # In one array: XLA's CPU would compute a cosine alone again for every head and layer.
    factors = jnp.concatenate([cos, cos, -sin, sin], axis=-1).reshape(-1, 1, 2, *halves.shape[2:])
    # One pass over memory: XLA's CPU would write a concatenation of halves element by element.
    turned = halves * factors[:, :, 0] + halves[..., ::-1, :] * factors[:, :, 1]
    turned = turned.reshape(*x.shape[:-1], rotary_size).astype(x.dtype)
    if rotary_size == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., rotary_size:]], axis=-1)


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelLoadError(f"{name} must be a positive number, not {value!r}")
    return float(value)
