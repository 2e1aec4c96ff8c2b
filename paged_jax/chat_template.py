"""A model's chat template, rendered in a sandbox: it comes with the weights and is not trusted."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from paged_jax.errors import ModelLoadError, RequestError

__all__ = ["ChatTemplate"]

Message = Mapping[str, Any]
RESERVED = ("messages", "tools", "add_generation_prompt")
END_MARK = "\u2063END-OF-CONTENT\u2063"  # invisible separators: no template and no user writes it


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refusal(jinja2.TemplateError):
    """What a template says through `raise_exception`."""


def _raise_exception(message: object = "") -> None:
    raise _Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options) -> str:
    # Jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.filters["tojson"] = _tojson
    return environment


class ChatTemplate:
    """Turns messages into the text that the model was trained on.

    Raises ModelLoadError if `source` is no template. `bos_token` and `eos_token` are what it may
    write under those names, `special_tokens` more of the kind (`pad_token`, `unk_token`, ...).
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ):
        self.source = source
        environment = _environment()
        try:
            self.variables = frozenset(
                jinja2.meta.find_undeclared_variables(environment.parse(source))
            )
            self._render: Callable[..., str] = environment.from_string(source).render
        except (jinja2.TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f", line {line}" if line else ""
            raise ModelLoadError(
                f"the chat template cannot be read{where}: {error}; give another one"
            ) from error
        self._tokens = {
            **(special_tokens or {}),
            "bos_token": bos_token or "",
            "eos_token": eos_token or "",
        }

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, each a mapping with `role` and `content`.

        `continue_final_message` leaves the last message open, for the model to go on with it.
        `variables` are more names that the template may read. Raises RequestError for messages
        that the template refuses or cannot render, with the template's own words, and for what it
        would ignore: tools, or variables that it never reads.
        """
        _check_messages(messages)
        variables = dict(variables or {})
        self._check_variables(variables, tools)
        if continue_final_message:
            if add_generation_prompt:
                raise RequestError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            return self._render_open(messages, tools, variables)
        return self._rendered(messages, tools, add_generation_prompt, variables)

    def _check_variables(self, variables: Mapping[str, Any], tools: object) -> None:
        if tools and "tools" not in self.variables:
            raise RequestError("this model's chat template takes no tools", param="tools")
        for name in variables:
            if name in RESERVED or name in self._tokens:
                raise RequestError(
                    f"{name} cannot be given to the chat template this way",
                    param="chat_template_kwargs",
                )
            if name not in self.variables:
                raise RequestError(
                    f"this model's chat template does not read {name!r}",
                    param="chat_template_kwargs",
                )

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        try:
            return self._render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
                **variables,
            )
        except _Refusal as refusal:
            raise RequestError(str(refusal), param="messages", code="chat_template") from refusal
        except Exception as error:  # whatever an untrusted template can do wrong
            raise RequestError(
                f"this model's chat template cannot render these messages: {error}",
                param="messages",
                code="chat_template",
            ) from error

    def _render_open(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise RequestError(
                "the final message has no text to continue", param="continue_final_message"
            )
        # A mark after the content shows where it ends, a space after the mark whether the template
        # trims: then the content's own trailing space would have been cut off as well.
        marked = {**messages[-1], "content": f"{content}{END_MARK} "}
        text = self._rendered([*messages[:-1], marked], tools, False, variables)
        prompt, mark, rest = text.rpartition(END_MARK)
        if not mark:
            raise RequestError(
                "this model's chat template leaves out the final message",
                param="continue_final_message",
            )
        if rest.startswith(" ") or not content.strip():
            return prompt
        return prompt.removesuffix(content[len(content.rstrip()) :])


def _check_messages(messages: Sequence[Message]) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] must be an object with a role", param=f"messages[{index}]"
            )
        calls = message.get("tool_calls") or message.get("function_call")
        if message.get("content") is None and not calls:
            raise RequestError(
                f"messages[{index}].content is missing", param=f"messages[{index}].content"
            )
