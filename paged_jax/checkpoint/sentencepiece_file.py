"""SentencePiece's `tokenizer.model`: a vocabulary with scores, in protocol buffers.

The fields are those of sentencepiece_model.proto in google/sentencepiece. Nothing but the few that
a tokenizer needs is looked at. Behind a special token in a text a new text begins, as from GGUF.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers

from paged_jax.checkpoint.gguf_tokenizer import build_tokenizer, tokenizer_config
from paged_jax.errors import ModelLoadError

__all__ = ["read_sentencepiece"]

PIECE, TRAINER, NORMALIZER = 1, 2, 3  # of ModelProto
TEXT, SCORE, KIND = 1, 2, 3  # of a piece
MODEL_TYPE, UNIGRAM, BPE = 3, 1, 2  # of TrainerSpec, and its values that are read
SPECIAL_IDS = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}
SPECIAL_DEFAULTS = {"unknown": 0, "bos": 1, "eos": 2, "padding": -1}
CHARSMAP, DUMMY_PREFIX, SQUEEZE = 2, 3, 4  # of NormalizerSpec
NORMAL = 1  # kind of piece
SQUEEZED = {r"\A +| +\z": "", " {2,}": " "}

Message = dict[int, list[Any]]  # the values of each field, in order


def read_sentencepiece(path: Path, *, add_bos: bool, add_eos: bool) -> tuple[Tokenizer, dict]:
    """The tokenizer, and what tokenizer_config.json would say of it.

    Raises ModelLoadError for a damaged file, and for words or characters as pieces.
    """
    try:
        model = _message(path.read_bytes())
        metadata = _metadata(model)
        trainer = _message(_last(model, TRAINER, b""))
        normalizer = _message(_last(model, NORMALIZER, b""))
    except (IndexError, ValueError, struct.error) as error:
        raise ModelLoadError(f"{path} is no SentencePiece model: {error}") from error
    kind = _last(trainer, MODEL_TYPE, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise ModelLoadError(f"{path} has model_type={kind}; only unigram (1) and BPE (2) are read")
    ids = SPECIAL_DEFAULTS | {
        name: _signed(_last(trainer, field, SPECIAL_DEFAULTS[name]))
        for field, name in SPECIAL_IDS.items()
    }
    named = {name: token_id for name, token_id in ids.items() if token_id >= 0}
    metadata |= {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in named.items()}
    metadata["tokenizer.ggml.add_space_prefix"] = bool(_last(normalizer, DUMMY_PREFIX, 1))
    metadata["tokenizer.ggml.add_bos_token"] = add_bos
    metadata["tokenizer.ggml.add_eos_token"] = add_eos
    tokenizer = build_tokenizer(metadata)
    if kind == UNIGRAM:
        tokenizer.model = _unigram(metadata, ids["unknown"])
    _normalize_first(tokenizer, normalizer)
    return tokenizer, tokenizer_config(metadata)


def _metadata(model: Message) -> dict[str, Any]:
    """The pieces under the names of a GGUF file, which has the same scores and kinds."""
    pieces = [_message(piece) for piece in model.get(PIECE, ())]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [_last(piece, TEXT, b"").decode() for piece in pieces],
        "tokenizer.ggml.scores": [
            struct.unpack("<f", _last(piece, SCORE, bytes(4)))[0] for piece in pieces
        ],
        "tokenizer.ggml.token_type": [_last(piece, KIND, NORMAL) for piece in pieces],
    }


def _unigram(metadata: dict[str, Any], unknown: int) -> models.Unigram:
    tokens, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores"))
    pairs = list(zip(tokens, scores, strict=True))
    return models.Unigram(pairs, unknown, byte_fallback="<0x00>" in tokens)


def _normalize_first(tokenizer: Tokenizer, normalizer: Message) -> None:
    """What the file asks for before spaces become letters."""
    first: list[normalizers.Normalizer] = []
    if charsmap := _last(normalizer, CHARSMAP, b""):
        first.append(normalizers.Precompiled(charsmap))
    if _last(normalizer, SQUEEZE, 1):
        first += [normalizers.Replace(Regex(pattern), with_) for pattern, with_ in SQUEEZED.items()]
    if first:
        tokenizer.normalizer = normalizers.Sequence([*first, tokenizer.normalizer])


# -- protocol buffers: a field is a key (number and wire type) and a value ------------------------

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def _message(data: bytes) -> Message:
    message: Message = {}
    for field, value in _fields(data):
        message.setdefault(field, []).append(value)
    return message


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == BYTES:
            length, at = _varint(data, at)
        elif wire in (FIXED32, FIXED64):
            length = 4 if wire == FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > len(data):
            raise ValueError(f"it ends at byte {len(data)}, within a field")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number, seven bits a byte, the lowest first; and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError(f"a number without an end at byte {at}")


def _last(message: Message, field: int, default: Any) -> Any:
    return message[field][-1] if field in message else default


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
