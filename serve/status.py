"""How the server is: for load balancers, for Prometheus, for whoever asks its version."""

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
    return json_response({"version": __version__})


async def metrics(front: Front, request: Request) -> Response:
    return Response(front.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
