"""Requests and whole responses: every field honoured or refused by name, every error in shape."""

import contextlib
import json
import socket
import threading
import time

import pytest

from paged_jax import EngineDeadError, SamplingParams, __version__
from serve import ServeOptions
from tests.fake_engine import BOS, PIECES, VOCAB_SIZE, FakeEngine, text_of
from tests.live_server import LiveServer, live_server, server_process

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAY_HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live_server(FakeEngine()) as server:
        yield server


def post(server: LiveServer, path: str, body, headers=None) -> tuple[int, dict]:
    status, _, data = server.request("POST", path, body, headers)
    return status, json.loads(data)


def complete(server: LiveServer, **body) -> dict:
    status, answer = post(server, COMPLETIONS, {"prompt": "hi"} | body)
    assert status == 200, answer
    return answer


def chat(server: LiveServer, **body) -> dict:
    status, answer = post(server, CHAT, {"messages": SAY_HI} | body)
    assert status == 200, answer
    return answer


def refused(server: LiveServer, path: str, body, status: int = 400) -> dict:
    """The error object of a request that must be refused."""
    found, answer = post(server, path, body)
    assert found == status, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in answer["error"]["message"]
    return answer["error"]


def last_params(server: LiveServer) -> SamplingParams:
    return server.engine.seen[-1][2]


def last_prompt(server: LiveServer) -> tuple[int, ...]:
    return server.engine.seen[-1][1]


# Answers


def test_a_completion_in_openais_shape(server):
    answer = complete(server, max_tokens=3)
    assert answer["id"].startswith("cmpl-")
    assert abs(answer["created"] - time.time()) < 60
    del answer["id"], answer["created"]
    assert answer == {
        "object": "text_completion",
        "model": "fake/model",
        "system_fingerprint": f"paged-jax-{__version__}",
        "choices": [
            {
                "index": 0,
                "text": "one two three ",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_chat_completion_in_openais_shape(server):
    answer = chat(server, max_tokens=2)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "one two "},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert bytes(last_prompt(server)[1:]) == b"<user>hi<assistant>"


@pytest.mark.parametrize(
    ("engine", "reason", "stop_reason"),
    [
        (FakeEngine(lengths=(4,)), "stop", None),
        (FakeEngine(lengths=(4,), stop_reason="four"), "stop", "four"),
        (FakeEngine(lengths=(4,), stop_reason=3), "stop", 3),
        (FakeEngine(), "length", None),
        (FakeEngine(max_model_len=7), "length", None),
    ],
)
def test_a55_finish_reasons_are_the_engines(engine, reason, stop_reason):
    with live_server(engine) as server:
        body = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}
        choice = post(server, COMPLETIONS, body)[1]["choices"][0]
    assert choice["text"] == text_of(4)
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_reason)
    assert last_params(server).ignore_eos is True


def test_several_prompts_answer_in_their_order(server):
    answer = complete(server, prompt=["a", "bc", "def"], max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["text"] for choice in answer["choices"]} == {"one two "}
    assert answer["usage"]["prompt_tokens"] == 2 + 3 + 4
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("hi", (BOS, 104, 105)),
        ([104, 105], (104, 105)),
        ([[104], [105, 106]], (105, 106)),
        (["a", "b"], (BOS, 98)),
    ],
)
def test_every_form_of_a_prompt(server, prompt, token_ids):
    complete(server, prompt=prompt, max_tokens=1)
    assert token_ids in {seen[1] for seen in server.engine.seen[-2:]}


def test_add_special_tokens(server):
    complete(server, add_special_tokens=False)
    assert last_prompt(server) == tuple(b"hi")
    error = refused(server, CHAT, {"messages": SAY_HI, "add_special_tokens": True})
    assert error["param"] == "add_special_tokens"


