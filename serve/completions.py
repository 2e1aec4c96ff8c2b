"""The two endpoints that generate: completions and chat completions."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from paged_jax import RequestError, SamplingParams, __version__
from serve import answer
from serve.beams import beam_outputs
from serve.caller import caller_of
from serve.deadline import deadline_of
from serve.engine import OutputStream
from serve.envelope import Envelope
from serve.fields import COMPLETION_SAMPLING, SAMPLING, Fields
from serve.formats import Asked, ChatFormat, CompletionFormat, Format
from serve.front import Front
from serve.generation import Generation
from serve.logprobs import TokenNames
from serve.prompts import Prompt, chat_prompt, completion_prompts, prompt_text
from serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from serve.reply import Reply
from serve.request_id import rename_request
from serve.sampling import beam_search_params, sampling_params
from serve.structure import form_of, renaming
from serve.tools import ToolUse, tool_use

COMPLETION_MAX_TOKENS = 16


async def create_completion(front: Front, request: Request) -> Reply:
    """Continue prompts, given as text or as token ids."""
    arrived = time.perf_counter()
    fields = front.fields(await front.read_object(request), CompletionRequest, COMPLETION_SAMPLING)
    body = fields.body
    num_logprobs = None if body.logprobs is False else body.logprobs
    asked = _asked(front, fields, num_logprobs)
    submit: Callable[..., OutputStream]
    if body.use_beam_search:
        found = form_of(body)
        if num_logprobs is not None or found is not None:
            name = "logprobs" if found is None else found[0]
            raise RequestError(
                f"{name} is not supported with use_beam_search: leave it out", param=name
            )
        params, beams = beam_search_params(fields, COMPLETION_MAX_TOKENS)
        submit = functools.partial(beam_outputs, front.engine, params=beams)
    else:
        shaped: dict[str, Any] = {"logprobs": num_logprobs}
        wanted = fields.sampling.get("prompt_logprobs", 0)
        is_number = type(wanted) is int and wanted >= 0  # else it is left to be refused
        if body.echo and num_logprobs is not None and is_number:
            shaped["prompt_logprobs"] = max(num_logprobs, wanted)
        params, submit = generating(front, fields, COMPLETION_MAX_TOKENS, shaped)
    prompts = await completion_prompts(front.engine, body, params.num_samples)
    form = CompletionFormat(
        [prompt.token_ids for prompt in prompts],
        params.n,
        asked,
        [prompt_text(front.engine, prompt) for prompt in prompts] if body.echo else None,
    )
    return _reply(front, request, fields, prompts, params, submit, form, "cmpl", arrived)


async def create_chat_completion(front: Front, request: Request) -> Reply:
    """Answer a conversation."""
    arrived = time.perf_counter()
    fields = front.fields(await front.read_object(request), ChatRequest, SAMPLING)
    body = fields.body
    asked = _asked(front, fields, _num_chat_logprobs(body))
    tools = tool_use(body, front.engine, front.options.tool_call_parser)
    params, submit = generating(front, fields, None, {"logprobs": asked.logprobs}, tools)
    prompt = await chat_prompt(
        front.engine,
        body,
        front.options.template_timeout_s,
        None if tools is None else tools.tools,
    )
    form = ChatFormat(prompt.token_ids, asked, None if tools is None else tools.calls)
    return _reply(front, request, fields, [prompt], params, submit, form, "chatcmpl", arrived)


def _num_chat_logprobs(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


def _asked(front: Front, fields: Fields[GenerationRequest], num_logprobs: int | None) -> Asked:
    body = fields.body
    return Asked(
        names=TokenNames(front.engine.tokenizer, body.return_tokens_as_token_ids),
        token_ids=body.return_token_ids,
        logprobs=num_logprobs,
        prompt_logprobs=fields.sampling.get("prompt_logprobs"),
    )


def generating(
    front: Front,
    fields: Fields[GenerationRequest],
    max_tokens: int | None,
    shaped: dict[str, Any],
    tools: ToolUse | None = None,
) -> tuple[SamplingParams, Callable[..., OutputStream]]:
    """What is asked of the engine, and the way to ask it.

    shaped: the sampling fields that the endpoint has worked out.
    """
    found = form_of(fields.body)
    if tools is not None:
        if found is not None:
            raise RequestError(
                f"{found[0]} and tools exclude each other: a text has one form", param=found[0]
            )
        if tools.form is not None:
            found = ("tools", tools.form)
        shaped["skip_special_tokens"] = False  # some families mark their calls with such tokens
    if found is not None:
        shaped["structured_outputs"] = found[1]
    params = sampling_params(fields, front.engine.generation_defaults, max_tokens, **shaped)
    if found is None:
        return params, functools.partial(front.engine.generate, params=params)
    name = found[0]

    def submit(prompt: list[int], **options: Any) -> OutputStream:
        return renaming(front.engine.generate(prompt, params, **options), name)

    return params, submit


def _reply(
    front: Front,
    request: Request,
    fields: Fields[GenerationRequest],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    submit: Callable[..., OutputStream],
    form: Format,
    kind: str,
    arrived: float,
) -> Reply:
    body = fields.body
    name = f"{kind}-{_request_id(request, body)}"
    unique_name = f"{name}-{next(front.numbers)}"
    caller = caller_of(request, body, front)
    generation = Generation(
        functools.partial(submit, **caller.standing()),
        front.gate,
        front.metrics,
        prompts,
        params,
        unique_name,
        arrived,
        front.report_of(request),
    )
    envelope = Envelope(
        id=name,
        object=form.chunk_object if body.stream else form.object,
        created=int(time.time()),
        model=caller.adapter or front.engine.model_name,
        system_fingerprint=f"paged-jax-{__version__}",
    )
    options = _stream_options(body)
    if body.stream:
        work = functools.partial(answer.stream, generation, form, envelope, options)
    else:
        work = functools.partial(answer.collect, generation, form, envelope)
    return Reply(
        work,
        front.gate,
        stream=body.stream,
        max_unsent_bytes=front.options.max_unsent_bytes,
        deadline=deadline_of(request, body, front.options, arrived),
        headers=fields.headers(),
    )


def _request_id(request: Request, body: GenerationRequest) -> str:
    """The header's id before the body's before one made here; echoed by the middleware."""
    if body.request_id is not None:
        return rename_request(request, body.request_id)
    return request.state.request_id


def _stream_options(body: GenerationRequest) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if body.stream_options.include_obfuscation:
        raise RequestError(
            "stream_options.include_obfuscation is not supported by this server",
            param="stream_options.include_obfuscation",
            code="unsupported_field",
        )
    return body.stream_options
