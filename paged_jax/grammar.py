"""Structured output: grammars compiled for a tokenizer, and how far a text has come in one.

llguidance does the work; a compiled grammar says which tokens may come next, as bits.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Self

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from paged_jax.errors import RequestError
from paged_jax.logit_edits import BITS, num_words
from paged_jax.tokenizer import Tokenizer
from scheduler import StructuredOutputs

__all__ = ["Form", "FormProgress", "Grammars"]

MAX_KEPT = 64  # compiled grammars
MAX_ERROR_LEN = 500
# One space at most between JSON's parts: a model must not fill its tokens with white space.
JSON_OPTIONS: Any = {"whitespace_pattern": " ?"}
LIMITS = llguidance.LLParserLimits(
    # In work, not in time, so that the same grammar is taken or refused everywhere. Compiling
    # takes at most about a second with these, a step's mask some tens of milliseconds.
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class FormProgress:
    """How far one text has come. One thread at a time."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, num_mask_words: int):
        self._matcher = matcher
        self._num_words = num_words(vocab_size)
        self._mask = np.zeros(num_mask_words, np.int32)

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Take in tokens; False if they do not fit."""
        return self._matcher.consume_tokens(list(token_ids))

    def mask(self) -> np.ndarray | None:
        """int32[W]: bits of the tokens that may come next; None if that is too hard to tell."""
        mask = np.zeros_like(self._mask)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return None if self._matcher.is_error() else mask[: self._num_words]


class Form:
    """A compiled grammar. Never changed, so any thread may start texts in it."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, num_mask_words: int):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_mask_words = num_mask_words

    def start(self) -> FormProgress:
        copy = self._matcher.deep_copy()
        return FormProgress(copy, self._vocab_size, self._num_mask_words)


class Grammars:
    """Compiles grammars for one tokenizer and keeps the latest. Any thread may call it.

    `vocab_size` is the model's; `eos_token_ids` may come where a text is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self._vocab_size = vocab_size
        self._num_tokens = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Form] = OrderedDict()
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.backend.to_str(),
            n_vocab=self._num_tokens,
            eos_token=sorted(eos_token_ids),
        )

    @classmethod
    def of(
        cls, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> Self:
        """Raises RequestError where there is nothing to compile for."""
        if tokenizer is None or not eos_token_ids:
            raise RequestError(
                "structured_outputs need a tokenizer and an end-of-sequence token, which this "
                "engine runs without",
                param="structured_outputs",
            )
        try:
            return cls(tokenizer, vocab_size, eos_token_ids)
        except Exception as error:  # the library raises nothing more exact
            raise RequestError(
                f"structured_outputs are not possible with this model's tokenizer: {error}",
                param="structured_outputs",
            ) from error

    def compile(self, wanted: StructuredOutputs) -> Form:
        """Takes up to seconds. RequestError if it is no grammar, or one beyond the limits."""
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
        form = self._compile(wanted)
        with self._lock:
            self._kept[wanted] = form
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return form

    def _compile(self, wanted: StructuredOutputs) -> Form:
        try:
            source = _source(wanted)
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
            error = matcher.get_error()
        except Exception as wrong:  # a converter raises what it likes
            error = str(wrong) or type(wrong).__name__
        if not error:
            matcher.compute_bitmask()  # the first one is the dearest
            error = matcher.get_error()
        if error:
            if len(error) > MAX_ERROR_LEN:
                error = error[:MAX_ERROR_LEN] + "..."
            raise RequestError(
                f"structured_outputs.{_kind(wanted)} cannot be used: {error}",
                param=f"structured_outputs.{_kind(wanted)}",
            )
        return Form(matcher, self._vocab_size, -(-self._num_tokens // BITS))


def _kind(wanted: StructuredOutputs) -> str:
    kinds = ("json", "json_object", "regex", "choice", "grammar")
    return next(kind for kind in kinds if getattr(wanted, kind) is not None)


def _source(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's own words."""
    matcher = llguidance.LLMatcher
    if wanted.json is not None:
        assert isinstance(wanted.json, str)
        return matcher.grammar_from_json_schema(wanted.json, overrides=JSON_OPTIONS)
    if wanted.json_object:
        return matcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)
    if wanted.regex is not None:
        return matcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return matcher.grammar_from_lark(f"start: {choices}")
    assert wanted.grammar is not None
    return matcher.grammar_from_lark(any_to_lark(wanted.grammar))
