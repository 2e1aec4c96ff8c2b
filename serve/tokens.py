"""Tokenizing and its inverse, as the generating endpoints do it."""

import asyncio

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from paged_jax import RequestError
from serve.engine import Tokenizer
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
        prompt = await chat_prompt(front.engine, fields.body, front.options.template_timeout_s)
    else:
        fields = front.fields(raw, TokenizePromptRequest)
        [prompt] = await encode(front.engine, [fields.body.prompt], fields.body.add_special_tokens)
    strs: list[str] | UnsetType = UNSET
    if fields.body.return_token_strs:
        strs = await asyncio.to_thread(_strs, front, prompt.token_ids)
    tokens = Tokens(
        count=len(prompt.token_ids),
        max_model_len=front.engine.max_model_len,
        tokens=prompt.token_ids,
        token_strs=strs,
    )
    return json_response(tokens, headers=fields.headers())


async def tokenizer_info(front: Front, request: Request) -> Response:
    """What there is to know about the tokenizer, its chat template included."""
    return json_response(require_tokenizer(front.engine, "this endpoint").describe())


def _strs(front: Front, token_ids: list[int]) -> list[str]:
    """Each token decoded alone; a part of a character shows as a replacement mark."""
    decode = require_tokenizer(front.engine, "return_token_strs").decode
    return [decode([token_id], skip_special_tokens=False) for token_id in token_ids]


async def detokenize(front: Front, request: Request) -> Response:
    """The text of token ids."""
    fields = front.fields(await front.read_object(request), DetokenizeRequest)
    token_ids = fields.body.tokens
    tokenizer = require_tokenizer(front.engine, "tokens")
    text = await asyncio.to_thread(_text, tokenizer, token_ids, front.engine.vocab_size)
    return json_response(Text(prompt=text), headers=fields.headers())


def _text(tokenizer: Tokenizer, token_ids: list[int], vocab_size: int) -> str:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"tokens holds {token_id}, which is not in 0..{vocab_size - 1}", param="tokens"
            )
    return tokenizer.decode(token_ids, skip_special_tokens=False)
