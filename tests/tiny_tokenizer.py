"""A byte-level tokenizer with a ChatML template, and a model on disk that says what it is told."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tests.tiny_models import TINY_LLAMA, llama_tensors, write_model

BOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('the role ' ~ message.role ~ ' is not known') }}"
    "{% endif %}"
    "{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB_SIZE = 288  # of the models; the tokenizer knows fewer ids, as in many a release


def tiny_tokenizer(pieces: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """A token for each byte, four merges ("Ġthe"), three special tokens, and `pieces` as tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "r")]
    vocab = {token: i for i, token in enumerate([*letters, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([BOS, START, END])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    assert backend.get_vocab_size() <= VOCAB_SIZE
    return backend


def write_tokenizer(directory: Path, pieces: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Write tokenizer.json and tokenizer_config.json beside a model's own files.

    A text begins with a BOS token, a chat does not.
    """
    backend = tiny_tokenizer(pieces)
    directory.mkdir(parents=True, exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": BOS,
        "eos_token": END,
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return backend


def write_scripted_llama(directory: Path, scripts: Sequence[Sequence[str | bytes]]) -> None:
    """A Llama that goes on from the last token alone, as the scripts say, whatever came before.

    A script is a list of tokens, none of which stands twice in all of them: a string is a piece,
    which becomes a token of its own, and bytes are one token each. The last one, and everything
    that is in no script, is followed by the end-of-sequence token. The best logit leads by far.
    """
    pieces = [token for script in scripts for token in script if isinstance(token, str)]
    backend = write_tokenizer(directory, pieces)
    end = backend.token_to_id(END)
    follower = np.full(VOCAB_SIZE, end)
    used: set[int] = set()
    for script in scripts:
        ids = [token_id for token in script for token_id in _token_ids(backend, token)]
        assert len(set(ids)) == len(ids) and not used & set(ids), f"{script} repeats a token"
        used.update(ids)
        follower[ids[:-1]] = ids[1:]
    config = {
        **TINY_LLAMA,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": VOCAB_SIZE,
        "num_hidden_layers": 1,
        "eos_token_id": end,
    }
    write_model(directory, config, _scripted(llama_tensors(config), follower))


def _token_ids(backend: tokenizers.Tokenizer, token: str | bytes) -> list[int]:
    if isinstance(token, str):
        return [backend.token_to_id(token)]
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # GPT-2's byte letters
    others = [byte for byte in range(256) if byte not in plain]
    return [
        backend.token_to_id(chr(byte if byte in plain else 0x100 + others.index(byte)))
        for byte in token
    ]


def _scripted(tensors: Mapping[str, np.ndarray], follower: np.ndarray) -> dict[str, np.ndarray]:
    """Each token has a direction of its own, which the head turns into its follower's logit."""
    size = len(follower)
    head = np.zeros((size, size), np.float32)
    head[follower, np.arange(size)] = 4.0
    silent = ("o_proj.weight", "down_proj.weight")
    return {
        **{n: np.zeros_like(t) if n.endswith(silent) else t for n, t in tensors.items()},
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "model.norm.weight": np.ones(size, np.float32),
        "lm_head.weight": head,
    }
