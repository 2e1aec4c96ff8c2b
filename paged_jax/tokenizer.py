"""Text to token ids and back, and conversations to prompts, as a model's own files say."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paged_jax.chat_template import ChatTemplate, Message
from paged_jax.checkpoint.model_files import model_file, read_json
from paged_jax.checkpoint.sentencepiece_file import read_sentencepiece
from paged_jax.checkpoint.tekken_file import read_tekken
from paged_jax.errors import ModelLoadError, RequestError
from paged_jax.token_text import TextStream, TokenBytes

__all__ = ["Tokenizer", "load_tokenizer"]


class Tokenizer:
    """A `tokenizers.Tokenizer` with what the model's other files say about its use.

    `chat_templates` are by name; "default" is used, or "tool_use", where there is one, if a
    conversation has tools. `add_bos` puts the BOS token before a text if the backend does not.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, ChatTemplate] | None = None,
        add_bos: bool = False,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)
        self._chat_templates = dict(chat_templates or {})
        self._add_bos = add_bos and bos_token_id is not None
        self._token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab().values()) + 1  # ids lie below it
        """One more than the largest id; a model may have more rows than that."""

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self._backend

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    @property
    def chat_template(self) -> str:
        """The source of all chat templates, in Jinja; empty if there is none."""
        return "\n".join(template.source for template in self._chat_templates.values())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, special tokens in it included.

        `add_special_tokens` adds what the tokenizer puts around a text, never a second BOS.
        Raises RequestError for text that is not valid Unicode (lone surrogates).
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise RequestError(
                "the prompt is not valid Unicode: it holds half a surrogate pair", param="prompt"
            ) from error
        if not add_special_tokens or self.bos_token_id is None:
            return ids
        bos = [self.bos_token_id]
        if ids[:2] == bos * 2:
            return ids[1:]
        if self._add_bos and ids[:1] != bos:
            return bos + ids
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the tokens; the same as what `decode_stream` gives, joined."""
        stream = self.decode_stream(skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def decode_stream(
        self, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> TextStream:
        """A stream that decodes tokens as they come.

        `after` are the tokens that come before: a SentencePiece text loses the space that it
        starts with, its continuation does not.
        """
        starts = not after or after[-1] in self._special_ids
        skip = self._special_ids if skip_special_tokens else frozenset()
        return TextStream(self._token_bytes, skip=skip, first=starts)

    def describe(self) -> dict[str, Any]:
        """Facts about the tokenizer, under the names that Hugging Face's files give them."""
        template = self._chat_templates.get("default")
        return {
            "vocab_size": self.vocab_size,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": sorted(self.eos_token_ids),
            "chat_template": None if template is None else template.source,
        }

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text; not always whole characters."""
        return self._token_bytes.of(token_id)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as the prompt's text; see `ChatTemplate.render`.

        Raises RequestError if the model has no template or its template refuses.
        """
        if not self._chat_templates:
            raise RequestError(
                "this model has no chat template: send a plain prompt, or start the engine with "
                "a chat template",
                param="messages",
                code="chat_template",
            )
        name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
        return self._chat_templates[name].render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The conversation as the prompt's token ids; takes what `apply_chat_template` takes.

        The template writes the special tokens, so the tokenizer adds none.
        """
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)


# What tokenizer_config.json may name, and chat templates may write.
SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def load_tokenizer(directory: Path | str, *, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer in a model's folder.

    `chat_template` (Jinja source) replaces the folder's own. Raises ModelLoadError if a file is
    missing or damaged.
    """
    directory = Path(directory)
    config = read_json(directory, "tokenizer_config.json") or {}
    config = {**(read_json(directory, "special_tokens_map.json") or {}), **config}
    backend, own = _backend(directory, config)
    config = {**own, **config}
    special = {name: text for name in SPECIAL if (text := _token_text(config.get(name)))}
    bos, eos = special.get("bos_token"), special.get("eos_token")
    sources = _template_sources(directory, config) if chat_template is None else {}
    if chat_template is not None:
        sources = {"default": chat_template}
    elif sources and "default" not in sources:
        sources["default"] = next(iter(sources.values()))
    return Tokenizer(
        backend,
        bos_token_id=None if bos is None else backend.token_to_id(bos),
        eos_token_ids=_eos_token_ids(directory, backend, eos),
        chat_templates={
            name: ChatTemplate(source, bos_token=bos, eos_token=eos, special_tokens=special)
            for name, source in sources.items()
        },
        add_bos=config.get("add_bos_token") is True,
    )


def _backend(
    directory: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, Mapping[str, Any]]:
    """The tokenizer, and what its own file says of it beside tokenizer_config.json."""
    path = model_file(directory, "tokenizer.json")
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_buffer(path.read_bytes()), {}
        except Exception as error:  # the library raises nothing more exact
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    ends = {"add_bos": config.get("add_bos_token") is not False}
    ends["add_eos"] = config.get("add_eos_token") is True
    tekken = read_json(directory, "tekken.json")
    if tekken is not None:
        return read_tekken(tekken, **ends)
    pieces = model_file(directory, "tokenizer.model")
    if pieces.is_file():
        return read_sentencepiece(pieces, **ends)
    way_out = (
        "; vocab.json alone is not enough, save it with transformers' "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        if (directory / "vocab.json").exists()
        else ""
    )
    raise ModelLoadError(
        f"{directory} has no tokenizer.json, tokenizer.model or tekken.json{way_out}"
    )


def _token_text(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _template_sources(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name; a file of its own goes before tokenizer_config.json."""
    path = model_file(directory, "chat_template.jinja")
    if path.is_file():
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
    match config.get("chat_template"):
        case str(source):
            return {"default": source}
        case [*entries] if all(isinstance(entry, Mapping) for entry in entries):
            return {str(entry.get("name")): str(entry.get("template")) for entry in entries}
        case None:
            return {}
        case other:
            raise ModelLoadError(
                f"{directory / 'tokenizer_config.json'}: chat_template is a "
                f"{type(other).__name__}, neither a text nor a list of named ones"
            )


def _eos_token_ids(
    directory: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> set[int]:
    """Ids that end a text: the tokenizer's own and those of the generation's configuration."""
    generation = read_json(directory, "generation_config.json") or {}
    config = read_json(directory, "config.json") or {}
    named = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = set(named if isinstance(named, list) else [named])
    if eos_token is not None:
        ids.add(backend.token_to_id(eos_token))
    return {token_id for token_id in ids if isinstance(token_id, int)}
