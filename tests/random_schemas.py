"""JSON schemas drawn at random, bounded so that a model can only fill them, and their own check."""

import re
from typing import Any

import numpy as np

WORDS = ("name", "city", "count", "tags", "price", "open", "kind", "note", "size", "parts")
PATTERNS = ("[A-Z]{2}[0-9]{3}", "[a-z]{1,8}", "(red|green|blue)", "[0-9]{4}-[0-9]{2}-[0-9]{2}")


def random_schema(seed: int) -> dict[str, Any]:
    """An object of up to five fields; every text and every list in it is bounded."""
    return _object(np.random.default_rng(seed), depth=2)


def _object(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    names = rng.choice(WORDS, size=rng.integers(1, 6 if depth == 2 else 4), replace=False).tolist()
    return {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _value(rng: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "enum", "null", "either"]
    kind = rng.choice(kinds + (["array", "object"] if depth > 0 else []))
    low = int(rng.integers(-50, 50))
    match kind:
        case "string":
            return {"type": "string", "maxLength": int(rng.integers(1, 16))}
        case "pattern":
            return {"type": "string", "pattern": f"^{rng.choice(PATTERNS)}$"}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(1, 500))}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.25}
        case "enum":
            return {"enum": rng.choice(["a", "bb", "c c", 'd"d', "é"], 3, replace=False).tolist()}
        case "either":
            return {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 6}]}
        case "array":
            most = int(rng.integers(1, 4))
            return {"type": "array", "items": _value(rng, depth - 1), "maxItems": most}
        case "object":
            return _object(rng, depth)
    return {"type": str(kind)}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Whether the value is one of those that the schema describes; for the kinds above."""
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "string":
            fits = re.search(schema.get("pattern", ""), value) if isinstance(value, str) else None
            return fits is not None and len(value) <= schema.get("maxLength", len(value))
        case "integer" | "number" as kind:
            kinds = int if kind == "integer" else int | float
            if isinstance(value, bool) or not isinstance(value, kinds):
                return False
            in_range = schema["minimum"] <= value <= schema["maximum"]
            return in_range and value % schema.get("multipleOf", 0.25) == 0
        case "array":
            return (
                isinstance(value, list)
                and len(value) <= schema["maxItems"]
                and all(conforms(item, schema["items"]) for item in value)
            )
        case "object":
            return (
                isinstance(value, dict)
                and set(schema["required"]) <= set(value) <= set(schema["properties"])
                and all(conforms(value[name], schema["properties"][name]) for name in value)
            )
        case "boolean":
            return isinstance(value, bool)
    return value is None
