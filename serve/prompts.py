"""Prompts: from text, token ids or messages to token ids.

Text is tokenized in a thread: a prompt of some megabytes takes seconds, in which every other
client's tokens would wait.
"""

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from paged_jax import RequestError
from serve.engine import Engine, Tokenizer
from serve.messages import checked_messages
from serve.protocol import ChatRequest, CompletionRequest, TokenizeChatRequest
from serve.time_limit import within

MAX_SAMPLES = 1024


@dataclass(frozen=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None  # as the client wrote it, if it wrote text


async def completion_prompts(
    engine: Engine, body: CompletionRequest, num_samples: int
) -> list[Prompt]:
    """One prompt for a string or a list of ids, several for a list of either.

    num_samples: how many are drawn of each prompt.
    """
    given = body.prompt
    if isinstance(given, str):
        return await encode(engine, [given], body.add_special_tokens)
    if not given:
        raise RequestError("prompt is empty", param="prompt")
    if isinstance(given[0], int | float):
        return [Prompt(_convert(given, list[int]))]
    if len(given) * num_samples > MAX_SAMPLES:
        raise RequestError(
            f"{len(given)} prompts with {num_samples} samples of each make "
            f"{len(given) * num_samples}, at most {MAX_SAMPLES} are allowed in one request",
            param="prompt",
        )
    if isinstance(given[0], str):
        return await encode(engine, _convert(given, list[str]), body.add_special_tokens)
    return [Prompt(token_ids) for token_ids in _convert(given, list[list[int]])]


async def chat_prompt(
    engine: Engine,
    fields: ChatRequest | TokenizeChatRequest,
    timeout_s: float,
    tools: Sequence[dict[str, Any]] | None = None,
) -> Prompt:
    """The conversation as the model's template writes it, which may take `timeout_s`."""
    require_tokenizer(engine, "messages")
    if fields.add_generation_prompt and fields.continue_final_message:
        raise RequestError(
            "continue_final_message needs add_generation_prompt to be false: a message is either "
            "continued or answered",
            param="continue_final_message",
        )
    options = dict(fields.chat_template_kwargs)
    if fields.reasoning_effort is not None:
        options["reasoning_effort"] = fields.reasoning_effort
    messages = checked_messages(fields.messages)
    render = functools.partial(
        engine.render_chat,
        messages,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        tools=tools,
        variables=options,
    )
    try:
        token_ids = await within(timeout_s, render)
    except TimeoutError:
        raise RequestError(
            f"this model's chat template took longer than {timeout_s:g} s for these messages",
            param="messages",
            code="chat_template",
        ) from None
    except RequestError as error:
        if error.param == "chat_template_kwargs" and not fields.chat_template_kwargs:
            error.param = "reasoning_effort"  # the only variable that has a field of its own
        raise
    return Prompt(token_ids)


def require_tokenizer(engine: Engine, param: str) -> Tokenizer:
    if engine.tokenizer is None:
        raise RequestError(
            f"{param} needs a tokenizer, and this server runs without one: it takes token ids",
            param=param,
        )
    return engine.tokenizer


def prompt_text(engine: Engine, prompt: Prompt) -> str:
    """The prompt as the client wrote it, or what its token ids say."""
    if prompt.text is not None:
        return prompt.text
    return require_tokenizer(engine, "echo").decode(prompt.token_ids, skip_special_tokens=False)


async def encode(engine: Engine, texts: list[str], add_special_tokens: bool) -> list[Prompt]:
    tokenizer = require_tokenizer(engine, "prompt")

    def encode_all() -> list[Prompt]:
        return [
            Prompt(tokenizer.encode(text, add_special_tokens=add_special_tokens), text)
            for text in texts
        ]

    return await asyncio.to_thread(encode_all)


def _convert(given: list[Any], kind: Any) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"prompt must be a string, a list of strings, a list of token ids or a list of such "
            f"lists: {error}",
            param="prompt",
        ) from None
