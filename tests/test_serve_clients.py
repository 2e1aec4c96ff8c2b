"""Clients as they are: OpenAI's for log-probabilities, forms and tools, and lm-eval's requests."""

import concurrent.futures
import json
import math
from collections.abc import Iterator

import openai
import pytest

from paged_jax import AsyncEngine, Engine, EngineConfig, SamplingParams
from paged_jax.progress import SilentProgress
from tests.engine_runs import run_all
from tests.live_server import LiveServer, events, live_server
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, write_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NAME = "tiny"
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}"
    "{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.arguments.city }}</tool_call>{% endfor %}"
    "{% endfor %}" + CHAT_TEMPLATE.replace("('system', ", "('system', 'tool', ")
)
MESSAGES = [{"role": "user", "content": "the other"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Engine:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_llama(directory, vocab_size=VOCAB_SIZE)
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    config = EngineConfig(
        model=str(directory),
        served_model_name=NAME,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=129,
    )
    return Engine.from_pretrained(config, progress=SilentProgress())


@pytest.fixture(scope="module")
def server(engine) -> Iterator[LiveServer]:
    with live_server(AsyncEngine(engine.config, make_engine=lambda: engine)) as server:
        yield server


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


def refused(server, path, body) -> dict:
    status, answer = server.post(path, body)
    assert status == 400, answer
    return answer["error"]


# Log-probabilities


def test_a44_logprobs_with_and_without_top_logprobs(server):
    body = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logprobs": True}
    for more, count in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": None}, 0)):
        content = server.post(CHAT, body | more)[1]["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [count] * 3
    content = server.post(CHAT, body | {"top_logprobs": 5})[1]["choices"][0]["logprobs"]["content"]
    for entry in content:
        top = [best["logprob"] for best in entry["top_logprobs"]]
        assert len(top) == 5 and top == sorted(top, reverse=True)
        assert entry["logprob"] == top[0] and entry["token"] == entry["top_logprobs"][0]["token"]
    for wrong in ({"top_logprobs": 21}, {"top_logprobs": 5, "logprobs": False}):
        assert refused(server, CHAT, body | wrong)["param"] == "top_logprobs"
    for wrong in (21, -1, True, 1.5):
        error = refused(server, COMPLETIONS, {"prompt": "x", "logprobs": wrong})
        assert error["param"] == "logprobs"


def test_prompt_logprobs_of_the_wrong_kind_are_refused_with_an_echo_too(server):
    for wrong in ("2", True, 1.5, -1, 21):
        body = {"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": wrong}
        assert refused(server, COMPLETIONS, body)["param"] == "prompt_logprobs"


def test_a63_logprobs_of_the_whole_vocabulary_are_refused(server):
    for count in (-1, 21, VOCAB_SIZE, VOCAB_SIZE - 1):
        error = refused(server, COMPLETIONS, {"prompt": [5] * 500, "prompt_logprobs": count})
        assert error["param"] == "prompt_logprobs"


def test_the_client_reads_logprobs_of_chats(client):
    fields = {"model": NAME, "messages": MESSAGES, "max_tokens": 8, "seed": 3}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=2, **fields)
    (choice,) = whole.choices
    entries = choice.logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    told = []
    for chunk in client.chat.completions.create(
        logprobs=True, top_logprobs=2, stream=True, **fields
    ):
        for piece in chunk.choices:
            told += [] if piece.logprobs is None else piece.logprobs.content
    assert [(e.token, e.bytes) for e in told] == [(e.token, e.bytes) for e in entries]
    assert [e.logprob for e in told] == pytest.approx([e.logprob for e in entries], abs=1e-4)


def test_the_client_reads_logprobs_of_completions(client):
    fields = {"model": NAME, "prompt": "the other", "max_tokens": 8, "temperature": 0}
    (whole,) = client.completions.create(logprobs=2, echo=True, **fields).choices
    found = whole.logprobs
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    for token, value, top in list(
        zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True)
    )[1:]:
        assert top[token] == value and len(top) in (2, 3)
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
    tokens, text = [], ""
    for chunk in client.completions.create(logprobs=2, echo=True, stream=True, **fields):
        for piece in chunk.choices:
            text += piece.text
            tokens += [] if piece.logprobs is None else piece.logprobs.tokens
    assert (text, tokens) == (whole.text, found.tokens)
    (named,) = client.completions.create(
        logprobs=1, extra_body={"return_tokens_as_token_ids": True}, **fields
    ).choices
    assert all(token.startswith("token_id:") for token in named.logprobs.tokens)


def test_prompt_logprobs_come_with_the_first_chunk_of_a_choice(server):
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 2, "max_tokens": 2, "n": 2, "seed": 1}
    _, whole = server.post(COMPLETIONS, body)
    for choice in whole["choices"]:
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [str(token) in entry for token, entry in zip((6, 7), others, strict=True)]
        assert all(len(entry) in (2, 3) for entry in others)
    pieces = [
        choice
        for event in events(server.request("POST", COMPLETIONS, body | {"stream": True})[2])[:-1]
        for choice in event["choices"]
    ]
    for index in range(2):
        firsts = [p for p in pieces if p["index"] == index and "prompt_logprobs" in p]
        assert [p["prompt_logprobs"] for p in firsts] == [whole["choices"][0]["prompt_logprobs"]]
    chat = {"messages": MESSAGES, "prompt_logprobs": 0, "max_tokens": 1}
    _, answer = server.post(CHAT, chat)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


