"""Reading a config.json without guessing: every error names the key and the value."""

from collections.abc import Mapping
from typing import Any

from paged_jax.errors import ModelLoadError

__all__ = ["flag", "only", "positive_float", "positive_int"]

Config = Mapping[str, Any]


def positive_int(config: Config, key: str, default: int | None = None) -> int:
    """The whole number at `key`; null and absent give `default`; without one they are refused."""
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"config.json: {key}={value!r} must be a positive whole number")
    return value


def positive_float(config: Config, key: str, default: float | None = None) -> float:
    """The number at `key`, as `positive_int`."""
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelLoadError(f"config.json: {key}={value!r} must be a positive number")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    """The boolean at `key`; null and absent give `default`."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"config.json: {key}={value!r} must be true or false")
    return value


def only(config: Config, key: str, *allowed: object) -> None:
    """Refuse any value at `key` but those allowed; null and absent are the first of them."""
    value = _value(config, key, allowed[0]) if allowed[0] is not None else config.get(key)
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ModelLoadError(f"config.json: {key}={value!r} is not supported, only {choices}")


def _value(config: Config, key: str, default: object) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json lacks {key}")
    return value
