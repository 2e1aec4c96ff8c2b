"""How loaded the engine is, in a response's header, for balancers that weigh replicas by it.

The format is that of ORCA, which Envoy and cloud load balancers read (xds.data.orca.v3).
"""

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.engine import Engine, Stats

ASKED_HEADER, TOLD_HEADER = "endpoint-load-metrics-format", "endpoint-load-metrics"


class LoadReports:
    """Pure ASGI middleware: reports the load to whoever asks for it, as `JSON` or as `TEXT`."""

    def __init__(self, app: ASGIApp, engine: Engine):
        self.app = app
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = ""
        if scope["type"] == "http":
            asked = Headers(scope=scope).get(ASKED_HEADER, "").upper()
        if asked not in ("JSON", "TEXT"):
            await self.app(scope, receive, send)
            return

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[TOLD_HEADER] = load_report(
                    self._engine.stats(), asked
                )
            await send(message)

        await self.app(scope, receive, send_with_load)


def load_report(stats: Stats, form: str) -> str:
    """form: `JSON` or `TEXT`. Utilisation passes 1 when more is asked for than can run."""
    named = {
        "kv_cache_usage_perc": round(stats.kv_cache_usage, 4),
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
    }
    rows = (stats.num_running + stats.num_waiting) / max(1, stats.max_num_seqs)
    utilization = round(max(rows, stats.kv_cache_usage), 4)
    if form == "JSON":
        report = {"application_utilization": utilization, "named_metrics": named}
        return "JSON " + msgspec.json.encode(report).decode()
    pairs = [f"application_utilization={utilization}"]
    pairs += [f"named_metrics.{name}={value}" for name, value in named.items()]
    return "TEXT " + ", ".join(pairs)