def test_a21_no_token_with_echo_and_logprobs(server):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 0}
    for more in ({}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 1}):
        status, answer = server.post(COMPLETIONS, body | more)
        (choice,) = answer["choices"]
        assert (status, choice["finish_reason"]) == (200, "length")
        assert answer["usage"]["completion_tokens"] == 0
        assert bool(choice["text"]) == ("echo" in more)
        scored = more == {"echo": True, "logprobs": 1}
        assert (choice["logprobs"] is not None) == scored
        if scored:
            assert len(choice["logprobs"]["tokens"]) == 4


def test_lm_evals_requests_for_loglikelihoods(server, engine):
    """Several prompts of token ids at once; it slices away the context and the last token."""
    prompts = [[5, 6, 7, 8, 9], [10, 11, 12, 13, 14, 15, 16], [5, 6, 7, 8, 20]]
    contexts = [3, 4, 1]
    body = {
        "model": NAME,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    status, answer = server.post(COMPLETIONS, body)
    assert status == 200
    for choice, prompt, context in zip(answer["choices"], prompts, contexts, strict=True):
        logprobs = choice["logprobs"]
        scores = logprobs["token_logprobs"][context:-1]
        tokens = logprobs["tokens"][context:-1]
        tops = logprobs["top_logprobs"][context:-1]
        assert len(scores) == len(prompt) - context
        is_greedy = all(
            token == max(top.items(), key=lambda pair: pair[1])[0]
            for token, top in zip(tokens, tops, strict=True)
        )
        want, best = 0.0, True
        for position in range(context, len(prompt)):
            params = SamplingParams(
                max_tokens=1, temperature=0.0, logprobs=20, logit_bias={prompt[position]: 100}
            )
            sample = run_all_on(server, engine, prompt[:position], params)
            want += sample.logprobs[0].logprob
            best &= next(iter(sample.logprobs[0].top)) == prompt[position]
        assert math.isclose(sum(scores), want, abs_tol=1e-3)
        assert is_greedy == best


def run_all_on(server, engine, prompt, params):
    """On the engine's thread, which nothing else may do."""
    done: concurrent.futures.Future = concurrent.futures.Future()
    server.engine._inbox.put(
        lambda engine: done.set_result(run_all(engine, {"x": (prompt, params)})["x", 0])
    )
    return done.result(timeout=30)


# Forms

FORMS = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": PERSON, "strict": True},
    },
    "structured_outputs": {"json": PERSON},
    "guided_json": PERSON,
}


@pytest.mark.parametrize("field", FORMS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_gives_json_of_it(field, stream, client):
    body = {"extra_body": {field: FORMS[field]}}
    fields = {"model": NAME, "messages": MESSAGES, "max_tokens": 120, "seed": 5, **body}
    if stream:
        pieces = client.chat.completions.create(stream=True, **fields)
        text = "".join(p.choices[0].delta.content or "" for p in pieces)
    else:
        text = client.chat.completions.create(**fields).choices[0].message.content
    person = json.loads(text)
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 120
    assert len(person["name"]) <= 8


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_the_form_that_its_client_asked_for(stream, client):
    form = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
    answer = client.responses.create(
        model=NAME, input="x", max_output_tokens=120, text={"format": form}, stream=stream
    )
    if stream:
        answer = list(answer)[-1].response
    assert (answer.status, answer.text.format.type) == ("completed", "json_schema")
    person = json.loads(answer.output_text)
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 120


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json_schema", "name": "a"}, "text.format.schema"),
        ({"type": "json_schema", "name": "a", "schema": {"type": "what"}}, "text.format"),
    ],
)
def test_a_form_of_a_response_that_is_none_is_refused_by_name(form, param, server):
    for stream in (False, True):
        body = {"input": "x", "text": {"format": form}, "stream": stream}
        assert refused(server, "/v1/responses", body)["param"] == param


