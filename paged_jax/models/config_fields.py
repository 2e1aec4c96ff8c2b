"""Reading a config.json without guessing: every error names the key and the value."""

from collections.abc import Mapping
from typing import Any

from paged_jax.errors import ModelLoadError

__all__ = [
    "Config",
    "flag",
    "layer_windows",
    "only",
    "optional_float",
    "optional_int",
    "positive_float",
    "positive_int",
    "text",
]

Config = Mapping[str, Any]
FULL, SLIDING = ("full_attention", "attention"), "sliding_attention"


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


def optional_int(config: Config, key: str, default: int | None = None) -> int | None:
    """The whole number at `key`; null gives None, and only absent the `default`."""
    value = config.get(key, default)
    return None if value is None else positive_int({key: value}, key)


def optional_float(config: Config, key: str, default: float | None = None) -> float | None:
    """The number at `key`; null gives None, and only absent the `default`."""
    value = config.get(key, default)
    return None if value is None else positive_float({key: value}, key)


def flag(config: Config, key: str, default: bool) -> bool:
    """The boolean at `key`; null and absent give `default`."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"config.json: {key}={value!r} must be true or false")
    return value


def text(config: Config, key: str, default: str, known: Mapping[str, Any]) -> str:
    """The text at `key`, one of those known; null and absent give `default`."""
    value = _value(config, key, default)
    if not isinstance(value, str) or value not in known:
        choices = ", ".join(map(repr, known))
        raise ModelLoadError(f"config.json: {key}={value!r} is not supported, only {choices}")
    return value


def only(config: Config, key: str, *allowed: object) -> None:
    """Refuse any value at `key` but those allowed; null and absent are the first of them."""
    value = _value(config, key, allowed[0]) if allowed[0] is not None else config.get(key)
    if value not in allowed:
        choices = " or ".join(map(repr, allowed))
        raise ModelLoadError(f"config.json: {key}={value!r} is not supported, only {choices}")


def layer_windows(
    config: Config, window: int | None, default: list[str], key: str = "layer_types"
) -> tuple[int | None, ...]:
    """The window of each layer: `window` where `layer_types` says sliding, None where full.

    `default` are the kinds of layers of a config that does not list them.
    """
    kinds = config.get(key)
    if kinds is None:
        kinds = default
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise ModelLoadError(
            f"config.json: {key} must list one kind for each of {len(default)} layers"
        )
    if unknown := [kind for kind in kinds if kind != SLIDING and kind not in FULL]:
        raise ModelLoadError(
            f"config.json: {key} holds {unknown[0]!r}, which is not supported, only "
            f"{SLIDING!r} and {FULL[0]!r}"
        )
    if SLIDING in kinds and window is None:
        raise ModelLoadError(f"config.json: {key} has {SLIDING!r}, but there is no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _value(config: Config, key: str, default: object) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json lacks {key}")
    return value
