"""`/v1/responses`: OpenAI's newer form of a chat, here for text that is not stored."""

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request

from paged_jax import RequestError, SamplingParams, StructuredOutputs
from serve import sse
from serve.caller import caller_of
from serve.deadline import deadline_of
from serve.engine import Output, OutputStream
from serve.fields import NEUTRAL_VALUES, SAMPLING, Fields
from serve.front import Front
from serve.generation import Generation
from serve.prompts import Prompt, chat_prompt
from serve.protocol import CachedTokens, ChatRequest
from serve.reply import Reply
from serve.request_id import rename_request
from serve.response_objects import (
    IncompleteDetails,
    OutputMessage,
    OutputText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from serve.sse import Outbox
from serve.structure import renamed, renaming
from serve.usage import UsageCount

# One choice is all that a response can hold, and it names its length otherwise.
RESPONSES_SAMPLING = SAMPLING - {"logprobs_mode", "max_tokens", "n", "prompt_logprobs"}


def _of_chats_only() -> dict[str, tuple[Any, ...]]:
    """Fields of the other endpoint: welcome with the values that they have there anyway."""
    own = {field.name for field in msgspec.structs.fields(ResponsesRequest)}
    return {
        field.name: (field.default,) if isinstance(field.default, bool) else ()
        for field in msgspec.structs.fields(ChatRequest)
        if field.name not in own
    }


RESPONSES_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES,
    **_of_chats_only(),
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "logprobs_mode": (),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "parallel_tool_calls": (True, False),
    "prompt": (),
    "prompt_logprobs": (),
    "stream_options": ({}, {"include_obfuscation": False}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
FORMAT = "text.format"
_PARTS = ("input_text", "output_text", "text")


async def create_response(front: Front, request: Request) -> Reply:
    """Answer a text or a conversation, in the form of OpenAI's Responses."""
    arrived = time.perf_counter()
    raw = await front.read_object(request)
    fields = front.fields(raw, ResponsesRequest, RESPONSES_SAMPLING, RESPONSES_NEUTRAL)
    body = fields.body
    params = _params(fields, front.engine.generation_defaults)
    prompt = await chat_prompt(front.engine, _chat_of(body), front.options.template_timeout_s)
    request_id = request.state.request_id
    if body.request_id is not None:
        request_id = rename_request(request, body.request_id)
    name = f"resp_{request_id}"
    standing = caller_of(request, body, front).standing()

    def submit(prompt: list[int], *, request_id: str) -> OutputStream:
        outputs = front.engine.generate(prompt, params, request_id=request_id, **standing)
        return renaming(outputs, FORMAT)

    generation = Generation(
        submit,
        front.gate,
        front.metrics,
        [prompt],
        params,
        f"{name}-{next(front.numbers)}",
        arrived,
        front.report_of(request),
    )
    progress = _Progress(_empty(front, body, params, name), prompt)
    return Reply(
        functools.partial(_stream if body.stream else _collect, generation, progress),
        front.gate,
        stream=body.stream,
        max_unsent_bytes=front.options.max_unsent_bytes,
        deadline=deadline_of(request, body, front.options, arrived),
        headers=fields.headers(),
    )


def _params(fields: Fields[ResponsesRequest], defaults: Mapping[str, Any]) -> SamplingParams:
    recommended = {name: value for name, value in defaults.items() if name in RESPONSES_SAMPLING}
    given = recommended | fields.sampling | {"max_tokens": fields.body.max_output_tokens}
    try:
        with renamed(FORMAT):
            form = StructuredOutputs.of(asked) if (asked := _form_of(fields.body)) else None
            return SamplingParams(**given, structured_outputs=form)
    except RequestError as error:
        if error.param == "max_tokens":
            error.param = "max_output_tokens"
        raise


def _form_of(body: ResponsesRequest) -> dict[str, Any] | None:
    form = body.text.format
    if form.type == "json_schema":
        if form.schema is UNSET:
            raise RequestError(f"{FORMAT}.schema is required", param=f"{FORMAT}.schema")
        return {"json": form.schema}
    return {"json_object": True} if form.type == "json_object" else None


def _chat_of(body: ResponsesRequest) -> ChatRequest:
    """The same conversation as the chat endpoint takes it."""
    items = body.input
    if isinstance(items, str):
        messages = [{"role": "user", "content": items}]
    else:
        if not items:
            raise RequestError("input is empty", param="input")
        messages = [_message(f"input[{i}]", item) for i, item in enumerate(items)]
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return ChatRequest(messages=messages, reasoning_effort=body.reasoning.effort)


def _message(where: str, item: Mapping[str, Any]) -> dict[str, Any]:
    if item.get("type", "message") != "message":
        raise RequestError(
            f"{where}.type is {item['type']!r}; only messages are supported",
            param=f"{where}.type",
            code="unsupported_field",
        )
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role"
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(f"{where}.content[{j}]", part) for j, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of parts", param=f"{where}.content"
        )
    return {"role": _ROLES[role], "content": content}


def _part(where: str, part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") not in _PARTS:
        raise RequestError(f"{where} is no text part, the only kind supported", param=where)
    return {"type": "text", "text": part.get("text")}


def _empty(
    front: Front, body: ResponsesRequest, params: SamplingParams, name: str
) -> ResponseObject:
    return ResponseObject(
        id=name,
        created_at=int(time.time()),
        status="in_progress",
        model=front.engine.model_name,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata,
        reasoning=body.reasoning,
        temperature=params.temperature,
        text=body.text,
        top_p=params.top_p,
        user=body.user,
    )


class _Progress:
    """A response as it grows: its text, and what is told of it. One request's task owns it."""

    def __init__(self, empty: ResponseObject, prompt: Prompt):
        self.empty = empty
        self._usage = UsageCount([prompt])
        self.new_text = ""  # of the latest output
        self._texts: list[str] = []
        self._finish_reason: str | None = None

    def add(self, output: Output) -> None:
        self._usage.add(0, output)
        self.new_text = "".join(choice.text for choice in output.outputs)
        self._texts.append(self.new_text)
        for choice in output.outputs:
            self._finish_reason = choice.finish_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message_id(self) -> str:
        return self.empty.id.replace("resp_", "msg_", 1)

    def message(self) -> OutputMessage:
        content = [OutputText(text=self.text)]
        return OutputMessage(id=self.message_id, status=self._status, content=content)

    def response(self) -> ResponseObject:
        usage, reason = self._usage.usage(), None
        if self._status == "incomplete":
            limit = self._finish_reason == "length"
            reason = IncompleteDetails(reason="max_output_tokens" if limit else "abort")
        return msgspec.structs.replace(
            self.empty,
            status=self._status,
            output=[self.message()],
            incomplete_details=reason,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=CachedTokens(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens
                ),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        )

    @property
    def _status(self) -> Any:
        return "completed" if self._finish_reason == "stop" else "incomplete"


async def _collect(generation: Generation, progress: _Progress, outbox: Outbox) -> None:
    await generation.run(lambda _, output: progress.add(output))
    outbox.put(msgspec.json.encode(progress.response()))


async def _stream(generation: Generation, progress: _Progress, outbox: Outbox) -> None:
    """Events in the order of OpenAI's own: created, the message, its text, and all ends again."""
    number = iter(range(2**62))

    def put(kind: str, **fields: Any) -> None:
        data = {"type": kind, "sequence_number": next(number), **fields}
        outbox.put(b"event: " + kind.encode() + b"\n" + sse.event(msgspec.json.encode(data)))

    item = {"output_index": 0, "item_id": progress.message_id, "content_index": 0}

    def begin() -> None:
        for kind in ("response.created", "response.in_progress"):
            put(kind, response=progress.empty)
        begun = OutputMessage(id=progress.message_id, status="in_progress", content=[])
        put("response.output_item.added", output_index=0, item=begun)
        put("response.content_part.added", **item, part=OutputText(text=""))

    def take(_: int, output: Output) -> None:
        if not started:
            started.append(True)
            begin()
        progress.add(output)
        if progress.new_text:
            put("response.output_text.delta", **item, delta=progress.new_text, logprobs=[])

    started: list[bool] = []
    await generation.run(take)
    for kind, fields in _endings(progress, item):
        put(kind, **fields)


def _endings(
    progress: _Progress, item: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text, response = progress.text, progress.response()
    yield "response.output_text.done", {**item, "text": text, "logprobs": []}
    yield "response.content_part.done", {**item, "part": OutputText(text=text)}
    yield "response.output_item.done", {"output_index": 0, "item": progress.message()}
    yield f"response.{response.status}", {"response": response}
