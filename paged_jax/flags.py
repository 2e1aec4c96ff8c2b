"""Command-line flags made from a configuration's fields, and the configuration's values back."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["add_flags", "chosen"]


def add_flags(
    parser: argparse.ArgumentParser,
    config: type,
    *,
    group: str = "Options",
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Give the parser a flag for every field of the dataclass `config`.

    A field's metadata may hold `doc`, `choices` and a `group` for the help, which else is `group`;
    `max_num_seqs` becomes `--max-num-seqs`. What is not given stays out of the namespace; the help
    shows the dataclass's defaults, or those of `defaults`, which the caller then applies.
    """
    types_of = typing.get_type_hints(config)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        title = field.metadata.get("group", group)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(
            "--" + field.name.replace("_", "-"),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help(field, defaults.get(field.name, field.default)),
            **_reading(types_of[field.name], field),
        )


def chosen(arguments: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of `config` that were given on the command line, as keywords for it."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _help(field: dataclasses.Field, default: Any) -> str:
    # argparse takes % for its own
    doc = str(field.metadata.get("doc", "")).replace("%", "%%")
    if default is True:
        return f"{doc} (default: on)"
    if default in (None, False, (), dataclasses.MISSING) or "default:" in doc:
        return doc
    return f"{doc} (default: {default})"


def _reading(annotation: Any, field: dataclasses.Field) -> dict[str, Any]:
    """How argparse reads a value of this type: the keywords for `add_argument`."""
    kinds = _kinds(annotation)
    kind: type
    if "choices" in field.metadata:
        return {"choices": [c for c in field.metadata["choices"] if c is not None]}
    if kinds == {bool}:
        return {"action": argparse.BooleanOptionalAction}
    for several, kind in ((tuple[str, ...], str), (tuple[int, ...], int)):
        if several in kinds:
            return {"action": "append", "type": kind, "metavar": _metavar(kind)}
    literal = next((kind for kind in kinds if typing.get_origin(kind) is typing.Literal), None)
    if literal is not None:
        return {"choices": typing.get_args(literal)}
    for kind in (float, int, str):
        if kind in kinds:
            return {"type": kind, "metavar": _metavar(kind)}
    raise TypeError(f"no flag can be made for {field.name}: {annotation}")


def _kinds(annotation: Any) -> set[Any]:
    """The members of a union without None, or the type itself."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return {kind for kind in typing.get_args(annotation) if kind is not types.NoneType}
    return {annotation}


def _metavar(kind: type) -> str:
    return {int: "N", float: "X", str: "TEXT"}[kind]
