"""Mistral's `tekken.json`: bytes with ranks, as in tiktoken, behind a number of special tokens."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from paged_jax.checkpoint.gguf_tokenizer import Split, byte_level
from paged_jax.errors import ModelLoadError
from paged_jax.token_text import byte_level_alphabet

__all__ = ["read_tekken"]

# What files mean that do not list their special tokens (mistral-common).
UNLISTED = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
NUM_SPECIAL = 1000  # where the file does not say
BOS, EOS = "<s>", "</s>"


def read_tekken(
    content: Mapping[str, Any], *, add_bos: bool, add_eos: bool
) -> tuple[Tokenizer, dict]:
    """The tokenizer, and what tokenizer_config.json would say of it.

    Raises ModelLoadError for a file that lacks something.
    """
    try:
        config = content["config"]
        special = _special(content, int(config.get("default_num_special_tokens") or NUM_SPECIAL))
        size = config.get("default_vocab_size") or len(special) + len(content["vocab"])
        ordinary = _ordinary(content["vocab"], int(size) - len(special))
        split = Split((str(config["pattern"]),), whole_words=True)
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise ModelLoadError(f"tekken.json cannot be read: {error!r}") from error
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    words = ["".join(letters[byte] for byte in token) for token in ordinary]
    tokenizer = byte_level([*special, *words], _merges(words), split)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    ends = [BOS] * (add_bos and BOS in special), [EOS] * (add_eos and EOS in special)
    if any(ends):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*ends[0], "$A", *ends[1]],
            pair=None,
            special_tokens=[(token, special.index(token)) for end in ends for token in end],
        )
    return tokenizer, {
        name: token
        for name, token in (("bos_token", BOS), ("eos_token", EOS), ("unk_token", "<unk>"))
        if token in special
    }


def _special(content: Mapping[str, Any], number: int) -> list[str]:
    """The special tokens by id; the rest of their places bear their numbers."""
    listed = content.get("special_tokens")
    names = (
        dict(enumerate(UNLISTED))
        if listed is None
        else {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    )
    return [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(number)]


def _ordinary(vocab: Sequence[Mapping[str, Any]], number: int) -> list[bytes]:
    """The first tokens in the order of their ranks."""
    ranked = sorted(vocab, key=lambda entry: int(entry["rank"]))[:number]
    return [base64.b64decode(entry["token_bytes"], validate=True) for entry in ranked]


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that make tiktoken's choice: of all pairs that form a token, the lowest rank."""
    ranks = {word: rank for rank, word in enumerate(words)}
    return [
        pair
        for word in words
        for pair in sorted(
            (
                (word[:cut], word[cut:])
                for cut in range(1, len(word))
                if word[:cut] in ranks and word[cut:] in ranks
            ),
            key=lambda pair: (ranks[pair[0]], ranks[pair[1]]),
        )
    ]
