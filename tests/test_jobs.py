"""Prompts from JSON lines: what is read, and how a bad line is named."""

import pytest

from paged_jax import RequestError, SamplingParams
from paged_jax.jobs import Job, read_jobs


def read(*lines: str | bytes, sampling=None, chat=False) -> list[Job]:
    raw = [line.encode() if isinstance(line, str) else line for line in lines]
    return list(read_jobs(raw, "in.jsonl", sampling or {}, chat=chat))


def test_the_three_kinds_of_prompt():
    text, tokens, chat = read(
        '{"prompt": "Hello"}',
        '{"prompt_token_ids": [1, 2, 3]}',
        '{"messages": [{"role": "user", "content": "Hi"}]}',
    )
    assert (text.prompt, text.shown) == ("Hello", "Hello")
    assert (tokens.prompt_token_ids, tokens.shown) == ((1, 2, 3), "(1, 2, 3)")
    assert chat.messages == ({"role": "user", "content": "Hi"},)
    assert chat.shown == "Hi"


def test_a_lines_own_sampling_fields_go_before_the_flags_and_those_before_the_models():
    own, flags = read(
        '{"prompt": "a", "temperature": 0, "stop": ["x"]}',
        '{"prompt": "b"}',
        sampling={"temperature": 0.5, "max_tokens": 7},
    )
    model = {"temperature": 0.2, "top_p": 0.9}
    assert own.params(model) == SamplingParams(temperature=0, max_tokens=7, stop=["x"], top_p=0.9)
    assert flags.params(model) == SamplingParams(temperature=0.5, max_tokens=7, top_p=0.9)


def test_with_chat_a_prompt_is_what_a_user_says():
    said, tokens = read('{"prompt": "Hi"}', '{"prompt_token_ids": [1]}', chat=True)
    assert said.messages == ({"role": "user", "content": "Hi"},)
    assert said.prompt is None
    assert tokens.prompt_token_ids == (1,)


def test_empty_lines_are_skipped_and_still_counted():
    assert [job.place for job in read("", '{"prompt": "a"}', "  \n", '{"prompt": "b"}')] == [
        "in.jsonl, line 2",
        "in.jsonl, line 4",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ('"Hello"', "expected an object"),
        ("[" * 100_000, "nested too deeply"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        ("{}", "give one of prompt, prompt_token_ids, messages; got none"),
        ('{"prompt": "a", "messages": []}', "got prompt and messages"),
        ('{"prompt": 3}', "prompt must be a string, got 3"),
        ('{"prompt_token_ids": []}', "one or more integers"),
        ('{"prompt_token_ids": [1, true]}', "one or more integers"),
        ('{"prompt_token_ids": "1 2"}', "one or more integers"),
        ('{"messages": [{"role": "user"}]}', "messages must be a list"),
        ('{"messages": []}', "messages must be a list"),
        ('{"prompt": "a", "tempreature": 0}', "'tempreature'; did you mean temperature?"),
        ('{"prompt": "a", "zzz": 0}', "unknown field 'zzz'"),
        ('{"prompt": "a", "temperature": -1}', "temperature must be between 0"),
        ('{"prompt": "a", "temperature": NaN}', "temperature must be a finite number"),
    ],
)
def test_a_bad_line_is_named(line, message):
    with pytest.raises(RequestError) as error_info:
        read('{"prompt": "fine"}', line)
    assert str(error_info.value).startswith("in.jsonl, line 2: ")
    assert message in str(error_info.value)


def test_the_field_of_a_bad_value_is_kept():
    with pytest.raises(RequestError) as error_info:
        read('{"prompt": "a", "top_p": 3}')
    assert error_info.value.param == "top_p"
