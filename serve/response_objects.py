"""The objects of `/v1/responses`: the request, the response and what is in it."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from serve.protocol import CachedTokens, EngineRequest


class TextFormat(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """schema: of `json_schema`, which every answer then obeys, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class TextOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: TextFormat = TextFormat()
    verbosity: None = None


class Reasoning(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: None = None


class ResponsesRequest(EngineRequest, kw_only=True, frozen=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    metadata: dict[str, Any] = {}  # noqa: RUF012 - msgspec makes a new one each time
    reasoning: Reasoning = Reasoning()
    text: TextOptions = TextOptions()


class OutputText(Struct, kw_only=True, frozen=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Struct, kw_only=True, frozen=True):
    type: Literal["message"] = "message"
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningTokens(Struct, kw_only=True, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(Struct, kw_only=True, frozen=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True, frozen=True):
    reason: str


class ResponseObject(Struct, kw_only=True, frozen=True):
    """created_at is in Unix seconds. Nothing is stored, so no response can follow another."""

    id: str
    object: Literal["response"] = "response"
    created_at: float
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    reasoning: Reasoning
    temperature: float
    text: TextOptions
    top_p: float
    user: str | None
    output: list[OutputMessage] = []
    usage: ResponseUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    parallel_tool_calls: Literal[True] = True
    previous_response_id: None = None
    store: Literal[False] = False
    tool_choice: Literal["none"] = "none"
    tools: list[Any] = []
    truncation: Literal["disabled"] = "disabled"
