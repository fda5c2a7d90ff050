"""JSON schemas as clients write them, made schemas that llguidance takes: keywords are enforced, refused,
or annotations. ``$schema`` makes no difference: they mean what draft 2020-12 says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from server.formats.json_rules import (
    SchemaError,
    kind_of,
    looks_around,
    pointed_at,
    types_of,
    values_of,
)

_KNOWN = (
    " $anchor $defs $dynamicRef $id $recursiveRef $ref additionalItems additionalProperties allOf anyOf"
    " const contains definitions dependencies dependentRequired dependentSchemas else enum"
    " exclusiveMaximum exclusiveMinimum format if items maxContains maxItems maxLength maxProperties"
    " maximum minContains minItems minLength minProperties minimum multipleOf not oneOf pattern"
    " patternProperties prefixItems properties propertyNames required then type unevaluatedItems"
    " unevaluatedProperties uniqueItems "
)
_ANNOTATIONS = (
    " $comment $schema contentEncoding contentMediaType contentSchema default deprecated description"
    " discriminator example examples externalDocs id readOnly title writeOnly xml "
)
_FORMATS = " date-time time date duration email hostname ipv4 ipv6 uuid uri "
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VOID = {"uniqueItems": False, "propertyNames": {"type": "string"}, "unevaluatedProperties": True}
"""Keywords that are not supported, unless their values say nothing."""
_UNREACHED = 1 << 31
"""So many characters, items or properties no text has."""
_MAX_PARTS, _MAX_PART_CHARS, _MAX_STEPS, _DEPTH = 16, 2048, 400_000, 8


class SchemaReader:
    """A schema, read. ``ignored``: paths of what is not enforced. ``parts``: by their paths, outer
    ones first, small schemas in it that may be at fault where it cannot be used."""

    def __init__(self, root: Any) -> None:
        """Raises SchemaError."""
        self._root, self._num_steps = root, 0
        self.ignored: list[str] = []
        self.parts: list[tuple[str, Any]] = []
        self.schema = self._read(root, "")

    def _read(self, node: Any, path: str) -> Any:
        if isinstance(node, list):
            return [self._read(each, f"{path}.{at}") for at, each in enumerate(node)]
        if not isinstance(node, dict):
            return node
        made: dict[str, Any] = {}
        place_of_part = len(self.parts)
        for name, value in node.items():
            place = f"{path}.{name}"
            if name in ("const", "enum"):
                made[name] = value
            elif name in _MAPS and isinstance(value, dict):
                made[name] = {key: self._read(x, f"{place}.{key}") for key, x in value.items()}
            elif f" {name} " not in _KNOWN or (name == "format" and not _is_enforced(node)):
                is_hint = f" {name} " in _ANNOTATIONS or name.startswith("x-")
                self.ignored += [] if is_hint else [place]
            elif name[3:] in ("Length", "Items", "Properties") and isinstance(value, int | float):
                made |= _count(name, value, place)
                if name == "minProperties" and value > max(1, _num_required(node)):
                    self.ignored += [place] if _has_free_names(node) else []
            elif _VOID.get(name) != value:
                made[name] = self._read(value, place)
        if isinstance(made.get("oneOf"), list):
            self._check_branches(made, node.get("discriminator"), path)
        if len(self.parts) < _MAX_PARTS and made.keys() - {"type", "items", *_MAPS}:
            text = json.dumps(made)
            if len(text) <= _MAX_PART_CHARS and '"$ref"' not in text:
                self.parts.insert(place_of_part, (path, made))
        return made

    def _check_branches(self, made: dict[str, Any], named: Any, path: str) -> None:
        if isinstance(named, dict) and "propertyName" in named:
            # Clients need what they tell branches apart by, whether or not it has a default.
            made["required"] = [*made.get("required", []), named["propertyName"]]
        beside = {"required": made.get("required", [])}
        for at, one in enumerate(made["oneOf"]):
            for before, other in enumerate(made["oneOf"][:at]):
                if not self._exclude([one, beside], [other], _DEPTH):
                    reason = (
                        f"cannot be held to: branches {before} and {at} may both match. Give each a"
                    )
                    reason += " required property with a constant of its own, or use anyOf"
                    raise SchemaError(f"{path}.oneOf", reason)

    def _exclude(self, one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
        """Whether no value matches all of both; False also where that does not show."""
        left, right = self._all_of(one, depth), self._all_of(other, depth)
        if depth == 0 or self._num_steps > _MAX_STEPS:
            return False
        if False in left or False in right:
            return True
        for these, those in ((left, right), (right, left)):
            for ways in (x[k] for x in these for k in ("anyOf", "oneOf") if k in x):
                if all(self._exclude([each], those, depth - 1) for each in ways):
                    return True
        kinds = _kinds(left) & _kinds(right)
        if kinds != {"object"}:
            values = [
                v for x in (left, right) if (v := next(filter(None, map(values_of, x)), None))
            ]
            self._num_steps += math.prod(map(len, values)) // 100
            return not kinds or (len(values) == 2 and not any(x in values[1] for x in values[0]))
        names = {name for each in left + right for name in each.get("required", ())}
        return any(
            self._exclude(_property(left, each), _property(right, each), depth - 1)
            for each in names
        )

    def _all_of(self, nodes: Sequence[Any], depth: int) -> list[Any]:
        """The schemas that have to match together; False where one of them matches nothing."""
        found: list[Any] = []
        for node in nodes:
            self._num_steps += 1
            found += [node] if isinstance(node, dict) else [False] if node is False else []
            if isinstance(node, dict) and depth > 0 and self._num_steps <= _MAX_STEPS:
                target = [pointed_at(self._root, node["$ref"])] if "$ref" in node else []
                found += self._all_of([*node.get("allOf", ()), *target], depth - 1)
        return found


def _is_enforced(node: dict[str, Any]) -> bool:
    """Whether texts are held to a schema's format."""
    of_texts = "string" in (types_of(node) or {"string"})
    is_known = f" {node['format']} " in _FORMATS
    return is_known and of_texts and not looks_around(node.get("pattern", ""))


def _count(name: str, value: float, place: str) -> dict[str, int]:
    """Nothing where no text has so many. Raises SchemaError where it would have to."""
    if value < 0 or value != value // 1 or (value >= _UNREACHED and name.startswith("min")):
        raise SchemaError(place, "must be a whole number of at least 0 that a text can reach")
    return {name: int(value)} if value < _UNREACHED else {}


def _num_required(node: dict[str, Any]) -> int:
    required = node.get("required")
    return len(required) if isinstance(required, list) else 0


def _has_free_names(node: dict[str, Any]) -> bool:
    """Whether a text may name one of an object's properties twice, which then count as one."""
    return bool(node.get("patternProperties") or node.get("additionalProperties", True))


def _kinds(nodes: Sequence[dict[str, Any]]) -> set[str]:
    """The narrowest types of what matches all."""
    found = {"null", "boolean", "integer", "number", "string", "array", "object"}
    for node in nodes:
        types = types_of({name: node[name] for name in node if name == "type"})
        found &= (types | ({"integer"} if "number" in types else set())) or found
        values = values_of(node)
        found &= found if values is None else {kind_of(each) for each in values}
    return found


def _property(nodes: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """The schemas that a property has to match."""
    return [
        node.get("properties", {}).get(name, node.get("additionalProperties", True))
        for node in nodes
        if not node.get("patternProperties")
    ]