def test_echo_puts_the_prompt_before_the_text(server):
    answer = complete(server, prompt=["a", "b"], echo=True, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == ["aone ", "bone "]
    answer = complete(server, prompt=[BOS, 104, 105], echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "<bos>hi"


def test_return_token_ids(server):
    choice = complete(server, return_token_ids=True, max_tokens=2)["choices"][0]
    assert choice["prompt_token_ids"] == [BOS, 104, 105]
    assert choice["token_ids"] == [0, 1]
    answer = chat(server, return_token_ids=True, max_tokens=2)
    assert tuple(answer["prompt_token_ids"]) == last_prompt(server)
    assert answer["choices"][0]["token_ids"] == [0, 1]


def test_a21_max_tokens_of_zero_one_and_null(server):
    choice = complete(server, max_tokens=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert complete(server, max_tokens=0)["usage"]["completion_tokens"] == 0
    assert complete(server, max_tokens=1)["choices"][0]["text"] == "one "
    assert complete(server, max_tokens=None)["usage"]["completion_tokens"] == 16


# Fields that are honoured


def test_sampling_fields_reach_the_engine(server):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 42,
        "max_tokens": 2,
        "stop": ["x", "y"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    for call in (complete, chat):
        call(server, **fields)
        assert last_params(server) == SamplingParams(**fields)


def test_defaults_of_the_two_endpoints(server):
    complete(server)
    assert last_params(server) == SamplingParams(max_tokens=16, temperature=1.0)
    with live_server(FakeEngine(lengths=(3,))) as short:
        chat(short)
        assert last_params(short) == SamplingParams(max_tokens=None, temperature=1.0)


def test_the_models_own_defaults_come_before_ours_and_after_the_requests():
    engine = FakeEngine(generation_defaults={"temperature": 0.6, "top_k": 50, "unheard_of": 1})
    with live_server(engine) as server:
        complete(server, top_k=3)
        assert last_params(server) == SamplingParams(max_tokens=16, temperature=0.6, top_k=3)


def test_max_completion_tokens_is_max_tokens_by_its_newer_name(server):
    chat(server, max_completion_tokens=3, max_tokens=5)
    assert last_params(server).max_tokens == 3
    error = refused(server, CHAT, {"messages": SAY_HI, "max_completion_tokens": -1})
    assert error["param"] == "max_completion_tokens"


def test_template_fields_reach_the_template(server):
    chat(server, chat_template_kwargs={"mood": "calm"}, reasoning_effort="low", max_tokens=1)
    messages, variables = server.engine.rendered[-1]
    assert messages == SAY_HI
    assert variables == {"mood": "calm", "reasoning_effort": "low"}
    for field, wrong in (
        ("chat_template_kwargs", {"colour": "red"}),
        ("reasoning_effort", "unheard of"),
    ):
        assert refused(server, CHAT, {"messages": SAY_HI, field: wrong})["param"] == field
    for options, end in (
        ({"add_generation_prompt": False}, b"<end>"),
        ({"add_generation_prompt": False, "continue_final_message": True}, b"<user>hi"),
    ):
        chat(server, max_tokens=1, **options)
        assert bytes(last_prompt(server)[1:]).endswith(end)
    error = refused(server, CHAT, {"messages": SAY_HI, "continue_final_message": True})
    assert error["param"] == "continue_final_message"


def test_content_in_parts_is_joined_and_other_keys_reach_the_template(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "Ann", "refusal": None}
    chat(server, messages=[message], max_tokens=1)
    assert server.engine.rendered[-1][0] == [{"role": "user", "content": "a\nb", "name": "Ann"}]


# Fields that are refused, set aside or unknown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ x }}"),
        ("documents", [{}]),
        ("functions", [{}]),
        ("logprob_token_ids", [1]),
        ("modalities", ["audio"]),
        ("n", True),
        ("parallel_tool_calls", "yes"),
        ("prediction", {"type": "content", "content": "x"}),
        ("response_format", {"type": "structural_tag"}),
        ("structured_outputs", {"regexp": "a+"}),
        ("suffix", "end"),
        ("tool_choice", "required"),
        ("top_logprobs", 5),
        ("truncate_prompt_tokens", 10),
    ],
)
def test_what_is_known_and_not_supported_is_refused_by_name(server, field, value):
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": SAY_HI})):
        error = refused(server, path, body | {field: value})
        assert error["param"] == field
        assert field in error["message"]


def test_completions_take_no_tools(server):
    for field, value in (("tools", [{"type": "function"}]), ("top_logprobs", 1)):
        assert refused(server, COMPLETIONS, {"prompt": "hi", field: value})["param"] == field


def test_neutral_values_of_unsupported_fields_are_welcome(server):
    fields = {
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": {},
        "logprobs": False,
        "n": 1,
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "response_format": {"type": "text"},
        "suffix": "",
        "tool_choice": "none",
        "tools": [],
    }
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": SAY_HI})):
        status, headers, _ = server.request("POST", path, body | fields | {"max_tokens": 1})
        assert status == 200
        assert "x-paged-jax-ignored-fields" not in headers


def test_fields_for_others_are_set_aside(server):
    fields = {
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "user": "u",
    }
    body = {"messages": SAY_HI, "max_tokens": 1} | fields
    status, headers, _ = server.request("POST", CHAT, body)
    assert status == 200
    assert "x-paged-jax-ignored-fields" not in headers


def test_an_unknown_field_is_named_in_a_header(server):
    body = {"prompt": "hi", "max_tokens": 1, "tempreature": 0, "ünknown,\r\n": 1}
    status, headers, _ = server.request("POST", COMPLETIONS, body)
    assert status == 200
    assert headers["x-paged-jax-ignored-fields"] == "tempreature,%C3%BCnknown%2C%0D%0A"


def test_an_unknown_field_is_refused_when_fields_are_strict():
    with live_server(FakeEngine(), ServeOptions(strict_fields=True)) as server:
        error = refused(server, COMPLETIONS, {"prompt": "hi", "tempreature": 0})
        assert (error["param"], error["code"]) == ("tempreature", "unknown_field")
        assert not server.engine.seen
        complete(server, user="known", max_tokens=1)


# fmt: off
NULLABLE = (
    "add_generation_prompt", "add_special_tokens", "chat_template_kwargs",
    "continue_final_message", "echo", "frequency_penalty", "ignore_eos",
    "include_stop_str_in_output", "logit_bias", "logprobs", "max_completion_tokens",
    "max_tokens", "metadata", "min_p", "min_tokens", "model", "n", "presence_penalty",
    "request_id", "response_format", "return_token_ids", "seed", "skip_special_tokens", "stop",
    "stop_token_ids", "stream", "stream_options", "temperature", "tool_choice", "tools",
    "top_k", "top_logprobs", "top_p", "unheard_of", "user",
)
# fmt: on


def test_a60_null_equals_absent(server):
    nulls = dict.fromkeys(NULLABLE)
    for path, body in (
        (COMPLETIONS, {"prompt": "hi"}),
        (CHAT, {"messages": SAY_HI, "max_completion_tokens": 3}),
    ):
        post(server, path, body)
        expected = last_prompt(server), last_params(server)
        status, headers, _ = server.request("POST", path, nulls | body)
        assert status == 200
        assert "x-paged-jax-ignored-fields" not in headers
        assert (last_prompt(server), last_params(server)) == expected
    stream = {"stream": True, "stream_options": {"include_usage": None}}
    assert server.request("POST", COMPLETIONS, {"prompt": "hi"} | stream)[0] == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template_kwargs", []),
        ("echo", "yes"),
        ("ignore_eos", 1),
        ("max_completion_tokens", 1.5),
        ("max_tokens", "many"),
        ("max_tokens", -1),
        ("max_tokens", 2.0),
        ("min_p", 2),
        ("model", 5),
        ("n", True),
        ("return_token_ids", "no"),
        ("seed", 1.5),
        ("stop", [1]),
        ("stop", {}),
        ("stop_token_ids", ["a"]),
        ("stream", "true"),
        ("stream_options", []),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", -1),
        ("top_k", -2),
        ("top_p", 1.1),
    ],
)
def test_a60_a_wrong_type_or_value_names_the_parameter(server, field, value):
    body = {"prompt": "hi"} if field == "echo" else {"messages": SAY_HI}
    path = COMPLETIONS if field == "echo" else CHAT
    error = refused(server, path, body | {field: value})
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ({}, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ([5], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([*SAY_HI, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (SAY_HI * 10_000, "messages"),
    ],
)
def test_a60_wrong_messages_are_named(server, messages, param):
    assert refused(server, CHAT, {"messages": messages})["param"] == param


def test_a60_what_is_required(server):
    assert refused(server, COMPLETIONS, {})["param"] == "prompt"
    assert refused(server, CHAT, {"prompt": "hi"})["param"] == "messages"
    error = refused(server, COMPLETIONS, {"prompt": "hi", "stream_options": {}})
    assert error["param"] == "stream_options"
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    error = refused(server, COMPLETIONS, {"prompt": "hi"} | options)
    assert error["param"] == "stream_options.include_obfuscation"
    options = {"stream": True, "stream_options": {"usage": True}}
    error = refused(server, COMPLETIONS, {"prompt": "hi"} | options)
    assert error["param"] == "stream_options"
    assert "usage" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b'{"prompt": "hi"',
        b'{"prompt": "hi"} x',
        b'["prompt"]',
        b'"prompt"',
        b"null",
        b'{"prompt": "hi", "temperature": NaN}',
        b'{"prompt": "hi", "temperature": 1e999}',
        b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"[" * 200_000,
        b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a60_a_bad_body_is_no_server_error(server, path, body):
    assert refused(server, path, body)["message"]


def test_an_unknown_model_is_not_found(server):
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": SAY_HI})):
        error = refused(server, path, body | {"model": "gpt-9"}, status=404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert post(server, path, body | {"model": "fake/model", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    "prompt",
    [[VOCAB_SIZE], [-1], [2**40], [2**70], [1.5], [1, True], [], [[]], [[1], 2], ["a", 1], [None]],
)
def test_a61_token_ids_are_checked_against_the_models_vocabulary(server, prompt):
    num_seen = len(server.engine.seen)
    assert refused(server, COMPLETIONS, {"prompt": prompt})["param"] == "prompt"
    assert len(server.engine.seen) == num_seen
    complete(server, prompt=[VOCAB_SIZE - 1], max_tokens=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 10**6),
        ("stop", ["x"] * 500_000),
        ("stop_token_ids", [1] * 500_000),
        ("logit_bias", {str(i): 0 for i in range(200_000)}),
        ("prompt", ["hi"] * 200_000),
        ("prompt", [[1]] * 200_000),
    ],
)
def test_a62_unbounded_lists_are_refused_before_work_for_each_item(server, field, value):
    num_seen = len(server.engine.seen)
    error = refused(server, COMPLETIONS, {"prompt": "hi"} | {field: value})
    assert error["param"] == field
    assert len(error["message"]) < 1100
    assert len(server.engine.seen) == num_seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "field", ["content", "name", "role", "stop", "model", "user", "prompt", "tools"]
)
def test_a64_half_a_surrogate_pair_is_refused_before_the_headers(server, field, stream):
    half = "\\ud800 and more text"
    told = {"content": '"x"', "name": '"x"', "role": '"user"'} | {field: f'"{half}"'}
    message = ",".join(f'"{k}":{told[k]}' for k in ("content", "name", "role"))
    extra = "" if field in ("content", "name", "role") else f',"{field}":["{half}"]'
    body = f'{{"messages":[{{{message}}}],"stream":{json.dumps(stream)}{extra}}}'
    status, headers, _ = server.request("POST", CHAT, body.encode())
    assert status == 400
    assert headers["content-type"] == "application/json"


def test_a64_a_whole_pair_works(server):
    body = b'{"prompt":"\\ud83d\\ude00","max_tokens":0,"echo":true}'
    assert post(server, COMPLETIONS, body)[1]["choices"][0]["text"] == "\U0001f600"


@pytest.mark.parametrize("stream", [False, True])
def test_a56_a_templates_refusal_comes_before_the_headers(server, stream):
    body = {"messages": [{"role": "refused", "content": ""}], "stream": stream}
    error = refused(server, CHAT, body)
    assert error["message"] == "roles must alternate"
    assert error["code"] == "chat_template"


@pytest.mark.parametrize("stream", [False, True])
def test_a17_too_long_a_prompt_is_told_with_its_numbers(stream):
    with live_server(FakeEngine(max_model_len=2048)) as server:
        body = {"prompt": [1] * 8, "max_tokens": 2045, "stream": stream}
        error = refused(server, COMPLETIONS, body)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("2048", "8", "2045"))


