"""Grammars: compiled within limits whatever they are, and beside the event loop."""

import asyncio
import time

import numpy as np
import pytest

from paged_jax import RequestError, StructuredOutputs
from paged_jax.grammar import Grammars
from paged_jax.tokenizer import Tokenizer
from serve.tool_grammar import calls_grammar
from serve.tool_parsers import PARSERS
from tests.tiny_tokenizer import END, tiny_tokenizer

VOCAB_SIZE = 300  # more than the tokenizer knows


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    backend = tiny_tokenizer(["<tool_call>", "[TOOL_CALLS]"])
    return Tokenizer(backend, eos_token_ids=[backend.token_to_id(END)])


@pytest.fixture(scope="module")
def grammars(tokenizer) -> Grammars:
    return Grammars.of(tokenizer, VOCAB_SIZE, tokenizer.eos_token_ids)


def allowed(mask: np.ndarray) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_mask_has_the_tokens_that_may_come_next(grammars, tokenizer):
    text = grammars.compile(StructuredOutputs(choice=["ab", "the"])).start()
    (a,), (b,), (t,) = ids(tokenizer, "a"), ids(tokenizer, "b"), ids(tokenizer, "t")
    th, the = ids(tokenizer, "th")[0], ids(tokenizer, "the")[0]
    assert allowed(text.mask()) == {a, t, th, the}
    assert text.advance([a])
    assert allowed(text.mask()) == {b}
    assert text.advance([b])
    assert allowed(text.mask()) == set(tokenizer.eos_token_ids)
    assert not text.advance([a])
    assert text.mask() is None


def test_texts_in_one_form_do_not_disturb_each_other(grammars, tokenizer):
    form = grammars.compile(StructuredOutputs(regex="[ab]{2}c"))
    one, two = form.start(), form.start()
    assert one.advance(ids(tokenizer, "ab"))
    assert allowed(one.mask()) == set(ids(tokenizer, "c"))
    assert allowed(two.mask()) == set(ids(tokenizer, "ab"))


def test_white_space_between_parts_of_json_is_one_space(grammars, tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for wanted in ({"json": schema}, {"json_object": True}):
        text = grammars.compile(StructuredOutputs(**wanted)).start()
        for letter in '{ "a": ':
            assert text.advance(ids(tokenizer, letter))
        assert not allowed(text.mask()) & set(ids(tokenizer, " \n"))


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"oneOf": [schema, {"type": "number"}]}
    return schema


EXPLODING = {
    "nested repeats": {"regex": "(((a|b)*|(c|d)*)*|((a|ab)*|(b|ba)*)*){1,1000}x{1,1000}"},
    "repeats of repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "long memory": {"regex": "(.*a.{300}|.*b.{400})*"},
    "deep oneOf": {"json": deep(200)},
    "itself": {"json": {"$ref": "#"}},
    "itself in a circle": {"json": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}},
    "endless items": {"json": {"type": "array", "items": {"type": "null"}, "maxItems": 2**64 - 1}},
    "many fields": {
        "json": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": "^(a|b)*c$"} for i in range(900)},
        }
    },
    "left recursion": {"grammar": 'start: start "a" | start start | "b"'},
    "deep parentheses": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
}


@pytest.mark.parametrize("name", EXPLODING)
async def test_a95_what_explodes_is_stopped_beside_the_event_loop(name, grammars):
    """Taken or refused, soon, and its masks too; the event loop goes on meanwhile."""

    def compile_and_begin() -> None:
        text = grammars.compile(StructuredOutputs(**EXPLODING[name])).start()
        for _ in range(50):
            mask = text.mask()
            if mask is None or not allowed(mask):
                return
            text.advance([min(allowed(mask))])

    began = time.process_time()
    work = asyncio.create_task(asyncio.to_thread(compile_and_begin))
    gaps, last = [], time.monotonic()
    while not work.done():
        await asyncio.sleep(0.001)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    refused = work.exception()
    assert refused is None or isinstance(refused, RequestError)
    assert len(str(refused)) < 1000
    assert time.process_time() - began < 5.0
    assert not gaps or np.median(gaps) < 0.1


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("several", [False, True])
def test_calls_of_a_grammar_are_read_back(parser, several, grammars, tokenizer):
    """Where the marker is a token of its own the grammar wants that one."""
    functions = [
        {
            "name": "f",
            "parameters": {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {
                        "type": "object",
                        "properties": {"x": {"type": "integer"}},
                        "required": ["x"],
                    }
                },
            },
        },
        {"name": "g"},
    ]
    source = calls_grammar(parser, functions, tokenizer, several=several)
    form = grammars.compile(StructuredOutputs(grammar=source))
    word = "parameters" if parser == "llama3_json" else "arguments"
    call, other = f'{{"name": "f", "{word}": {{"x": 5}}}}', f'{{"name": "g", "{word}": {{}}}}'
    calls = [call, other] if several else [call]
    text = {
        "hermes": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls),
        "llama3_json": "; ".join(calls),
        "mistral": f"[TOOL_CALLS][{', '.join(calls)}]",
    }[parser]
    progress = form.start()
    for token_id in ids(tokenizer, text):
        assert token_id in allowed(progress.mask()), tokenizer.decode([token_id])
        assert progress.advance([token_id])
    assert tokenizer.eos_token_ids <= allowed(progress.mask())
    found = PARSERS[parser]()
    found.push(text)
    assert found.num_calls == len(calls)
