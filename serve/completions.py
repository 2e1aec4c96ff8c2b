"""The two endpoints that generate: completions and chat completions."""

import functools
import time
from collections.abc import Callable, Sequence

from starlette.requests import Request

from paged_jax import RequestError, SamplingParams, __version__
from serve import answer
from serve.beams import beam_outputs
from serve.caller import caller_of
from serve.deadline import deadline_of
from serve.engine import OutputStream
from serve.envelope import Envelope
from serve.fields import COMPLETION_SAMPLING, SAMPLING, Fields
from serve.formats import ChatFormat, CompletionFormat, Format
from serve.front import Front
from serve.generation import Generation
from serve.prompts import Prompt, chat_prompt, completion_prompts, prompt_text
from serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, StreamOptions
from serve.reply import Reply
from serve.request_id import rename_request
from serve.sampling import beam_search_params, sampling_params

COMPLETION_MAX_TOKENS = 16


async def create_completion(front: Front, request: Request) -> Reply:
    """Continue prompts, given as text or as token ids."""
    arrived = time.perf_counter()
    fields = front.fields(await front.read_object(request), CompletionRequest, COMPLETION_SAMPLING)
    body = fields.body
    submit: Callable[..., OutputStream]
    if body.use_beam_search:
        params, beams = beam_search_params(fields, COMPLETION_MAX_TOKENS)
        submit = functools.partial(beam_outputs, front.engine, params=beams)
    else:
        params = sampling_params(fields, front.engine.generation_defaults, COMPLETION_MAX_TOKENS)
        submit = functools.partial(front.engine.generate, params=params)
    prompts = await completion_prompts(front.engine, body, params.num_samples)
    per_choice = [prompt for prompt in prompts for _ in range(params.n)]
    form = CompletionFormat(
        prompt_token_ids=[p.token_ids for p in per_choice] if body.return_token_ids else None,
        echoes=[prompt_text(front.engine, p) for p in per_choice] if body.echo else None,
    )
    return _reply(front, request, fields, prompts, params, submit, form, "cmpl", arrived)


async def create_chat_completion(front: Front, request: Request) -> Reply:
    """Answer a conversation."""
    arrived = time.perf_counter()
    fields = front.fields(await front.read_object(request), ChatRequest, SAMPLING)
    body = fields.body
    params = sampling_params(fields, front.engine.generation_defaults, None)
    submit = functools.partial(front.engine.generate, params=params)
    prompt = await chat_prompt(front.engine, body, front.options.template_timeout_s)
    form = ChatFormat(prompt_token_ids=prompt.token_ids if body.return_token_ids else None)
    return _reply(front, request, fields, [prompt], params, submit, form, "chatcmpl", arrived)


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
