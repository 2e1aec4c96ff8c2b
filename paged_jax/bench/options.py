"""What can be chosen about each benchmark: frozen values, which also make the flags."""

from dataclasses import dataclass, field
from typing import Any

from paged_jax.errors import ConfigError

__all__ = ["LatencyOptions", "OfflineOptions"]


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


def _require_positive(options: Any, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"{name} must be above 0, got {value}")


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """How a trace is run through the engine."""

    json: str | None = _option(None, "write every figure to this file")
    num_prompts: int | None = _option(None, "only the first N requests of the trace")
    arrivals: bool = _option(False, "requests come at their arrival_s (default: all at once)")
    compare: bool = _option(
        False, "also run the baselines: static batches, reserved blocks, no prefix cache"
    )
    simulate: bool = _option(False, "the scheduler alone, without a model: steps but no times")
    repeat: int | None = _option(
        None, "rounds; the one of median time is reported (default: 1, beside a peer 3)"
    )
    against: tuple[str, ...] = _option(
        (),
        "a peer's command, run in turn with ours; its last line is JSON with total_tok_s. May be "
        "given several times",
    )
    calibrate: bool = _option(
        True, "measure what the machine can do, and give shares of it (not in a simulation)"
    )

    def __post_init__(self):
        _require_positive(self, "num_prompts", "repeat")
        if self.compare and self.against:
            raise ConfigError("compare and against are two different comparisons: give one")
        if self.simulate and (self.against or self.arrivals):
            raise ConfigError("a simulation has no times: it goes without against and arrivals")

    @property
    def rounds(self) -> int:
        return self.repeat or (3 if self.against else 1)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    """A batch of equal requests."""

    json: str | None = _option(None, "write every figure to this file")
    batch_sizes: tuple[int, ...] = _option((1,), "requests at once; several may be given")
    input_len: int = _option(256, "prompt tokens of each request")
    output_len: int = _option(64, "output tokens of each request")
    repeat: int = _option(3, "rounds; medians are reported")
    calibrate: bool = _option(True, "measure what the machine can do, and give shares of it")

    def __post_init__(self):
        _require_positive(self, "output_len", "repeat")
        if self.input_len < 2:
            raise ConfigError(f"input_len must be at least 2, got {self.input_len}")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"batch_sizes must be above 0, got {self.batch_sizes}")
