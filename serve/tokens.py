"""Tokenizing and its inverse, as the generating endpoints do it."""

import asyncio

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from paged_jax import RequestError
from serve.fields import Fields
from serve.front import Front, json_response
from serve.prompts import chat_prompt, encode, require_tokenizer
from serve.protocol import (
    DetokenizeRequest,
    Text,
    TokenizeChatRequest,
    TokenizePromptRequest,
    Tokens,
)


async def tokenize(front: Front, request: Request) -> Response:
    """A prompt's tokens, or with `messages` those of a conversation."""
    raw = await front.read_object(request)
    fields: Fields[TokenizeChatRequest] | Fields[TokenizePromptRequest]
    if "messages" in raw:
        fields = front.fields(raw, TokenizeChatRequest)
        prompt = await chat_prompt(front.engine, fields.body)
    else:
        fields = front.fields(raw, TokenizePromptRequest)
        [prompt] = await encode(front.engine, [fields.body.prompt], fields.body.add_special_tokens)
    tokens = Tokens(
        count=len(prompt.token_ids),
        max_model_len=front.engine.max_model_len,
        tokens=prompt.token_ids,
        token_strs=_strs(front, prompt.token_ids) if fields.body.return_token_strs else UNSET,
    )
    return json_response(tokens, headers=fields.headers())


def _strs(front: Front, token_ids: list[int]) -> list[str]:
    """Each token decoded alone; a part of a character shows as a replacement mark."""
    decode = require_tokenizer(front.engine, "return_token_strs").decode
    return [decode([token_id], skip_special_tokens=False) for token_id in token_ids]


async def detokenize(front: Front, request: Request) -> Response:
    fields = front.fields(await front.read_object(request), DetokenizeRequest)
    token_ids = fields.body.tokens
    for token_id in token_ids:
        if not 0 <= token_id < front.engine.vocab_size:
            raise RequestError(
                f"tokens holds {token_id}, which is not in 0..{front.engine.vocab_size - 1}",
                param="tokens",
            )
    tokenizer = require_tokenizer(front.engine, "tokens")
    text = await asyncio.to_thread(tokenizer.decode, token_ids, skip_special_tokens=False)
    return json_response(Text(prompt=text), headers=fields.headers())
