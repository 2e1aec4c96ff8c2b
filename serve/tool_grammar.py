"""A grammar of tool calls, in the words of a model family, for a model that must call."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve.engine import Tokenizer

# One space at most between JSON's parts, as in every structured output.
JSON_OPTIONS = {"whitespace_pattern": " ?"}


def calls_grammar(
    parser: str, functions: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, several: bool
) -> str:
    """One call of one of the functions, or with `several` one or more, as Lark.

    The arguments are JSON that a function's `parameters` describe.
    """
    calls, rules = [], []
    word = "parameters" if parser == "llama3_json" else "arguments"
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{word}": '
        calls.append(f'{_text(head)} args_{i} "}}"')
        schema = dict(function.get("parameters") or {})
        schema.setdefault("type", "object")
        schema["x-guidance"] = JSON_OPTIONS
        rules.append(f"args_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    return "\n".join([_start(parser, tokenizer, several), f"call: {' | '.join(calls)}", *rules])


def _start(parser: str, tokenizer: Tokenizer, several: bool) -> str:
    if parser == "hermes":
        begin, end = (_mark(mark, tokenizer) for mark in ("<tool_call>", "</tool_call>"))
        wrapped = f'wrapped: {begin} "\\n" call "\\n" {end}'
        return ('start: wrapped ("\\n" wrapped)*' if several else "start: wrapped") + "\n" + wrapped
    if parser == "llama3_json":
        return 'start: call ("; " call)*' if several else "start: call"
    begin = _mark("[TOOL_CALLS]", tokenizer)
    more = ' (", " call)*' if several else ""
    return f'start: {begin} "[" call{more} "]"'


def _mark(text: str, tokenizer: Tokenizer) -> str:
    """A special token where the vocabulary has one of that text, which no plain text matches."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return f"<[{ids[0]}]>" if len(ids) == 1 else _text(text)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
