"""How the arguments of a call are read from its text, and what that text may be: both by their schema."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from regex import escape

from server.formats.format import Schema

_SAID_OF_OBJECTS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$defs",
    "definitions",
}
ANNOTATIONS = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}


class Parameter(NamedTuple):
    """One of a function's, with a schema of its own."""

    name: str
    schema: dict[str, Any]
    is_required: bool


def parameters_of(schema: Schema) -> list[Parameter]:
    """Those that the schema of an object names, in its order. None where any may be given.

    Raises ValueError where it says more than which there are.
    """
    if unknown := sorted(schema.keys() - _SAID_OF_OBJECTS - ANNOTATIONS):
        raise ValueError(
            f"{unknown[0]!r} of all arguments cannot be held to in this model's format"
        )
    properties, required = schema.get("properties", {}), schema.get("required", [])
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    if False in properties.values():
        raise ValueError("a parameter whose schema is false cannot be given")
    found = []
    for name in dict.fromkeys((*properties, *required)):
        own = properties.get(name, True)
        parameter = {**({} if own is True else own), **shared}
        found.append(Parameter(name, parameter, name in required))
    return found


def takes_any(schema: Schema) -> bool:
    """Returns whether the schema names no parameter and forbids none."""
    return not parameters_of(schema) and schema.get("additionalProperties", True) is not False


def schema_of(schema: Schema, name: str) -> Schema:
    """A parameter's; empty where nothing is said of it."""
    found = schema.get("properties", {}).get(name)
    return found if isinstance(found, dict) else {}


_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_NAMES = {
    str: {"string"},
    bool: {"boolean"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
    int: {"integer", "number"},
    float: {"number"},
}


def json_of(text: str, types: set[str]) -> str:
    """The JSON of a value that was written as JSON, as Python or as a bare text. ``types``: those that it
    may have; empty: any."""
    written = text.strip()
    written = _CONSTANTS.get(written, written)
    try:
        value = json.loads(written, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_text = "string" in types and types.isdisjoint(_NAMES[type(value)])
    return json.dumps(text, ensure_ascii=False) if is_text else written


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def escaped(text: str) -> str:
    """As it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def in_regex(text: str) -> str:
    """Returns a text that is to be matched as it is, in a grammar's regular expression."""
    return str(escape(text)).replace("/", "\\/").replace("\\\n", "\\n")
