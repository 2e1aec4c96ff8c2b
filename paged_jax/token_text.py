"""Text from tokens, one at a time: what each token adds, as bytes, and their decoding."""

import codecs
import json
import re
from collections.abc import Iterable

import tokenizers

from paged_jax.errors import ModelLoadError

__all__ = ["TextStream", "TokenBytes", "byte_level_alphabet"]

# Decoders under which a text is the sum of what its tokens add, except that bytes may have to come
# together first and that the first token may lose a space. No decoder at all is one of them.
ADDITIVE = {"ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Sequence", "Strip"}


def _decoder_kinds(decoder: dict | None) -> set[str]:
    if decoder is None:
        return set()
    inner = (_decoder_kinds(part) for part in decoder.get("decoders", ()))
    return {decoder["type"]}.union(*inner)


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token adds to a text.

    The text is their UTF-8 decoding, with U+FFFD for what is malformed. `tokenizers` decodes to the
    same text, with one exception: where a vocabulary falls back to bytes (SentencePiece), it
    replaces every byte of a malformed run, good characters included, which nobody can stream.

    Raises ModelLoadError for a decoder that does not work token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        decoder = backend.decoder
        kinds = _decoder_kinds(None if decoder is None else json.loads(decoder.__getstate__()))
        if not kinds <= ADDITIVE:
            raise ModelLoadError(
                f"the tokenizer's decoder {', '.join(sorted(kinds - ADDITIVE))} is not known; "
                f"known are {', '.join(sorted(ADDITIVE))}"
            )
        self._backend = backend
        self._alphabet = byte_level_alphabet() if "ByteLevel" in kinds else None
        self._falls_back = "ByteFallback" in kinds
        self._anchor = self._find_anchor()
        self._memo: dict[int, bytes] = {}

    def of(self, token_id: int, *, first: bool = False) -> bytes:
        """What the token adds after another one, or at the very start of a text (`first`).

        Nothing for an id outside the vocabulary: a model may have more rows than its tokenizer.
        """
        if first:
            return self._computed(token_id, first=True)
        if token_id not in self._memo:
            self._memo[token_id] = self._computed(token_id, first=False)
        return self._memo[token_id]

    def _computed(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[letter] for letter in token])
            except KeyError:
                return token.encode()  # an added token, which stands for itself
        if self._falls_back and (match := re.fullmatch("<0x([0-9A-F]{2})>", token)):
            byte = bytes.fromhex(match[1])
            if not first or byte >= b"\x80":
                return byte
        if first:
            return self._decoded(token_id).encode()
        anchored = self._decoded(self._anchor, token_id)
        return anchored[len(self._decoded(self._anchor)) :].encode()

    def _decoded(self, *token_ids: int) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _find_anchor(self) -> int:
        """A token that leaves its mark in a text, so that what comes after it is not the start."""
        for token_id in sorted(self._backend.get_vocab().values()):
            text = self._decoded(token_id)
            if text.strip() and "\ufffd" not in text:
                return token_id
        raise ModelLoadError("no token of the tokenizer decodes to any text")


class TextStream:
    """Decodes a growing list of tokens; never splits a character.

    What `push` and `finish` return, joined, does not depend on how the tokens are divided over the
    calls. `skip` are ids that add nothing; `first` says that the text starts here.
    """

    def __init__(self, token_bytes: TokenBytes, *, skip: frozenset[int], first: bool = True):
        self._token_bytes = token_bytes
        self._skip = skip
        self._first = first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that the tokens complete."""
        added = []
        for token_id in token_ids:
            if token_id not in self._skip:
                added.append(self._token_bytes.of(token_id, first=self._first))
                self._first = False
        return self._decoder.decode(b"".join(added))

    def finish(self) -> str:
        """One U+FFFD if the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