def test_without_a_tokenizer_token_ids_are_still_served():
    with live_server(FakeEngine(has_tokenizer=False)) as server:
        assert refused(server, COMPLETIONS, {"prompt": "hi"})["param"] == "prompt"
        assert refused(server, CHAT, {"messages": SAY_HI})["param"] == "messages"
        assert refused(server, COMPLETIONS, {"prompt": [1], "echo": True})["param"] == "echo"
        assert refused(server, "/tokenize", {"prompt": "hi"})["param"] == "prompt"
        assert refused(server, "/detokenize", {"tokens": [1]})["param"] == "tokens"
        complete(server, prompt=[1, 2])


# Size


def test_a67_too_large_a_body_is_refused_before_it_is_read(server):
    with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), 10)) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: {64 * 2**20}\r\n\r\n"
        raw.sendall(head.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a67_a_body_of_undeclared_length_is_not_kept(server):
    with live_server(FakeEngine(), ServeOptions(max_body_bytes=100_000)) as small:
        chunk = b"%x\r\n%s\r\n" % (50_000, b" " * 50_000)
        with contextlib.closing(socket.create_connection(("127.0.0.1", small.port), 10)) as raw:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n"
            raw.sendall(head.encode() + chunk * 3)
            answer = raw.recv(1000)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"request_too_large" in answer
        complete(small, prompt="x" * 10_000)


def test_a67_tokenizing_leaves_the_loop_to_others():
    engine = FakeEngine()
    with live_server(engine) as server:
        release = threading.Event()
        encode = engine.tokenizer.encode
        engine.tokenizer.encode = lambda *args, **kwargs: release.wait(10) and encode("slow")
        slow = threading.Thread(target=complete, args=(server,), kwargs={"max_tokens": 1})
        slow.start()
        try:
            complete(server, prompt=[1], max_tokens=1)
            assert not release.is_set()
        finally:
            release.set()
            slow.join()
        assert bytes(last_prompt(server)[1:]) == b"slow"


def test_a67_nobody_waits_for_large_inputs():
    """Text of 5 MiB, and bodies that are too large, while another client streams."""
    with server_process("--delay-s", "0.005") as (server, _):
        ended = threading.Event()
        gaps, answers = [], []
        large = [
            (COMPLETIONS, b'{"prompt": "' + b"x" * 5 * 2**20 + b'"}'),
            ("/tokenize", b'{"prompt": "' + b"x" * 2**20 + b'"}'),
            (COMPLETIONS, b'{"prompt": [' + b"1," * 2**20 + b"1]}"),
        ]

        def read_stream() -> None:
            body = {"prompt": "hi", "max_tokens": 300, "stream": True}
            with contextlib.closing(server.open(COMPLETIONS, body)) as raw:
                latest, answer = time.monotonic(), b""
                while not answer.endswith(b"0\r\n\r\n"):
                    answer = answer[-10:] + raw.recv(2**16)
                    now = time.monotonic()
                    gaps.append(now - latest)
                    latest = now
            ended.set()

        def send_large() -> None:
            for path, body in large:
                answers.append(server.request("POST", path, body)[0])

        threads = [threading.Thread(target=work) for work in (read_stream, send_large)]
        for thread in threads:
            thread.start()
        waits = []
        while not ended.is_set():
            began = time.monotonic()
            assert server.request("GET", "/health")[0] == 200
            waits.append(time.monotonic() - began)
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert answers == [400, 200, 400]
        # Of all but the slowest, which another program on this machine may have caused.
        assert sorted(gaps)[-3] < 0.5 and sorted(waits)[-2] < 0.2


# Names of requests


def test_a26_two_requests_of_one_name_get_their_own_answers():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        answers = []

        def ask(prompt: str, headers: dict, body: dict) -> None:
            body = {"prompt": prompt, "echo": True, "max_tokens": 10} | body
            answers.append(post(server, COMPLETIONS, body, headers)[1])

        threads = [
            threading.Thread(target=ask, args=("a", {"x-request-id": "same"}, {})),
            threading.Thread(target=ask, args=("b", {"x-request-id": "same"}, {})),
            threading.Thread(target=ask, args=("c", {}, {"request_id": "same"})),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(a["choices"][0]["text"] for a in answers) == [p + text_of(10) for p in "abc"]
    assert {answer["id"] for answer in answers} == {"cmpl-same"}
    assert len({seen[0] for seen in server.engine.seen}) == 3


@pytest.mark.parametrize("bad", ["x" * 129, "x" * 2**20, "caf\xe9"])
def test_a26_a_name_that_is_too_long_or_unprintable_is_refused(server, bad):
    status, headers, body = server.request("GET", "/health", headers={"x-request-id": bad})
    assert status == 400
    assert json.loads(body)["error"]["param"] == "x-request-id"
    assert len(headers["x-request-id"]) == 32
    error = refused(server, COMPLETIONS, {"prompt": "hi", "request_id": bad})
    assert error["param"] == "request_id"
    error = refused(server, COMPLETIONS, {"prompt": "hi", "request_id": "a\nb"})
    assert error["param"] == "request_id"


def test_a_requests_name_is_echoed_whatever_happens(server):
    for path, status in (("/health", 200), ("/nowhere", 404)):
        found, headers, _ = server.request("GET", path, headers={"x-request-id": "mine"})
        assert (found, headers["x-request-id"]) == (status, "mine")
    body = {"prompt": "hi", "request_id": "from the body", "max_tokens": 1}
    _, headers, _ = server.request("POST", COMPLETIONS, body)
    assert headers["x-request-id"] == "from the body"
    _, headers, _ = server.request("POST", COMPLETIONS, body, {"x-request-id": "first"})
    assert headers["x-request-id"] == "first"


# Errors of the server


@pytest.mark.parametrize("stream", [False, True])
def test_a_crash_shows_no_innards(stream):
    engine = FakeEngine(raises_after=(0, KeyError("innards")))
    with live_server(engine) as server:
        body = {"prompt": "hi", "stream": stream}
        status, headers, data = server.request("POST", COMPLETIONS, body, {"x-request-id": "me"})
    assert status == 500
    assert json.loads(data)["error"] == {
        "message": "Something went wrong in the server.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert headers["x-should-retry"] == "false"
    assert headers["x-request-id"] == "me"


@pytest.mark.parametrize("stream", [False, True])
def test_a40_a_request_that_the_engine_gives_up_is_a_server_error(stream):
    with live_server(FakeEngine(fails_after=0)) as server:
        error = refused(server, COMPLETIONS, {"prompt": "hi", "stream": stream}, status=500)
    assert error["code"] == "generation_failed"
    assert error["type"] == "server_error"


def test_a68_a_dead_engine_is_told_everywhere():
    with live_server(FakeEngine(dies_after=2)) as server:
        body = {"prompt": "hi", "max_tokens": 5}
        error = refused(server, COMPLETIONS, body, status=503)
        assert error["code"] == "engine_dead"
        assert "innards" not in error["message"]
        status, headers, _ = server.request("POST", CHAT, {"messages": SAY_HI})
        assert (status, headers["x-should-retry"]) == (503, "false")
        assert server.request("GET", "/health")[0] == 503
        assert server.request("GET", "/ping")[0] == 503
        assert server.request("GET", "/version")[0] == 200
    assert EngineDeadError.__name__ not in error["message"]


def test_routing_errors_are_in_shape_too(server):
    status, headers, body = server.request("PUT", COMPLETIONS, b"")
    assert (status, headers["allow"]) == (405, "POST")
    assert json.loads(body)["error"]["code"] == "method_not_allowed"
    assert server.request("GET", "/v1/nothing")[0] == 404


# The other endpoints


def test_models(server):
    status, _, body = server.request("GET", "/v1/models")
    card = json.loads(body)["data"][0]
    assert status == 200
    assert json.loads(body)["object"] == "list"
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake/model", "model", 20_000)
    status, _, body = server.request("GET", "/v1/models/fake/model")
    assert json.loads(body) == card
    status, _, body = server.request("GET", "/v1/models/other")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


def test_tokenize_and_detokenize(server):
    _, answer = post(server, "/tokenize", {"prompt": "hé"})
    assert answer == {"count": 4, "max_model_len": 20_000, "tokens": [BOS, 104, 195, 169]}
    _, answer = post(server, "/tokenize", {"prompt": "hi", "add_special_tokens": False})
    assert answer["tokens"] == [104, 105]
    _, answer = post(server, "/tokenize", {"prompt": "hi", "return_token_strs": True})
    assert answer["token_strs"] == ["<bos>", "h", "i"]
    _, answer = post(server, "/tokenize", {"messages": SAY_HI})
    assert bytes(answer["tokens"][1:]) == b"<user>hi<assistant>"
    assert post(server, "/detokenize", {"tokens": [BOS, 104, 105]}) == (
        200,
        {"prompt": "<bos>hi"},
    )
    assert refused(server, "/detokenize", {"tokens": [VOCAB_SIZE]})["param"] == "tokens"
    assert refused(server, "/detokenize", {"tokens": ["a"]})["param"] == "tokens[0]"
    assert refused(server, "/tokenize", {"prompt": [1]})["param"] == "prompt"
    _, headers, _ = server.request("POST", "/tokenize", {"prompt": "hi", "temperature": 1})
    assert headers["x-paged-jax-ignored-fields"] == "temperature"


def test_health_ping_and_version(server):
    for method, path, answer in (
        ("GET", "/health", {"state": "ready"}),
        ("GET", "/ping", {"state": "ready"}),
        ("POST", "/ping", {"state": "ready"}),
        ("GET", "/version", {"version": __version__}),
    ):
        status, _, body = server.request(method, path)
        assert (status, json.loads(body)) == (200, answer)


def test_an_engine_of_somebody_else_is_neither_started_nor_shut_down():
    from starlette.testclient import TestClient

    from serve import create_app

    engine = FakeEngine(pieces=PIECES)
    with TestClient(create_app(engine, owns_engine=False)) as client:
        assert client.get("/health").status_code == 503
        engine.state = "ready"
        assert client.get("/health").status_code == 200
    assert (engine.num_starts, engine.num_shutdowns) == (0, 0)


def test_options_that_let_nothing_through_are_refused():
    for wrong in (
        {"max_body_bytes": 0},
        {"max_unsent_bytes": -1},
        {"drain_timeout_s": -1},
        {"metrics_prefix": "x"},
    ):
        [name] = wrong
        with pytest.raises(ValueError, match=name):
            ServeOptions(**wrong)
