"""Every endpoint in one table: the routes are made from it, and so is their description."""

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from serve import admin, protocol
from serve.adapters import (
    AdapterList,
    LoadAdapterRequest,
    UnloadAdapterRequest,
    load_adapter,
    unload_adapter,
)
from serve.completions import create_chat_completion, create_completion
from serve.fields import COMPLETION_SAMPLING, NEUTRAL_VALUES, SAMPLING
from serve.front import Front
from serve.gate import GateKeeper
from serve.models import get_model, list_models
from serve.options import ServeOptions
from serve.render import render_chat_completion, render_completion
from serve.response_objects import ResponseObject, ResponsesRequest
from serve.responses import RESPONSES_NEUTRAL, RESPONSES_SAMPLING, create_response
from serve.status import health, load, metrics, ping, server_info, version
from serve.tokens import detokenize, tokenize, tokenizer_info

Endpoint = Callable[[Front, Request], Awaitable[ASGIApp]]


@dataclass(frozen=True)
class Operation:
    """An endpoint, and what there is to know about it.

    gated: it answers 503 until the engine is ready; queues: and 429 while the queue is full.
    bodies: what its body is read as, one of them; sampling: the sampling fields that it may have
    in addition; neutral: those that it refuses, but for some values. answers: what it gives, None
    for text; chunks: what the events of its stream hold, None if it cannot stream.
    """

    path: str
    call: Endpoint
    methods: tuple[str, ...] = ("GET",)
    gated: bool = True
    queues: bool = False
    bodies: tuple[type, ...] = ()
    sampling: Set[str] = frozenset()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NEUTRAL_VALUES)
    answers: Any = dict
    chunks: Any = None


POST = ("POST",)
_ANYTIME: dict[str, Any] = {"gated": False}
_COMPLETION: dict[str, Any] = {
    "bodies": (protocol.CompletionRequest,),
    "sampling": COMPLETION_SAMPLING,
}
_CHAT: dict[str, Any] = {"bodies": (protocol.ChatRequest,), "sampling": SAMPLING}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "/v1/completions",
        create_completion,
        POST,
        queues=True,
        answers=protocol.Completion,
        chunks=protocol.Completion,
        **_COMPLETION,
    ),
    Operation(
        "/v1/chat/completions",
        create_chat_completion,
        POST,
        queues=True,
        answers=protocol.ChatCompletion,
        chunks=protocol.ChatCompletionChunk,
        **_CHAT,
    ),
    Operation(
        "/v1/responses",
        create_response,
        POST,
        queues=True,
        bodies=(ResponsesRequest,),
        sampling=RESPONSES_SAMPLING,
        neutral=RESPONSES_NEUTRAL,
        answers=ResponseObject,
        chunks=ResponseObject,
    ),
    Operation(
        "/v1/completions/render",
        render_completion,
        POST,
        answers=list[protocol.Rendered],
        **_COMPLETION,
    ),
    Operation(
        "/v1/chat/completions/render",
        render_chat_completion,
        POST,
        answers=protocol.Rendered,
        **_CHAT,
    ),
    Operation("/v1/models", list_models, answers=protocol.ModelList),
    Operation("/v1/models/{model:path}", get_model, answers=protocol.ModelCard),
    Operation(
        "/tokenize",
        tokenize,
        POST,
        bodies=(protocol.TokenizePromptRequest, protocol.TokenizeChatRequest),
        answers=protocol.Tokens,
    ),
    Operation(
        "/detokenize",
        detokenize,
        POST,
        bodies=(protocol.DetokenizeRequest,),
        answers=protocol.Text,
    ),
    Operation("/tokenizer_info", tokenizer_info),
    Operation("/server_info", server_info),
    Operation("/load", load),
    Operation("/health", health, answers=protocol.Health, **_ANYTIME),
    Operation("/ping", ping, ("GET", "POST"), answers=protocol.Health, **_ANYTIME),
    Operation("/live", ping, answers=protocol.Health, **_ANYTIME),
    Operation("/version", version, answers=protocol.Version, **_ANYTIME),
    Operation("/metrics", metrics, answers=None, **_ANYTIME),
)


def _admin(
    path: str, call: Endpoint, body: type | None = None, answers: Any = protocol.EngineTold
) -> Operation:
    bodies = () if body is None else (body,)
    return Operation(path, call, POST, gated=False, bodies=bodies, answers=answers)


# Not behind the gate: a paused server must hear that it shall go on.
ADMIN_OPERATIONS: tuple[Operation, ...] = (
    _admin("/pause", admin.pause, protocol.PauseRequest),
    _admin("/resume", admin.resume),
    _admin("/reset_prefix_cache", admin.reset_prefix_cache),
    _admin("/update_weights", admin.update_weights, protocol.UpdateWeightsRequest),
    Operation("/weight_info", admin.weight_info, gated=False, answers=protocol.WeightInfo),
    _admin("/sleep", admin.sleep, protocol.SleepRequest),
    _admin("/wake_up", admin.wake_up),
    _admin("/v1/load_lora_adapter", load_adapter, LoadAdapterRequest, AdapterList),
    _admin("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest, AdapterList),
)


def operations_of(options: ServeOptions) -> tuple[Operation, ...]:
    """Those that a server with these options has."""
    return OPERATIONS + (ADMIN_OPERATIONS if options.enable_admin else ())


def routes(front: Front, operations: Iterable[Operation]) -> list[BaseRoute]:
    return [_route(front, operation) for operation in operations]


def _route(front: Front, operation: Operation) -> Route:
    keeper = Middleware(GateKeeper, gate=front.gate, queues=operation.queues)
    return Route(
        operation.path,
        functools.partial(operation.call, front),
        methods=operation.methods,
        name=operation.call.__name__,
        middleware=[keeper] if operation.gated else None,
    )
