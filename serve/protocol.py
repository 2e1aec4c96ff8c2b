"""The bodies of requests and responses, field by field.

Sampling fields are missing here on purpose: they go to `SamplingParams` as they came, which
checks them and names the one that is wrong.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

NumTokens = Annotated[int, Meta(ge=0, lt=2**31)]
Priority = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_TIMEOUT_S = 1_000_000
TimeoutS = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
EXACT_SCHEMA = "x-exact"


def _described(schema: dict[str, Any]) -> Meta:
    """The schema of a field whose type says less than what is accepted."""
    return Meta(extra_json_schema={EXACT_SCHEMA: schema})


# What is checked by hand, so that an error can name the part that is wrong.
_CONTENT = {
    "anyOf": [
        {"type": "null"},
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            },
        },
    ]
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {"role": {"type": "string"}, "content": _CONTENT},
}
Messages = Annotated[
    list[dict[str, Any]], _described({"type": "array", "minItems": 1, "items": _MESSAGE})
]
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_PROMPTS = [
    {"type": "string"},
    _STRINGS,
    _TOKEN_IDS,
    {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
]
PromptField = Annotated[str | list[Any], _described({"anyOf": _PROMPTS})]
User = Annotated[str, Meta(max_length=256)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]


# Requests


class StreamOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class EngineRequest(Struct, kw_only=True, frozen=True):
    """What every generating endpoint takes: whose request it is, and how it is answered."""

    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    user: User | None = None
    timeout_s: TimeoutS | None = None


class GenerationRequest(EngineRequest, kw_only=True, frozen=True):
    """What completions and chats have in common."""

    max_completion_tokens: NumTokens | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[Any] | None = None
    guided_grammar: str | None = None


class CompletionRequest(GenerationRequest, kw_only=True, frozen=True):
    prompt: PromptField
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: NumLogprobs | Literal[False] | None = None
    use_beam_search: bool = False


class ChatRequest(GenerationRequest, kw_only=True, frozen=True):
    messages: Messages
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None


class TokenizePromptRequest(Struct, kw_only=True, frozen=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatRequest(Struct, kw_only=True, frozen=True):
    messages: Messages
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None
    model: str | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Struct, kw_only=True, frozen=True):
    tokens: list[int]
    model: str | None = None


class PauseRequest(Struct, kw_only=True, frozen=True):
    mode: Literal["wait", "abort"] = "wait"


class UpdateWeightsRequest(Struct, kw_only=True, frozen=True):
    path: str
    version: str | int | None = None
    drain: Literal["abort", "wait", "keep"] = "abort"


class SleepRequest(Struct, kw_only=True, frozen=True):
    weights: Literal["keep", "host", "drop"] = "keep"
    drain: Literal["abort", "wait", "keep"] = "abort"


# Responses


class CachedTokens(Struct, kw_only=True, frozen=True):
    cached_tokens: int


class Usage(Struct, kw_only=True, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(Struct, kw_only=True, frozen=True):
    """An entry a token; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(Struct, kw_only=True, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, kw_only=True, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(Struct, kw_only=True, frozen=True):
    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct, kw_only=True, frozen=True):
    """Of a whole response and of a chunk, where `text` is what is new."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class FunctionCall(Struct, kw_only=True, frozen=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True, frozen=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Struct, kw_only=True, frozen=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, kw_only=True, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class FunctionCallDelta(Struct, kw_only=True, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True, frozen=True):
    """A call's first piece has its id and name, the others more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionCallDelta


class Delta(Struct, kw_only=True, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ModelCard(Struct, kw_only=True, frozen=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "paged-jax"
    root: str
    parent: str | None = None  # of an adapter: the model that it adapts
    max_model_len: int


class ModelList(Struct, kw_only=True, frozen=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(Struct, kw_only=True, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Rendered(Struct, kw_only=True, frozen=True):
    token_ids: list[int]


State = Literal["loading", "compiling", "ready", "paused", "asleep", "draining", "hung", "dead"]


class Health(Struct, kw_only=True, frozen=True):
    state: State


class WeightInfo(Struct, kw_only=True, frozen=True):
    version: str | int


class EngineTold(Struct, kw_only=True, frozen=True):
    """What became of an operator's wish."""

    state: State
    version: str | int


class Version(Struct, kw_only=True, frozen=True):
    version: str


class Text(Struct, kw_only=True, frozen=True):
    prompt: str


# Whole answers, as they are described. They are put together around their choices, piece by piece.


class _Answer(Struct, kw_only=True, frozen=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Completion(_Answer, kw_only=True, frozen=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(_Answer, kw_only=True, frozen=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ChatCompletionChunk(_Answer, kw_only=True, frozen=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class ErrorDetail(Struct, kw_only=True, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, kw_only=True, frozen=True):
    error: ErrorDetail
