"""What callers may pass as a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from paged_jax.errors import RequestError
from paged_jax.tokenizer import Tokenizer

__all__ = ["Prompt", "encode_prompt"]

Prompt = str | Mapping[str, Any] | Sequence[int]
"""A text, `{"prompt": text}`, `{"prompt_token_ids": [...]}`, or a list of token ids."""


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[str | None, Sequence[int]]:
    """The prompt's text, where it has one, and its token ids. RequestError if it is neither."""
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if keys not in ({"prompt"}, {"prompt_token_ids"}):
            raise RequestError(
                'a prompt must be a string, {"prompt": ...} or {"prompt_token_ids": [...]}, '
                f"got the keys {sorted(map(str, keys))}",
                param="prompt",
            )
        (key,) = keys
        prompt = prompt[key]
        if isinstance(prompt, str) != (key == "prompt"):
            wanted = "a string" if key == "prompt" else "a list of token ids"
            raise RequestError(
                f"{key} must be {wanted}, got {type(prompt).__name__}", param="prompt"
            )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer, and this engine runs without one: send "
                "prompt_token_ids",
                param="prompt",
            )
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        return None, prompt
    raise RequestError(
        f"a prompt must be a string or a list of token ids, got {type(prompt).__name__}",
        param="prompt",
    )
