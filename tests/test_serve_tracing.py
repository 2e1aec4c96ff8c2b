"""Spans, as OpenTelemetry's in-memory exporter gets them."""

import contextlib
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from paged_jax import ConfigError
from serve import ServeOptions
from serve.server import run_server
from serve.tracing import export_traces
from tests.fake_engine import FakeEngine
from tests.live_server import live_server, wait_until

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextlib.contextmanager
def traced(engine: FakeEngine):
    """A server, and a function that waits for its spans."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    def spans(count: int):
        wait_until(lambda: len(exporter.get_finished_spans()) >= count)
        found = exporter.get_finished_spans()
        assert len(found) == count
        exporter.clear()
        return found

    with live_server(engine, tracer_provider=provider) as server:
        yield server, spans


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_tells_what_became_of_a_request(stream):
    with traced(FakeEngine(delay_s=0.01, queue_s=0.005)) as (server, spans):
        body = {"prompt": "hi", "max_tokens": 4, "temperature": 0.5, "n": 2, "stream": stream}
        headers = {"traceparent": PARENT, "x-request-id": "mine"}
        began = time.time_ns()
        assert server.request("POST", COMPLETIONS, body, headers)[0] == 200
        (span,) = spans(1)
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert began <= span.start_time < span.end_time <= time.time_ns()
    told = dict(span.attributes)
    first, whole = (told.pop(f"gen_ai.latency.{name}") for name in ("time_to_first_token", "e2e"))
    assert 0.01 <= first < whole
    assert told.pop("gen_ai.request.id").startswith("cmpl-mine-")
    assert told == {
        "gen_ai.request.model": "fake/model",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.n": 2,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.latency.time_in_queue": 0.005,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_every_prompt_and_every_endpoint_has_its_span():
    with traced(FakeEngine()) as (server, spans):
        server.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1})
        assert all(span.parent is None for span in spans(2))
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
            (RESPONSES, {"input": "hi", "max_output_tokens": 1}),
        ):
            assert server.request("POST", path, body, {"traceparent": "nonsense"})[0] == 200
            spans(1)
        server.request("GET", "/health")
        server.post(COMPLETIONS, {"prompt": "hi", "n": -1})
        spans(0)


def test_a_span_tells_how_a_request_failed():
    with traced(FakeEngine(fails_after=1)) as (server, spans):
        assert server.post(COMPLETIONS, {"prompt": "hi"})[0] == 500
        (span,) = spans(1)
        assert span.status.status_code is StatusCode.ERROR
        assert span.attributes["error.type"] == "GenerationError"


def test_a_client_that_leaves_is_no_error():
    with traced(FakeEngine(delay_s=0.02)) as (server, spans):
        connection = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500, "stream": True})
        wait_until(lambda: server.engine.num_tokens >= 2)
        connection.close()
        (span,) = spans(1)
        assert span.status.status_code is StatusCode.UNSET
        assert span.attributes["error.type"] in ("CancelledError", "ClientDisconnect")
        assert span.attributes["gen_ai.usage.output_tokens"] >= 2


def test_without_the_exporter_the_way_out_is_named(monkeypatch):
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    with pytest.raises(ConfigError, match=r"paged-jax\[otel\]"):
        export_traces("http://127.0.0.1:1/v1/traces")
    with pytest.raises(ConfigError):
        run_server(FakeEngine(), ServeOptions(otlp_traces_endpoint="http://127.0.0.1:1"), port=0)
