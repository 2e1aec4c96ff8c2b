"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and how they are stretched."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from paged_jax.errors import ModelLoadError

__all__ = ["Rope", "rotate"]


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """Frequencies as they were trained."""

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: `factor` times as many positions in the same angles."""

    factor: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: only wavelengths that are long beside the trained context are stretched."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: float

    def __call__(self, frequencies: np.ndarray) -> np.ndarray:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)  # 1: as trained; 0: stretched; between: a blend
        return keep * frequencies + (1 - keep) * frequencies / self.factor


Scaling = NoScaling | LinearScaling | Llama3Scaling
SCALINGS = {"default": NoScaling, "linear": LinearScaling, "llama3": Llama3Scaling}


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of one model: `head_size // 2` planes, their angles growing with position."""

    head_size: int
    theta: float
    scaling: Scaling

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, head_size: int) -> "Rope":
        """Read `rope_theta` + `rope_scaling`, or the newer `rope_parameters`, of a config.json.

        Raises ModelLoadError, naming the key, for what is declared and not supported.
        """
        declared = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in declared.values()):
            raise ModelLoadError(f"rope parameters for each kind of layer: {sorted(declared)}")
        both = {**config, **declared}
        if (partial := both.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ModelLoadError(f"partial_rotary_factor={partial} is not supported, only 1.0")
        if head_size % 2:
            raise ModelLoadError(f"rotary embeddings need an even {head_size=}")
        theta = _positive(both.get("rope_theta") or 10000.0, "rope_theta")
        return cls(head_size, theta, _scaling(declared))

    def frequencies(self) -> np.ndarray:
        """float32[D/2]: radians a position, after scaling."""
        exponents = np.arange(0, self.head_size, 2, dtype=np.float64) / self.head_size
        return self.scaling(self.theta**-exponents).astype(np.float32)

    def __call__(
        self, positions: Int[Array, " T"]
    ) -> tuple[Float[Array, "T P"], Float[Array, "T P"]]:
        """Cosine and sine of the angles at `positions`, in float32; P = D / 2 planes."""
        angles = positions.astype(jnp.float32)[:, None] * self.frequencies()[None, :]
        return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T H D"], angles: tuple[Float[Array, "T P"], Float[Array, "T P"]]
) -> Float[Array, "T H D"]:
    """Turn each head by the `(cos, sin)` of a Rope. Plane i is made of entries i and i + D/2."""
    cos, sin = (part[:, None, :] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _scaling(declared: Mapping[str, Any]) -> Scaling:
    name = declared.get("rope_type") or declared.get("type") or "default"
    if name not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise ModelLoadError(f"rope scaling of type {name!r} is not supported, only {known}")
    kind = SCALINGS[name]
    keys = [field.name for field in dataclasses.fields(kind)]
    if missing := [key for key in keys if declared.get(key) is None]:
        raise ModelLoadError(f"rope scaling of type {name!r} lacks {', '.join(missing)}")
    return kind(*(_positive(declared[key], f"rope scaling's {key}") for key in keys))


def _positive(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not value > 0:
        raise ModelLoadError(f"{name} must be a positive number, not {value!r}")
    return float(value)
