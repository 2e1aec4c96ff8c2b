"""How the server behaves, apart from the engine: one frozen value."""

import re
from dataclasses import dataclass, field
from typing import Literal

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _option(default, doc: str):
    return field(default=default, metadata={"doc": doc, "group": "Server"})


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Raises ValueError for a bound that would let nothing through."""

    strict_fields: bool = _option(False, "refuse request fields that nobody knows")
    max_body_bytes: int = _option(16 * 2**20, "a longer request body is refused with 413")
    max_unsent_bytes: int = _option(
        2**20, "a stream is aborted when this much of it waits for a slow reader"
    )
    drain_timeout_s: float = _option(30.0, "how long running requests may go on after SIGTERM")
    exit_when_dead: bool = _option(False, "end with exit code 1 when the engine dies")
    cache_salt_header: str | None = _option(
        None,
        "request header in which a trusted proxy names whose cached prefixes may be shared; it is "
        "added to the request's own cache_salt",
    )
    metrics_prefix: Literal["vllm", "paged_jax"] = _option(
        "vllm", "prefix of the metrics that other engines have too"
    )
    access_log: bool = _option(True, "log a line for every response")

    def __post_init__(self):
        for name in ("max_body_bytes", "max_unsent_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
        if self.drain_timeout_s < 0:
            raise ValueError(f"drain_timeout_s must not be negative, got {self.drain_timeout_s!r}")
        header = self.cache_salt_header
        if header is not None and not _HEADER_NAME.fullmatch(header):
            raise ValueError(f"cache_salt_header must be a header's name, got {header!r}")
        if self.metrics_prefix not in ("vllm", "paged_jax"):
            raise ValueError(
                f"metrics_prefix must be 'vllm' or 'paged_jax', got {self.metrics_prefix!r}"
            )


DEFAULTS = ServeOptions()
