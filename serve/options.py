"""How the server behaves, apart from the engine: one frozen value."""

import re
from dataclasses import dataclass, field
from typing import Literal, get_args

_API_KEY = re.compile(r"[\x21-\x7e]+")
_ROOT_PATH = re.compile(r"(/[^/?#\s]+)+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def _option(default, doc: str, *, shown: bool = True):
    return field(default=default, repr=shown, metadata={"doc": doc, "group": "Server"})


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Raises ValueError for a bound that would let nothing through."""

    api_key: tuple[str, ...] = _option(
        (),
        "required of clients as a bearer token; may be given several times (also: the variable "
        "PAGED_JAX_API_KEY, --api-key-file)",
        shown=False,
    )
    cors_origin: tuple[str, ...] = _option(
        (), "web pages of this origin may call the server; * is any; may be given several times"
    )
    root_path: str = _option("", "path under which a proxy shows this server, such as /llm")
    strict_fields: bool = _option(False, "refuse request fields that nobody knows")
    max_body_bytes: int = _option(16 * 2**20, "a longer request body is refused with 413")
    max_unsent_bytes: int = _option(
        2**20, "a stream is aborted when this much of it waits for a slow reader"
    )
    max_queued: int = _option(
        1024, "samples that may wait for their turn; further requests are refused with 429"
    )
    request_timeout_s: float | None = _option(
        None, "a request is ended after this time, or after its own timeout_s if that is shorter"
    )
    step_timeout_s: float = _option(
        300.0, "the server says that it hangs when a step takes longer; compiling does not count"
    )
    template_timeout_s: float = _option(5.0, "how long a chat template may take for a request")
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
    otlp_traces_endpoint: str | None = _option(
        None, "send OpenTelemetry spans to this URL, as http://HOST:4318/v1/traces"
    )
    enable_admin: bool = _option(
        False,
        "offer /pause, /resume, /reset_prefix_cache, /update_weights, /sleep and /wake_up, to "
        "whoever has a key",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = _option(
        "auto", "how the model writes tool calls; auto asks its chat template"
    )
    access_log: bool = _option(True, "log a line for every response")
    log_format: Literal["text", "json"] = _option("text", "how log lines look")

    def __post_init__(self):
        for name in (
            "max_body_bytes",
            "max_unsent_bytes",
            "request_timeout_s",
            "step_timeout_s",
            "template_timeout_s",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        for name in ("drain_timeout_s", "max_queued"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)!r}")
        for key in self.api_key:
            if not _API_KEY.fullmatch(key):
                raise ValueError(
                    "api_key must be printable ASCII characters without spaces, which are all that "
                    "a header can carry"
                )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ValueError(
                f"root_path must begin with / and not end with one, got {self.root_path!r}"
            )
        parsers = get_args(type(self).__annotations__["tool_call_parser"])
        if self.tool_call_parser not in parsers:
            raise ValueError(
                f"tool_call_parser must be one of {', '.join(parsers)}, got "
                f"{self.tool_call_parser!r}"
            )
        header = self.cache_salt_header
        if header is not None and not _HEADER_NAME.fullmatch(header):
            raise ValueError(f"cache_salt_header must be a header's name, got {header!r}")
        for name, choices in (
            ("metrics_prefix", ("vllm", "paged_jax")),
            ("log_format", ("text", "json")),
        ):
            if getattr(self, name) not in choices:
                known = " or ".join(map(repr, choices))
                raise ValueError(f"{name} must be {known}, got {getattr(self, name)!r}")


DEFAULTS = ServeOptions()
