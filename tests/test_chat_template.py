"""Chat templates: what Hugging Face's renders, what they may refuse, what they may not do."""

import ast
import json
import re
from datetime import datetime
from pathlib import Path

import pytest

import paged_jax
from paged_jax.chat_template import ChatTemplate
from paged_jax.errors import ModelLoadError, RequestError

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "OK"}

CHATML = (
    "{% for message in messages %}<|s|>{{ message['role'] }}\n{{ message['content'] }}<|e|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
ALTERNATING = """\
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant!') }}
    {%- endif %}
    {%- if message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('Unknown role ' + message['role']) }}
    {%- endif %}
    {{- '[' + message['role'] + '] ' + message['content'] + eos_token }}
{%- endfor %}
"""


def test_a_conversation_is_rendered():
    template = ChatTemplate(CHATML)
    assert template.render([USER]) == "<|s|>user\nhi<|e|>\n<|s|>assistant\n"
    assert template.render([USER, ANSWER], add_generation_prompt=False) == (
        "<|s|>user\nhi<|e|>\n<|s|>assistant\nOK<|e|>\n"
    )


def test_blocks_leave_no_blank_lines():
    source = "{% if messages %}\n    {% for m in messages %}\n{{ m.content }}\n    {% endfor %}\n"
    assert ChatTemplate(source + "{% endif %}\n").render([USER, USER]) == "hi\nhi\n"


def test_special_tokens_are_given():
    template = ChatTemplate("{{ bos_token }}{{ eos_token }}", bos_token="<s>", eos_token="</s>")
    assert template.render([USER]) == "<s></s>"
    assert ChatTemplate("{{ bos_token }}x").render([USER]) == "x"
    padded = ChatTemplate("{{ pad_token }}{{ unk_token }}", special_tokens={"pad_token": "<p>"})
    assert padded.render([USER]) == "<p>"
    with pytest.raises(RequestError, match="pad_token cannot be given"):
        padded.render([USER], variables={"pad_token": "x"})


def test_loops_can_be_left():
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
        "{% break %}{% endfor %}"
    )
    messages = [{"role": "user", "content": text} for text in "abc"]
    assert ChatTemplate(source).render(messages) == "b"


def test_the_generation_mark_changes_nothing():
    marked = CHATML.replace(
        "{{ message['content'] }}", "{% generation %}{{ message['content'] }}{% endgeneration %}"
    )
    assert marked != CHATML
    assert ChatTemplate(marked).render([USER, ANSWER]) == ChatTemplate(CHATML).render(
        [USER, ANSWER]
    )


def test_json_is_not_escaped_for_html():
    value = {"b": "<é & '\">", "a": [1, None, True]}
    tools = [value]
    assert ChatTemplate("{{ tools | tojson }}").render([USER], tools=tools) == json.dumps(
        tools, ensure_ascii=False
    )
    assert ChatTemplate("{{ tools[0] | tojson(indent=2) }}").render(
        [USER], tools=tools
    ) == json.dumps(value, ensure_ascii=False, indent=2)
    assert ChatTemplate("{{ tools[0] | tojson(separators=(',', ':'), sort_keys=True) }}").render(
        [USER], tools=tools
    ) == json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def test_the_date_can_be_written():
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render([USER])
    assert abs((datetime.now() - datetime.strptime(text, "%Y-%m-%d")).days) <= 1


def test_variables_reach_the_template():
    template = ChatTemplate("{% if thinking is defined %}{{ thinking }}{% endif %}")
    assert template.render([USER]) == ""
    assert template.render([USER], variables={"thinking": False}) == "False"


@pytest.mark.parametrize("name", ["other", "messages", "bos_token", "raise_exception", "range"])
def test_variables_that_the_template_would_ignore_are_refused(name):
    template = ChatTemplate("{{ raise_exception if thinking }}{{ range }}{{ bos_token }}")
    with pytest.raises(RequestError) as caught:
        template.render([USER], variables={name: 1})
    assert caught.value.param == "chat_template_kwargs"
    assert name in str(caught.value)


def test_tools_that_the_template_would_ignore_are_refused():
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(RequestError, match="takes no tools") as caught:
        ChatTemplate(CHATML).render([USER], tools=tools)
    assert caught.value.param == "tools"
    assert ChatTemplate(CHATML).render([USER], tools=[])
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    assert ChatTemplate(source).render([USER], tools=tools) == "f"