def test_rendering_a_chat_with_tools_gives_the_prompt_of_generating(server, engine):
    body = {"messages": MESSAGES, "tools": [WEATHER], "max_tokens": 1}
    status, rendered = server.post("/v1/chat/completions/render", body)
    assert status == 200, rendered
    answer = server.post("/v1/chat/completions", body | {"return_token_ids": True})[1]
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    assert "get_weather" in engine.tokenizer.decode(rendered["token_ids"])


def test_the_client_parses_what_it_asked_for(client):
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=120, response_format=FORMS["response_format"]
    )
    assert json.loads(answer.choices[0].message.content)["name"] is not None
    texts = {"yes", "no"}
    for fields in ({"guided_choice": ["yes", "no"]}, {"guided_regex": "yes|no"}):
        (choice,) = client.completions.create(
            model=NAME, prompt="x", max_tokens=9, extra_body=fields
        ).choices
        assert choice.text in texts and choice.finish_reason == "stop"
    grammar = {"guided_grammar": 'root ::= "yes" | "no"'}
    (choice,) = client.completions.create(
        model=NAME, prompt="x", max_tokens=9, extra_body=grammar
    ).choices
    assert choice.text in texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_is_none_is_refused_by_the_name_it_came_under(fields, param, stream, server):
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        error = refused(server, path, body | fields | {"stream": stream})
        assert error["param"] == param
        assert param.partition(".")[0] in error["message"]


# Tools


def call_of(message) -> tuple[str, dict]:
    (call,) = message.tool_calls
    assert call.type == "function" and call.id
    return call.function.name, json.loads(call.function.arguments)


FORCED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", [FORCED, "required"])
def test_a_call_that_is_required_comes(choice, client):
    fields = {"model": NAME, "messages": MESSAGES, "max_tokens": 200, "tools": [WEATHER]}
    fields |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": 2}
    (whole,) = client.chat.completions.create(**fields).choices
    name, arguments = call_of(whole.message)
    assert name == "get_weather" and set(arguments) == {"city"}
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    names, text, ids, reasons, contents = [], "", [], [], ""
    for chunk in client.chat.completions.create(stream=True, **fields):
        (piece,) = chunk.choices
        reasons += [piece.finish_reason] if piece.finish_reason else []
        contents += piece.delta.content or ""
        for call in piece.delta.tool_calls or []:
            assert call.index == 0
            names += [call.function.name] if call.function.name else []
            ids += [call.id] if call.id else []
            text += call.function.arguments
    assert (names, json.loads(text), reasons, contents) == (
        ["get_weather"],
        arguments,
        ["tool_calls"],
        "",
    )
    assert len(ids) == 1


def test_of_several_functions_the_one_that_was_named_is_called(client):
    answer = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_tokens=100,
        tools=[WEATHER, CLOCK],
        tool_choice={"type": "function", "function": {"name": "clock"}},
        temperature=0,
    )
    message = answer.choices[0].message
    assert call_of(message) == ("clock", {})
    assert answer.choices[0].finish_reason == "tool_calls"


def test_with_auto_the_model_may_talk(client, server):
    fields = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    with_tools = client.chat.completions.create(tools=[WEATHER], **fields).choices[0].message
    assert with_tools.content and not with_tools.tool_calls
    plain = client.chat.completions.create(**fields)
    none = client.chat.completions.create(tools=[WEATHER], tool_choice="none", **fields)
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens  # no tools in the prompt


def test_calls_and_their_results_go_through_the_template(server):
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    body = {"messages": messages, "tools": [WEATHER], "max_tokens": 1, "return_token_ids": True}
    status, answer = server.post(CHAT, body)
    assert status == 200
    tokenizer = server.engine.tokenizer
    text = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert '<tool>{"type": "function"' in text
    assert "<tool_call>Ulm</tool_call>" in text and "sunny" in text
    for arguments in ("{", "[1]", 5):
        wrong = call | {"function": call["function"] | {"arguments": arguments}}
        messages[1] = {"role": "assistant", "content": None, "tool_calls": [wrong]}
        assert refused(server, CHAT, body)["param"].startswith("messages[1].tool_calls[0]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [CLOCK] * 2}, "tools"),
        ({"tools": [CLOCK], "tool_choice": FORCED}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
        ),
        ({"tools": [CLOCK], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CLOCK], "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_tools_that_are_none_are_refused_by_name(fields, param, server):
    assert refused(server, CHAT, {"messages": MESSAGES, **fields})["param"] == param
