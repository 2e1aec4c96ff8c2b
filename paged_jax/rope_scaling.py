"""How rotary frequencies are stretched, so that a model reads on past the length it began with."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from paged_jax.errors import ModelLoadError

__all__ = ["NoScaling", "Scaling", "read_scaling"]


class Scaling(Protocol):
    """Turns float64[P] trained frequencies, radians a position, into those that are used."""

    @property
    def length(self) -> float:
        """What rotated queries and keys are multiplied by."""

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray: ...

    def for_context(self, context_len: int) -> "Scaling":
        """The scaling where no sequence is longer than `context_len` tokens."""


@dataclasses.dataclass(frozen=True)
class NoScaling:
    """Frequencies as they were trained."""

    length: float = 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return frequencies

    def for_context(self, context_len: int) -> "NoScaling":
        return self


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: `factor` times as many positions in the same angles."""

    factor: float
    length: float = 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        return frequencies / self.factor

    def for_context(self, context_len: int) -> "LinearScaling":
        return self


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: only wavelengths that are long beside the trained context are stretched."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_len: float
    length: float = 1.0

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_len * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)  # 1: as trained; 0: stretched; between: a blend
        return keep * frequencies + (1 - keep) * frequencies / self.factor

    def for_context(self, context_len: int) -> "Llama3Scaling":
        return self


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): planes that turn often enough keep their speed.

    `beta_fast` and `beta_slow` are turns within the trained context: above the first nothing is
    stretched, below the second everything is.
    """

    factor: float
    original_len: float
    beta_fast: float
    beta_slow: float
    truncate: bool  # the ends of the blend to whole planes
    length: float

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        size = 2 * len(frequencies)
        low, high = (self._plane(turns, size, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        if low == high:
            high += 0.001  # a step, not a division by zero
        stretched = np.clip((np.arange(len(frequencies)) - low) / (high - low), 0.0, 1.0)
        return frequencies * (1 - stretched) + frequencies / self.factor * stretched

    def _plane(self, turns: float, size: int, theta: float) -> float:
        """The plane, counted with fractions, that turns so often within the trained context."""
        return size * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def for_context(self, context_len: int) -> "YarnScaling":
        return self


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): a divisor for each plane, from two tables.

    The long table serves contexts beyond the trained length. One engine uses one of the two for
    all of its sequences, by the longest that it admits: a sequence that changed tables while it
    grew would leave keys of the other table in its cache.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_len: float
    length: float
    context_len: int

    def __call__(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        is_long = self.context_len > self.original_len
        factors = np.array(self.long_factor if is_long else self.short_factor)
        if factors.shape != frequencies.shape:
            raise ModelLoadError(
                f"rope scaling of type 'longrope' has {len(factors)} factors for "
                f"{len(frequencies)} planes"
            )
        return frequencies / factors

    def for_context(self, context_len: int) -> "LongRopeScaling":
        return dataclasses.replace(self, context_len=context_len)


def read_scaling(declared: Mapping[str, Any], config: Mapping[str, Any]) -> Scaling:
    """The scaling that an object of rope parameters declares; `config` has what it leaves out.

    Raises ModelLoadError for an unknown type and for what is missing or no positive number.
    """
    name = declared.get("rope_type") or declared.get("type") or "default"
    if name not in READERS:
        known = ", ".join(READERS)
        raise ModelLoadError(f"rope scaling of type {name!r} is not supported, only {known}")
    return READERS[name](_Fields(name, declared, config))


class _Fields:
    """The numbers of one declaration, by key, each checked."""

    def __init__(self, name: str, declared: Mapping[str, Any], config: Mapping[str, Any]):
        self.name = name
        self._declared = declared
        self._config = config

    def need(self, *keys: str) -> None:
        if missing := [key for key in keys if self._declared.get(key) is None]:
            raise ModelLoadError(f"rope scaling of type {self.name!r} lacks {', '.join(missing)}")

    def number(self, key: str, default: float | None = None) -> float:
        value = self._declared.get(key)
        return self._positive(default if value is None else value, key)

    def optional(self, key: str) -> float | None:
        return None if self._declared.get(key) is None else self.number(key)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._declared.get(key)
        if not isinstance(value, list):
            raise ModelLoadError(f"rope scaling's {key} must be a list, not {value!r}")
        return tuple(self._positive(item, key) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._declared.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelLoadError(f"rope scaling's {key} must be true or false, not {value!r}")
        return default if value is None else value

    @property
    def max_position(self) -> int:
        return int(
            self._positive(self._config.get("max_position_embeddings"), "the model's length")
        )

    @property
    def original_len(self) -> float:
        """Tokens of the trained context. A value beside the declaration goes before one in it."""
        key = "original_max_position_embeddings"
        value = self._config.get(key) or self._declared.get(key) or self.max_position
        return self._positive(value, key)

    def _positive(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelLoadError(f"rope scaling's {key} must be a positive number, not {value!r}")
        return float(value)


def _linear(fields: _Fields) -> LinearScaling:
    fields.need("factor")
    return LinearScaling(fields.number("factor"))


def _dynamic(fields: _Fields) -> NoScaling:
    """Dynamic NTK changes nothing up to `max_position_embeddings`, and no engine goes beyond."""
    fields.need("factor")
    return NoScaling()


def _llama3(fields: _Fields) -> Llama3Scaling:
    fields.need("factor", "low_freq_factor", "high_freq_factor")
    return Llama3Scaling(
        fields.number("factor"),
        fields.number("low_freq_factor"),
        fields.number("high_freq_factor"),
        fields.original_len,
    )


def _yarn(fields: _Fields) -> YarnScaling:
    original = fields.original_len
    factor = fields.optional("factor") or fields.max_position / original
    return YarnScaling(
        factor,
        original,
        fields.number("beta_fast", 32.0),
        fields.number("beta_slow", 1.0),
        fields.flag("truncate", True),
        _yarn_length(fields, factor),
    )


def _yarn_length(fields: _Fields, factor: float) -> float:
    declared = fields.optional("attention_factor")
    if declared is not None:
        return declared

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = fields.optional("mscale"), fields.optional("mscale_all_dim")
    return grown(over) / grown(under) if over and under else grown(1.0)


def _longrope(fields: _Fields) -> LongRopeScaling:
    fields.need("short_factor", "long_factor")
    original = fields.original_len
    factor = fields.optional("factor") or fields.max_position / original
    length = fields.optional("attention_factor")
    if length is None:
        length = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    tables = fields.numbers("short_factor"), fields.numbers("long_factor")
    return LongRopeScaling(*tables, original, length, fields.max_position)


READERS: Mapping[str, Callable[[_Fields], Scaling]] = {
    "default": lambda fields: NoScaling(),
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
