"""What can be chosen about each benchmark: frozen values, which also make the flags."""

from dataclasses import dataclass, field
from typing import Any

from paged_jax.errors import ConfigError

__all__ = ["LatencyOptions", "OfflineOptions", "ServingOptions"]


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
        "a peer, run in turn with ours: a command whose last line is JSON with total_tok_s, or "
        "the URL of a server; may be given several times",
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


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """A load on a server."""

    json: str | None = _option(None, "write every figure to this file")
    model: str | None = _option(None, "name in the API (default: the server's first)")
    num_prompts: int | None = _option(None, "only the first N requests; without a trace, how many")
    input_len: int = _option(128, "prompt tokens of each request, without a trace")
    output_len: int = _option(128, "output tokens of each request, without a trace")
    vocab_size: int = _option(1000, "random prompts draw token ids below it")
    request_rate: float | None = _option(
        None, "requests a second, or inf for all at once (default: the trace's own arrivals)"
    )
    max_concurrency: int | None = _option(None, "requests inside at the same time, at most")
    slo: tuple[str, ...] = _option((), "limits that a good request keeps, such as ttft_ms:500")
    against: tuple[str, ...] = _option(
        (),
        "a peer, in turn with ours: the URL of a server that gets the same load, or a command "
        "whose last line is JSON with total_tok_s; may be given several times",
    )
    repeat: int | None = _option(
        None, "rounds; the one of median time is reported (default: 1, beside a peer 3)"
    )
    send_text: bool = _option(False, "send the trace's texts instead of its token ids")
    ignore_eos: bool = _option(True, "ask for every token up to max_tokens")
    api_key: str | None = _option(None, "sent as a bearer token")
    timeout_s: float = _option(600.0, "seconds after which a request has failed")
    seed: int = _option(0, "of random prompts and arrivals")

    def __post_init__(self):
        _require_positive(
            self,
            *("num_prompts", "input_len", "output_len", "request_rate", "max_concurrency"),
            *("repeat", "timeout_s"),
        )
        if self.vocab_size < 32:
            raise ConfigError(f"vocab_size must be at least 32, got {self.vocab_size}")

    @property
    def rounds(self) -> int:
        return self.repeat or (3 if self.against else 1)
