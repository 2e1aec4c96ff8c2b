"""Tool calls in a text: found whole, found in pieces, and text that only looks like one."""

import json

import pytest

from serve.tool_events import CallArguments, CallStart, Said
from serve.tool_parsers import PARSERS

WEATHER = '{"name": "weather", "arguments": {"city": "Pa\\"r}is", "days": [1, {"a": "]"}]}}'
PARAMETERS = WEATHER.replace("arguments", "parameters")
ARGUMENTS = {"city": 'Pa"r}is', "days": [1, {"a": "]"}]}
CASES = {
    "a call": ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [("weather", ARGUMENTS)]),
    "text before": (
        "hermes",
        f"I < will see.\n<tool_call>\n{WEATHER}\n</tool_call>",
        "I < will see.\n",
        [("weather", ARGUMENTS)],
    ),
    "two calls": (
        "hermes",
        f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n",
        "",
        [("weather", ARGUMENTS)] * 2,
    ),
    "no end": ("hermes", f"<tool_call>\n{WEATHER}", "", [("weather", ARGUMENTS)]),
    "arguments first": (
        "hermes",
        '<tool_call>{"arguments" : {"x": 1}, "name" : "f"}</tool_call>',
        "",
        [("f", {"x": 1})],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "arguments as text": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
        "",
        [("f", {"x": 1})],
    ),
    "only text": ("hermes", "a <tool_cal> b <", "a <tool_cal> b <", []),
    "no JSON": ("hermes", "<tool_call> f(x) </tool_call>", "<tool_call> f(x) </tool_call>", []),
    "no name": ("hermes", '<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    "llama": ("llama3_json", PARAMETERS, "", [("weather", ARGUMENTS)]),
    "llama with a tag": (
        "llama3_json",
        f"<|python_tag|>{PARAMETERS}",
        "",
        [("weather", ARGUMENTS)],
    ),
    "llama, several": (
        "llama3_json",
        f"{PARAMETERS}; {PARAMETERS}",
        "",
        [("weather", ARGUMENTS)] * 2,
    ),
    "llama says JSON": ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    "llama says something": ("llama3_json", "Well: {1}", "Well: {1}", []),
    "mistral": ("mistral", f"[TOOL_CALLS] [{WEATHER}]", "", [("weather", ARGUMENTS)]),
    "mistral, several": (
        "mistral",
        f"[TOOL_CALLS][{WEATHER}, {WEATHER}]",
        "",
        [("weather", ARGUMENTS)] * 2,
    ),
    "newer mistral": (
        "mistral",
        'Hm.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": {}}',
        "Hm.",
        [("f", {"x": 1}), ("g", {"y": {}})],
    ),
    "mistral says something": ("mistral", "[TOOL", "[TOOL", []),
}


def told(events):
    """(text, calls) of a list of events; each call begins once, and before its arguments."""
    text, names, arguments = "", [], []
    for event in events:
        match event:
            case Said():
                text += event.text
            case CallStart():
                assert event.index == len(names)
                names.append(event.name)
                arguments.append("")
            case CallArguments():
                arguments[event.index] += event.text
    return text, list(zip(names, map(json.loads, arguments), strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_calls_are_found_however_the_text_is_cut(case, size):
    name, text, said, calls = CASES[case]
    parser = PARSERS[name]()
    events = []
    for start in range(0, len(text), size):
        events += parser.push(text[start : start + size])
    events += parser.finish()
    assert told(events) == (said, calls)
    assert parser.num_calls == len(calls)


@pytest.mark.parametrize("name", PARSERS)
def test_text_without_calls_is_told_at_once(name):
    parser = PARSERS[name]()
    assert told(parser.push("Hello there")) == ("Hello there", [])


def test_arguments_are_told_as_they_come():
    parser = PARSERS["hermes"]()
    parser.push('<tool_call>\n{"name": "f", "arguments": ')
    assert parser.push('{"city": "Par') == [CallArguments(0, '{"city": "Par')]


def test_a_call_that_breaks_off_keeps_what_was_told():
    parser = PARSERS["hermes"]()
    events = parser.push('<tool_call>{"name": "f", "arguments": {"x": 1') + parser.finish()
    assert events == [CallStart(0, "f"), CallArguments(0, '{"x": 1')]
