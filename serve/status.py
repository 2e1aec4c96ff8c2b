"""How the server is: for load balancers, for Prometheus, for whoever asks its version."""

import dataclasses

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from paged_jax import __version__
from serve.front import Front, json_response


async def health(front: Front, request: Request) -> Response:
    """Readiness: 200 only when requests are taken."""
    state = front.gate.state
    if state == "ready":
        return json_response({"state": state})
    return json_response({"state": state}, 503, {"retry-after": "5"})


async def ping(front: Front, request: Request) -> Response:
    """Liveness: 503 only when the engine is dead or hangs, for compiling may take minutes."""
    state = front.gate.state
    return json_response({"state": state}, 503 if state in ("dead", "hung") else 200)


async def version(front: Front, request: Request) -> Response:
    """The version of paged-jax."""
    return json_response({"version": __version__})


async def load(front: Front, request: Request) -> Response:
    """How many requests are inside, and how many of their samples run and wait."""
    stats = front.engine.stats()
    return json_response(
        {
            "server_load": front.gate.num_inside - 1,  # but for the one that asks
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.kv_cache_usage,
        }
    )


async def server_info(front: Front, request: Request) -> Response:
    """How the server and its engine were set up; keys are left out."""
    options = dataclasses.asdict(front.options)
    del options["api_key"]
    return json_response(
        {
            "version": __version__,
            "model": front.engine.model_name,
            "state": front.gate.state,
            "max_model_len": front.engine.max_model_len,
            "vocab_size": front.engine.vocab_size,
            "options": options,
            "engine": dict(front.engine.settings),
        }
    )


async def metrics(front: Front, request: Request) -> Response:
    """Counts and times for Prometheus, in its text format."""
    return Response(front.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
