"""Prompts as the engine would get them, without generating: routers hash their token ids."""

from starlette.requests import Request
from starlette.responses import Response

from serve.completions import generating
from serve.fields import COMPLETION_SAMPLING, SAMPLING
from serve.front import Front, json_response
from serve.prompts import chat_prompt, completion_prompts
from serve.protocol import ChatRequest, CompletionRequest, Rendered
from serve.tools import tool_use


async def render_completion(front: Front, request: Request) -> Response:
    """The token ids of a completion's prompts."""
    fields = front.fields(await front.read_object(request), CompletionRequest, COMPLETION_SAMPLING)
    generating(front, fields, None, {})  # as strict as if it were to be generated
    prompts = await completion_prompts(front.engine, fields.body, num_samples=1)
    rendered = [Rendered(token_ids=prompt.token_ids) for prompt in prompts]
    return json_response(rendered, headers=fields.headers())


async def render_chat_completion(front: Front, request: Request) -> Response:
    """The token ids of a conversation."""
    fields = front.fields(await front.read_object(request), ChatRequest, SAMPLING)
    use = tool_use(fields.body, front.engine, front.options.tool_call_parser)
    generating(front, fields, None, {}, use)
    tools = None if use is None else use.tools
    prompt = await chat_prompt(front.engine, fields.body, front.options.template_timeout_s, tools)
    return json_response(Rendered(token_ids=prompt.token_ids), headers=fields.headers())
