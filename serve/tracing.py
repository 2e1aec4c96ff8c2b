"""A span for every prompt that the engine worked on, for OpenTelemetry. An extra: `[otel]`.

Attributes bear the names of OpenTelemetry's conventions for generative AI, where those have one.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from paged_jax import ConfigError, SamplingParams, __version__


@dataclass(frozen=True)
class Work:
    """What became of one prompt. Times are `time.perf_counter()`'s; first: of its first token.

    error: what ended it, if it did not end by itself; aborted: that was the client or the operator.
    """

    request_id: str
    model: str
    params: SamplingParams
    num_prompt_tokens: int
    num_tokens: int
    arrived: float
    first: float | None
    queue_s: float
    finish_reasons: Sequence[str]
    error: BaseException | None
    aborted: bool


Report = Callable[[Work], None]


class Tracing:
    """Makes spans with an OpenTelemetry `TracerProvider`."""

    def __init__(self, provider: Any):
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = provider.get_tracer("paged_jax", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def report_of(self, request: Request) -> Report:
        """A function that tells what became of the request's prompts, below its `traceparent`."""
        parent = self._propagator.extract(dict(request.headers))
        return functools.partial(self._report, parent)

    def _report(self, parent: Any, work: Work) -> None:
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=self._trace.SpanKind.SERVER,
            start_time=_wall_ns(work.arrived),
            attributes={name: value for name, value in _attributes(work) if value is not None},
        )
        if work.error is not None:
            span.set_attribute("error.type", type(work.error).__name__)
            if not work.aborted:
                span.set_status(self._trace.StatusCode.ERROR)
        span.end()


def _attributes(work: Work) -> list[tuple[str, Any]]:
    params, now = work.params, time.perf_counter()
    first_s = None if work.first is None else work.first - work.arrived
    return [
        ("gen_ai.request.id", work.request_id),
        ("gen_ai.request.model", work.model),
        ("gen_ai.request.max_tokens", params.max_tokens),
        ("gen_ai.request.temperature", params.temperature),
        ("gen_ai.request.top_p", params.top_p),
        ("gen_ai.request.n", params.n),
        ("gen_ai.response.finish_reasons", list(work.finish_reasons)),
        ("gen_ai.usage.input_tokens", work.num_prompt_tokens),
        ("gen_ai.usage.output_tokens", work.num_tokens),
        ("gen_ai.latency.time_in_queue", work.queue_s),
        ("gen_ai.latency.time_to_first_token", first_s),
        ("gen_ai.latency.e2e", now - work.arrived),
    ]


def _wall_ns(moment: float) -> int:
    """Unix nanoseconds of a moment of `time.perf_counter()`."""
    return time.time_ns() - int((time.perf_counter() - moment) * 1e9)


def export_traces(endpoint: str) -> Any:
    """A provider whose spans go to an OTLP collector over HTTP, such as http://HOST:4318/v1/traces.

    Raises ConfigError where the extra is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry: pip install 'paged-jax[otel]'"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "paged-jax"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
