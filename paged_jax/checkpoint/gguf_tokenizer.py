"""A tokenizer rebuilt from a GGUF file's metadata, as `tokenizers` would have saved it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from paged_jax.errors import ModelLoadError

__all__ = [
    "SPLITS",
    "Split",
    "build_tokenizer",
    "byte_level",
    "special_token_ids",
    "tokenizer_config",
]

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece writes a space

# The published split patterns of the vocabularies.
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS_BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
BETWEEN_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O_SPLIT = "|".join(
    [*(words + CONTRACTION for words in WORDS_BY_CASE), r"\p{N}{1,3}", BETWEEN_WORDS]
)
TEKKEN_SPLIT = "|".join([*WORDS_BY_CASE, r"\p{N}", BETWEEN_WORDS])
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class Split(NamedTuple):
    """How a byte-level vocabulary cuts text into words before merging."""

    patterns: tuple[str, ...]  # applied one after another, each to the pieces of the one before
    whole_words: bool = False  # a word that is a token stays whole, whatever the merges say
    nfc: bool = False
    add_bos: bool = False  # where tokenizer.ggml.add_bos_token does not say


LLAMA3 = Split((LLAMA3_SPLIT,), whole_words=True, add_bos=True)
QWEN2 = Split((QWEN2_SPLIT,), nfc=True)
SINGLE_DIGITS = Split((r"\p{N}", GPT2_SPLIT))
SPLITS: Mapping[str, Split] = {  # by tokenizer.ggml.pre
    "dbrx": Split((LLAMA3_SPLIT,)),  # Phi 4 and OLMo 2
    "deepseek-r1-qwen": QWEN2,
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": Split((GPT2_SPLIT,)),
    "gpt-4o": Split((GPT4O_SPLIT,)),  # gpt-oss and Phi 4 mini
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "refact": SINGLE_DIGITS,  # Granite
    "smaug-bpe": Split((LLAMA3_SPLIT,)),  # SmolLM 3
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "tekken": Split((TEKKEN_SPLIT,), whole_words=True, add_bos=True),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes; ModelLoadError if it is of an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise ModelLoadError(
            f"tokenizer.ggml.model is {kind!r}; known are {', '.join(sorted(BUILDERS))}"
        )
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError("tokenizer.ggml.tokens is missing")
    if len(set(tokens)) != len(tokens):
        raise ModelLoadError("tokenizer.ggml.tokens holds a token twice")
    tokenizer = BUILDERS[kind](metadata, tokens)
    _add_special_tokens(tokenizer, metadata, tokens)
    _add_ends(tokenizer, metadata, tokens)
    return tokenizer


def special_token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids of "bos", "eos", "eot", "eom", "unknown" and "padding", as far as they are named.

    Raises ModelLoadError for an id outside the vocabulary.
    """
    ids: dict[str, int] = {}
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in metadata:
            token_id = metadata[key]
            if not isinstance(token_id, int) or not 0 <= token_id < num_tokens:
                raise ModelLoadError(f"{key} is {token_id}, there are {num_tokens} tokens")
            ids[name] = token_id
    return ids


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What Hugging Face's tokenizer_config.json says beside tokenizer.json."""
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config = {
        names[name]: tokens[token_id]
        for name, token_id in special_token_ids(metadata).items()
        if name in names
    }
    return {
        "add_bos_token": _adds(metadata, "bos"),
        "add_eos_token": _adds(metadata, "eos"),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    split = _split(metadata)
    merges = metadata.get("tokenizer.ggml.merges", ())
    known = set(tokens)
    for merge in merges:
        pair = merge.split(" ")
        if len(pair) != 2 or not known >= {*pair, "".join(pair)}:
            raise ModelLoadError(f"tokenizer.ggml.merges holds {merge!r}: no two tokens")
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    return byte_level(tokens, pairs, split)


def byte_level(tokens: Sequence[str], pairs: Sequence[tuple[str, str]], split: Split) -> Tokenizer:
    """A tokenizer whose `tokens`, by id, are bytes in GPT-2's letters; `pairs` are its merges."""
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=split.whole_words))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(metadata: Mapping[str, Any]) -> Split:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ModelLoadError(
            f"tokenizer.ggml.pre is {name!r}; known are {', '.join(sorted(SPLITS))}"
        )
    return SPLITS[name]


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelLoadError("tokenizer.ggml.scores must hold one score for each token")
    unknown = special_token_ids(metadata).get("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges_from_scores(vocabulary, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in vocabulary,
        )
    )
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges_from_scores(
    vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """The merges that make SentencePiece's choice: of all pairs that form a token, the best score.

    Every way to cut a token in two tokens is a merge; they are ranked by the score of the whole.
    """
    merges = [
        (-float(scores[token_id]), token_id, cut, token)
        for token, token_id in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(token[:cut], token[cut:]) for _, _, cut, token in sorted(merges)]


BUILDERS: Mapping[str, Callable[[Mapping[str, Any], list[str]], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}


def _add_special_tokens(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]
) -> None:
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    special = {token_id for token_id, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL)}
    special.update(special_token_ids(metadata).values())
    user_defined = {token_id for token_id, kind in enumerate(kinds) if kind == USER_DEFINED}
    if max(special | user_defined, default=0) >= len(tokens):
        raise ModelLoadError("tokenizer.ggml.token_type holds more entries than there are tokens")
    for token_id in sorted(special | user_defined):
        is_special = token_id in special
        tokenizer.add_tokens([AddedToken(tokens[token_id], special=is_special, normalized=False)])


def _adds(metadata: Mapping[str, Any], end: str) -> bool:
    """Whether the tokenizer adds "bos" or "eos" to a text."""
    if end not in special_token_ids(metadata):
        return False
    default = False
    if end == "bos":
        sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
        default = sentencepiece or _split(metadata).add_bos
    return bool(metadata.get(f"tokenizer.ggml.add_{end}_token", default))


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    ends = {
        end: (tokens[token_id], token_id)
        for end, token_id in special_token_ids(metadata).items()
        if end in ("bos", "eos") and _adds(metadata, end)
    }
    if ends:
        bos, eos = (ends.get(end, ("",))[0] for end in ("bos", "eos"))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[part for part in (bos, "$A", eos) if part],
            pair=None,
            special_tokens=list(set(ends.values())),
        )
