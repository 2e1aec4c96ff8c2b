"""The tools of a chat: what may be called, what must be, and how the model writes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_jax import RequestError, StructuredOutputs
from serve.chat_tools import Calls, long_id, short_id
from serve.engine import Engine, Tokenizer
from serve.protocol import ChatRequest
from serve.tool_grammar import calls_grammar
from serve.tool_parsers import PARSERS

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What a chat template writes for a call shows whose words it speaks.
SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}


@dataclass(frozen=True)
class ToolUse:
    """`tools` are for the template; `form` is that of a text that must be a call.

    Without `parallel` a message keeps its first call only.
    """

    tools: Sequence[dict[str, Any]]
    parser_name: str
    form: StructuredOutputs | None
    parallel: bool

    def calls(self) -> Calls:
        """Of one choice."""
        make_id = short_id if self.parser_name == "mistral" else long_id
        return Calls(PARSERS[self.parser_name](), make_id, parallel=self.parallel)


def tool_use(body: ChatRequest, engine: Engine, parser: str) -> ToolUse | None:
    """None if no tool may be called. RequestError names what is wrong with the tools.

    parser: the one that the operator chose; `auto` asks the chat template.
    """
    functions = [_function(i, tool) for i, tool in enumerate(_few(body.tools or []))]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise RequestError("tools hold two functions of one name", param="tools")
    wanted = _wanted(body.tool_choice, names)
    if wanted == "none" or not functions:
        return None
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise RequestError(
            "tools need a tokenizer, and this server runs without one", param="tools"
        )
    name = _parser_of(tokenizer, parser)
    form = None
    if wanted != "auto":
        chosen = [f for f in functions if wanted in ("required", f["name"])]
        several = body.parallel_tool_calls and wanted == "required"
        form = StructuredOutputs(grammar=calls_grammar(name, chosen, tokenizer, several=several))
    else:
        _refuse_strict(functions)
    return ToolUse(body.tools or [], name, form, body.parallel_tool_calls)


def _few(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools holds {len(tools)} tools, at most {MAX_TOOLS} are allowed", param="tools"
        )
    return tools


def _function(i: int, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    where = f"tools[{i}]"
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(f"{where} must be a tool of the type function", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, _ or -, got {name!r:.80}",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("parameters") or {}, dict):
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema, which is an object",
            param=f"{where}.function.parameters",
        )
    return function


def _wanted(choice: Any, names: Sequence[str]) -> str:
    """`none`, `auto`, `required`, or the name of the function that must be called."""
    match choice:
        case None:
            return "auto"
        case "none" | "auto":
            return choice
        case "required" if names:
            return choice
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return name
        case "required" | {"type": "function"}:
            raise RequestError(
                "tool_choice asks for a function that is not among the tools", param="tool_choice"
            )
    raise RequestError(
        "tool_choice must be none, auto, required or a function among the tools, got "
        f"{choice!r:.80}",
        param="tool_choice",
    )


def _parser_of(tokenizer: Tokenizer, parser: str) -> str:
    if parser != "auto":
        return parser
    template = tokenizer.chat_template
    for name, sign in SIGNS.items():
        if sign in template:
            return name
    raise RequestError(
        "tools are not supported: how this model writes a call cannot be told from its chat "
        "template; the operator can say it with --tool-call-parser",
        param="tools",
        code="unsupported_field",
    )


def _refuse_strict(functions: Sequence[Mapping[str, Any]]) -> None:
    """What is only promised of a call that must come is not promised here."""
    for i, function in enumerate(functions):
        if function.get("strict"):
            raise RequestError(
                f"tools[{i}].function.strict is supported with a tool_choice that requires a "
                "call, not with auto",
                param=f"tools[{i}].function.strict",
                code="unsupported_field",
            )
