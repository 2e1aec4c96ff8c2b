"""What every endpoint is given: the engine and the parts of the server around it."""

import itertools
import logging
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paged_jax import RequestError
from serve.body import read_object
from serve.engine import Engine
from serve.errors import UnknownModelError
from serve.fields import NEUTRAL_VALUES, Fields, read_fields
from serve.gate import Gate
from serve.metrics import Metrics
from serve.options import ServeOptions
from serve.tracing import Report, Tracing

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True)
class Front:
    """created: Unix time of the server's start, in whole seconds."""

    engine: Engine
    gate: Gate
    metrics: Metrics
    options: ServeOptions
    created: int
    numbers: Iterator[int]  # makes the engine's ids unique, whatever ids the clients give
    tracing: Tracing | None

    @classmethod
    def of(
        cls, engine: Engine, options: ServeOptions, created: int, tracer_provider: Any = None
    ) -> "Front":
        gate = Gate(engine, options)
        tracing = None if tracer_provider is None else Tracing(tracer_provider)
        metrics = Metrics(engine, gate, options.metrics_prefix)
        return cls(engine, gate, metrics, options, created, itertools.count(), tracing)

    async def read_object(self, request: Request, *, may_be_empty: bool = False) -> dict[str, Any]:
        return await read_object(request, self.options.max_body_bytes, may_be_empty=may_be_empty)

    def fields(
        self,
        raw: dict[str, Any],
        body_type: type[Body],
        sampling: Set[str] = frozenset(),
        neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL_VALUES,
    ) -> Fields[Body]:
        """The request taken apart, for the served model; RequestError says what is wrong."""
        fields = read_fields(raw, body_type, sampling, neutral)
        self.check_model(raw.get("model", self.engine.model_name))
        if fields.unknown:
            self._unknown(fields.unknown)
        return fields

    def report_of(self, request: Request) -> Report | None:
        """Who is told what became of the request's prompts."""
        return None if self.tracing is None else self.tracing.report_of(request)

    def check_model(self, name: str) -> None:
        served = (self.engine.model_name, *self.engine.adapter_names)
        if name not in served:
            known = " and ".join(map(repr, served))
            raise UnknownModelError(
                f"The model {name!r} does not exist; {known} is served here",
                param="model",
                code="model_not_found",
            )

    def _unknown(self, names: tuple[str, ...]) -> None:
        self.metrics.unknown_fields.inc(len(names))
        if self.options.strict_fields:
            raise RequestError(
                f"The field {names[0]!r} is not known", param=names[0], code="unknown_field"
            )
        logger.info("Left aside request fields that nobody knows: %.200r", names)


def json_response(value: Any, status_code: int = 200, headers: Any = None) -> Response:
    return Response(
        msgspec.json.encode(value), status_code, headers=headers, media_type="application/json"
    )
