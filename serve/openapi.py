"""The description of the endpoints, as OpenAPI 3.1 has it, made from what the endpoints use.

Bodies and answers come from the types in `serve.protocol`, sampling fields from `SamplingParams`,
fields that are known and not supported from `serve.fields`: no field is described here.
"""

import dataclasses
import inspect
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from paged_jax import SamplingParams, __version__
from serve.endpoints import Operation
from serve.fields import SET_ASIDE
from serve.protocol import EXACT_SCHEMA, ErrorAnswer

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_NULL: Schema = {"type": "null"}
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    408: "The request's time was over.",
    404: "Not found, also a model that is not served here.",
    413: "The body is too long.",
    429: "The queue is full.",
    500: "The server failed.",
    503: "The engine is not ready, or dead.",
}


def describe(
    operations: Iterable[Operation], model_name: str, *, strict_fields: bool, with_keys: bool
) -> Schema:
    """The whole description, as JSON values, of a server of one model."""
    operations = tuple(operations)
    schemas = _Schemas(operations, model_name, strict_fields)
    paths: dict[str, Schema] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        for method in operation.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(operation, method, schemas)
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "paged-jax", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas.components, "responses": _error_responses()},
    }
    if with_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    return described


def _operation(operation: Operation, method: str, schemas: "_Schemas") -> Schema:
    told: Schema = {
        "operationId": f"{operation.call.__name__}_{_words(operation.path)}_{method.lower()}",
        "summary": (inspect.getdoc(operation.call) or "").partition("\n")[0],
        "responses": {"200": schemas.answer(operation)},
    }
    for status in _ERRORS:
        told["responses"][str(status)] = {"$ref": f"#/components/responses/{status}"}
    if not operation.gated:  # probes tell their state with 503 as well
        told["responses"]["503"] = {
            "description": "Not well: see `state`.",
            "content": schemas.answer(operation)["content"],
        }
    if "{" in operation.path:
        told["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": schemas.model}
        ]
    if operation.bodies and method == "POST":
        body = {"application/json": {"schema": schemas.body(operation)}}
        told["requestBody"] = {"required": schemas.needs_body(operation), "content": body}
    return told


def _error_responses() -> Schema:
    content = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorAnswer")}}}
    return {
        str(status): {"description": doc, "content": content} for status, doc in _ERRORS.items()
    }


def _words(path: str) -> str:
    return "_".join(filter(str.isalnum, path.replace("/", " ").replace("_", " ").split()))


class _Schemas:
    """The schemas of all operations, the named ones in `components`."""

    def __init__(self, operations: Sequence[Operation], model_name: str, strict_fields: bool):
        self.model: Schema = {"enum": [model_name]}
        named: list[Any] = [ErrorAnswer]
        for operation in operations:
            named += [*operation.bodies, *_types(operation.answers), *_types(operation.chunks)]
        _, self.components = msgspec.json.schema_components(named, ref_template=_REF)
        for operation in operations:
            for body in operation.bodies:
                component = self.components[body.__name__]
                properties = component["properties"]
                for name, schema in properties.items():
                    properties[name] = dict(schema.get(EXACT_SCHEMA, schema))
                if "model" in properties:
                    properties["model"] = {"enum": [model_name]}
                _add_fields(properties, operation)
                _allow_null(component)
                component["additionalProperties"] = not strict_fields

    def body(self, operation: Operation) -> Schema:
        refs = [{"$ref": _REF.format(name=body.__name__)} for body in operation.bodies]
        return refs[0] if len(refs) == 1 else {"anyOf": refs}

    def needs_body(self, operation: Operation) -> bool:
        return any(self.components[body.__name__].get("required") for body in operation.bodies)

    def answer(self, operation: Operation) -> Schema:
        content: Schema = {"text/plain": {"schema": {"type": "string"}}}
        if operation.answers is not None:
            (schema,), _ = msgspec.json.schema_components([operation.answers], ref_template=_REF)
            content = {"application/json": {"schema": schema}}
        if operation.chunks is not None:
            (schema,), _ = msgspec.json.schema_components([operation.chunks], ref_template=_REF)
            content["text/event-stream"] = {"x-event-schema": schema}  # of each event's data
        return {"description": "What was asked for.", "content": content}


def _types(answer: Any) -> list[Any]:
    return [] if answer is None else [answer]


def _add_fields(properties: dict[str, Schema], operation: Operation) -> None:
    """The fields that are in no body type: sampling fields, unsupported ones, those set aside."""
    if operation.sampling:
        hints = typing.get_type_hints(SamplingParams)
        for field in dataclasses.fields(SamplingParams):
            if field.name in operation.sampling:
                doc = field.metadata.get("doc", "")
                properties[field.name] = {**schema_of(hints[field.name]), "description": doc}
        for name, values in operation.neutral.items():
            properties.setdefault(name, {"enum": list(values), "description": "Not supported."})
    for name in SET_ASIDE:
        properties.setdefault(name, {"description": "Of no consequence here."})


def _allow_null(component: Schema) -> None:
    """A field that is null counts as absent, wherever absence is allowed."""
    required = component.get("required", ())
    for name, schema in component["properties"].items():
        schema.pop("default", None)
        if name in required or _takes_null(schema):
            continue
        if "enum" in schema:
            schema["enum"].append(None)
        elif set(schema) - {"description"}:
            doc = {"description": schema.pop("description")} if "description" in schema else {}
            alternatives = schema.pop("anyOf", None) or [dict(schema)]
            schema.clear()
            schema.update({"anyOf": [*alternatives, _NULL], **doc})


def _takes_null(schema: Mapping[str, Any]) -> bool:
    return _NULL in schema.get("anyOf", ())


def schema_of(hint: Any) -> Schema:
    """The JSON schema of a type made of JSON's own kinds, lists, tuples, unions and literals."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        found: list[Schema] = []
        for member in typing.get_args(hint):
            schema = schema_of(member)
            if schema not in found:
                found.append(schema)
        return found[0] if len(found) == 1 else {"anyOf": found}
    origin = typing.get_origin(hint) or hint
    if origin is typing.Literal:
        return {"enum": list(typing.get_args(hint))}
    kinds = {int: "integer", float: "number", bool: "boolean", str: "string"}
    if origin in kinds:
        return {"type": kinds[origin]}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        items = [arg for arg in typing.get_args(hint) if arg is not Ellipsis]
        return {"type": "array", "items": schema_of(items[0]) if items else {}}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"}
    return _NULL if origin is types.NoneType else {}
