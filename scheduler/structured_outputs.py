"""The form that an output must have: a frozen value, of which exactly one kind is given."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from scheduler.checks import refuse, require_texts
from scheduler.errors import RequestError

MAX_GRAMMAR_LEN = 65536  # characters of a schema, a pattern or a grammar
MAX_CHOICES = 1024
MAX_CHOICE_LEN = 4096
NAME = "structured_outputs"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the text of an output must be. RequestError names a bad field.

    `json` is kept as the schema's text. The white space between JSON's parts is one space at
    most, so that a model cannot fill its tokens with it.
    """

    json: str | Mapping[str, Any] | bool | None = field(
        default=None, metadata={"doc": "a JSON document that this JSON schema describes"}
    )
    json_object: bool | None = field(default=None, metadata={"doc": "any JSON object"})
    regex: str | None = field(
        default=None, metadata={"doc": "a text that the pattern matches as a whole"}
    )
    choice: tuple[str, ...] | list[str] | None = field(
        default=None, metadata={"doc": "one of these texts"}
    )
    grammar: str | None = field(
        default=None, metadata={"doc": "a text of this grammar: Lark, or GBNF with `root ::=`"}
    )

    def __post_init__(self):
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.json_object not in (None, True):
            refuse(f"{NAME}.json_object", "true", self.json_object)
        for name in ("regex", "grammar"):
            if getattr(self, name) is not None:
                _require_text(name, getattr(self, name))
        if self.choice is not None:
            where = f"{NAME}.choice"
            choices = require_texts(where, self.choice, most=MAX_CHOICES, max_len=MAX_CHOICE_LEN)
            if not choices:
                refuse(where, "a list of at least one string", self.choice)
            object.__setattr__(self, "choice", choices)
        if sum(getattr(self, f.name) is not None for f in fields(self)) != 1:
            given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
            raise RequestError(
                f"{NAME} must hold exactly one of {', '.join(f.name for f in fields(self))}; "
                f"it holds {' and '.join(given) or 'none'}",
                param=NAME,
            )

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputs":
        """From a mapping with the fields' names, as it comes in a request."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            refuse(NAME, "an object", value)
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestError(
                    f"{NAME}.{name!s:.64} is not supported; it holds one of {', '.join(known)}",
                    param=NAME,
                )
        return cls(**value)


def _require_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        refuse(f"{NAME}.{name}", "a non-empty string", value)
    if len(value) > MAX_GRAMMAR_LEN:
        raise RequestError(
            f"{NAME}.{name} has {len(value)} characters, at most {MAX_GRAMMAR_LEN} are allowed",
            param=f"{NAME}.{name}",
        )


def _schema_text(schema: Any) -> str:
    """The schema as JSON text; given as text or as an object."""
    if isinstance(schema, str):
        _require_text("json", schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            refuse(f"{NAME}.json", "a JSON schema", schema)
    if not isinstance(schema, Mapping | bool):
        refuse(f"{NAME}.json", "a JSON schema, which is an object", schema)
    try:
        text = json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        refuse(f"{NAME}.json", "a JSON schema of plain values", "something else")
    _require_text("json", text)
    return text