# Refusals


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([USER, USER], "Conversation roles must alternate user/assistant!"),
        ([USER, {"role": "robot", "content": "x"}], "Unknown role robot"),
        ([{"role": "assistant", "content": "x"}], "Conversation roles must alternate"),
    ],
)
def test_a56_a_refusal_has_the_templates_own_words(messages, words):
    template = ChatTemplate(ALTERNATING)
    assert template.render([USER, ANSWER]) == "[user] hi[assistant] OK"
    with pytest.raises(RequestError) as caught:
        template.render(messages)
    assert str(caught.value).startswith(words)
    assert caught.value.param == "messages"
    assert caught.value.code == "chat_template"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (None, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0]"),
        ([{"role": None, "content": "hi"}], "messages[0]"),
        ([USER, {"role": "user", "content": None}], "messages[1].content"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "messages[1].content"),
    ],
)
def test_a56_messages_that_are_none_are_refused_by_name(messages, param):
    with pytest.raises(RequestError) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.param == param


def test_an_assistant_that_calls_a_tool_needs_no_content():
    source = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert ChatTemplate(source).render([USER, call]) == "hif"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ missing.attribute }}",
        "{{ messages[5].content }}",
        "{{ 1 // 0 }}",
        "{{ messages | tojson(indent='x', separators=3) }}",
        "{{ raise_exception() }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ strftime_now(3) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_whatever_goes_wrong_inside_is_a_request_error(source):
    with pytest.raises(RequestError):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'x' ", "{% for x in y %}", "{% unknown %}", "{{ x | nofilter }}"]
)
def test_a_template_that_is_none_is_a_load_error(source):
    with pytest.raises(ModelLoadError, match="chat template cannot be read, line 1"):
        ChatTemplate(source)


# Going on with the final message


@pytest.mark.parametrize("content", ["OK", "OK! ", "OK!\n", "", " OK", "\n", "\n\n", "a\nb \t\n"])
@pytest.mark.parametrize("source", [CHATML, TRIMMING])
def test_a58_the_final_message_can_be_left_open(source, content):
    messages = [USER, {"role": "assistant", "content": content}]
    template = ChatTemplate(source)
    prompt = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    closed = template.render(messages, add_generation_prompt=False)
    assert closed == prompt + "<|e|>\n"
    rendered = content.strip() if source is TRIMMING else content
    assert prompt.endswith("assistant\n" + rendered)


def test_a58_leaving_open_and_a_new_turn_exclude_each_other():
    with pytest.raises(RequestError, match="exclude each other") as caught:
        ChatTemplate(CHATML).render([USER, ANSWER], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_what_has_no_text_cannot_be_left_open():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    with pytest.raises(RequestError, match="no text to continue"):
        ChatTemplate(CHATML).render(
            [USER, call], add_generation_prompt=False, continue_final_message=True
        )
    with pytest.raises(RequestError, match="leaves out the final message"):
        ChatTemplate("{{ messages[0].content }}").render(
            [USER, ANSWER], add_generation_prompt=False, continue_final_message=True
        )


# The sandbox


SUBCLASSES = "''.__class__.__mro__[1].__subclasses__()"
ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch SENTINEL') }}",
    "{{ lipsum.__globals__['os'].system('touch SENTINEL') }}",
    "{{ joiner.__init__.__globals__.os.system('touch SENTINEL') }}",
    "{{ self.__init__.__globals__.__builtins__.open('SENTINEL', 'w') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('SENTINEL', 'w') }}",
    "{{ strftime_now.__globals__.__builtins__.open('SENTINEL', 'w') }}",
    "{{ (messages[0]|attr('__class__')).__base__.__subclasses__() }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{x.__init__.__globals__}'.format_map({'x': cycler}) }}",
    "{% set x = namespace() %}{{ x.__class__.__init__.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{% for c in " + SUBCLASSES + " %}{{ c.__init__.__globals__.os.system('touch SENTINEL') }}"
    "{% endfor %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a59_a_template_cannot_get_out(tmp_path, source):
    sentinel = tmp_path / "sentinel"
    messages = [dict(USER)]
    with pytest.raises(RequestError):
        ChatTemplate(source.replace("SENTINEL", str(sentinel))).render(messages)
    assert not sentinel.exists()
    assert messages == [USER]


def test_the_escapes_work_without_a_sandbox(tmp_path):
    """Or the test above would prove nothing."""
    import jinja2

    sentinel = tmp_path / "sentinel"
    source = ESCAPES[2].replace("SENTINEL", str(sentinel))
    jinja2.Environment().from_string(source).render()
    assert sentinel.exists()


def test_text_of_users_is_never_a_template():
    message = {"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}
    assert "{{ 7 * 7 }}{% raw %}" in ChatTemplate(CHATML).render([message])


def test_a59_no_template_is_made_outside_the_sandbox():
    package = Path(paged_jax.__file__).parent
    makers = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).rpartition(".")[2]
                if re.search("Environment$|^Template$", name):
                    makers.append((path.name, name))
    assert makers == [("chat_template.py", "ImmutableSandboxedEnvironment")]
