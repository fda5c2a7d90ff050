"""JSON that matches a schema, as a grammar of llguidance's: its own ``%json``, but for what that rounds,
numbers that no double holds, and for patterns that look around. The way to those is spelt out here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regex import DOTALL, compile

AS_WRITTEN = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""JSON as ``json.dumps`` writes it: what models have read most. One way to write it leaves fewer tokens
to choose. Branches of ``oneOf`` exclude each other where a schema was read."""
_LARGE, _MOST = 1 << 53, 10**400
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_SAID: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("integer", "number"), _BOUNDS),
    "string": ("pattern", "minLength", "maxLength"),
    "array": ("items", "minItems", "maxItems"),
    "object": ("properties", "required", "additionalProperties"),
}
"""Keywords of a type that is spelt out."""
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_WAYS = ("$ref", "anyOf", "oneOf", "allOf")
_ASIDE = ("$defs", "definitions", "$id", "$anchor")
_KEY = r'/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f]|7f))*"/'
_PIECE = compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?<?[=!]|.", DOTALL)
_ANY = "(?s:.*)"
Bound = tuple[int, bool] | None
"""A number, and whether it is itself excluded."""


class SchemaError(ValueError):
    """``path``: from the schema to what is at fault, with a dot before each step."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(reason)
        self.path = path


def json_rule(rule: str, schema: Any, options: Mapping[str, Any] = AS_WRITTEN) -> Iterator[str]:
    """Lines of a grammar in which ``rule`` is JSON that matches a schema. Raises SchemaError."""
    rules = _Rules(rule, schema, options)
    rules.of(schema, "")
    yield from rules.lines


def within(node: Any) -> Iterator[Any]:
    """Yields a value and all in it."""
    yield node
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from within(each)


def kind_of(value: Any) -> str:
    """The narrowest type of a value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "integer" if value == value // 1 else "number"
    names = {str: "string", list: "array", dict: "object", bool: "boolean"}
    return names.get(type(value), "null")


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the only values that match; None where that is not said."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a value may have; empty where that is not said."""
    types = schema.get("type")
    if types is None:
        values = values_of(schema)
        return {"string"} if values and all(isinstance(each, str) for each in values) else set()
    return {types} if isinstance(types, str) else set(types)


def types_within(schema: Mapping[str, Any]) -> set[str]:
    """The same, also where that is said in the branches of ``anyOf`` or ``oneOf``."""
    ways = schema.get("anyOf", schema.get("oneOf", ()))
    found = [types_of(each) if isinstance(each, dict) else set() for each in ways]
    return types_of(schema) or (set[str]().union(*found) if all(found) else set())


def pointed_at(root: Any, reference: str) -> Any:
    """Returns the schema that a ``$ref`` names. Raises SchemaError where it is none of this one."""
    found: Any = root if f"{reference}/".startswith("#/") else None
    try:
        for step in reference.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            found = found[int(step) if isinstance(found, list) else step]
    except (LookupError, ValueError, TypeError) as error:
        raise SchemaError(".$ref", f"names what is not there: {reference[:100]}") from error
    return found


def word(text: str) -> str:
    """Returns a text that is to be written as it is, in a grammar."""
    return json.dumps(text, ensure_ascii=False)


def _quoted(value: Any) -> str:
    """The same of a value, as JSON."""
    return word(json.dumps(value, ensure_ascii=False))


def listed(members: Sequence[tuple[str, bool]], comma: str) -> str:
    """Symbols in their order, each of them required or not."""
    rest, ways = "", ['""']
    for symbol, is_required in reversed(members):
        ways = [f"{symbol} {rest}", *([] if is_required else ways)]
        rest = f"({comma} {symbol}){'' if is_required else '?'} {rest}"
    return " | ".join(ways)


# --- patterns ---


def looks_around(pattern: Any) -> bool:
    return any(each.startswith("(?") for each in _PIECE.findall(str(pattern)))


def found_in(pattern: str, start: str, end: str, path: str = "", begins: bool = False) -> str:
    """Returns a terminal for texts in which a pattern is found, between ``start`` and ``end``, which are
    expressions, too. ``begins``: it is found at the beginning alone. What looks ahead from there is had
    by ``&`` and ``~``. Raises SchemaError where it looks around elsewhere."""
    from llguidance import regex_to_lark  # loaded with the first grammar

    ways = []
    for pieces in _alternatives(pattern):
        first, last = begins or pieces[:1] == ["^"], pieces[-1:] == ["$"]
        pieces = pieces[pieces[:1] == ["^"] : len(pieces) - last]
        looks: dict[str, list[str]] = {"=": [], "!": []}
        while first and pieces and pieces[0].startswith(("(?=", "(?!")):
            look = pieces.pop(0)
            looks[look[2]].append(found_in(look[3:-1], start, end, path, begins=True))
        if looks_around("".join(pieces)):
            reason = (
                "cannot be held to: it may look ahead at its beginning, after '^', and nowhere else"
            )
            raise SchemaError(path, reason)
        body = f"(?:{regex_to_lark(''.join(pieces), 'dw')})"
        way = f"/{start}{'' if first else _ANY}{body}{'' if last else _ANY}{end}/"
        # One complement of all: several exceed the lexer's limits.
        barred = [f"~({' | '.join(looks['!'])})"] if looks["!"] else []
        ways.append(" & ".join([way, *(f"({each})" for each in looks["="]), *barred]))
    return " | ".join(ways)


def _alternatives(pattern: str) -> Iterator[list[str]]:
    """Yields what stands between bars outside of groups, in pieces; a group is one."""
    pieces: list[str] = []
    depth = 0
    for piece in _PIECE.findall(pattern):
        if piece == "|" and not depth:
            yield pieces
            pieces = []
        elif depth:
            pieces[-1] += piece
        else:
            pieces.append(piece)
        depth += piece.startswith("(") - (piece == ")")
    yield pieces


# --- numbers ---


def _magnitudes(form: str, least: Bound, most: Bound) -> str:
    """A terminal for numbers without their signs."""
    parts = [form]
    for bound, is_least in ((least, True), (most, False)):
        if bound is not None:
            digits = str(abs(bound[0]))
            parts.append(f"/({'|'.join(_compared(digits, is_least))})/")
            parts += [rf"~/{digits}(\.0+)?/"] if bound[1] else []
    return f"({' & '.join(parts)})"


def _compared(digits: str, is_least: bool) -> Iterator[str]:
    """Expressions for decimal numbers of at least, or at most, so much."""
    size, more = len(digits), r"(\.[0-9]+)?"
    digits = digits.rstrip("0") if is_least else digits
    yield f"{digits}[0-9]{{{size - len(digits)}}}{more}" if is_least else rf"{digits}(\.0+)?"
    yield f"[0-9]{{{f'{size + 1},' if is_least else f'0,{size - 1}'}}}{more}"
    for at, digit in enumerate(digits):
        if digit != ("9" if is_least else "0"):
            others = f"[{int(digit) + 1}-9]" if is_least else f"[0-{int(digit) - 1}]"
            yield f"{digits[:at]}{others}[0-9]{{{size - at - 1}}}{more}"


class _Rules:
    """The rules of one schema: one for each schema in it, by its text, so that recursion ends."""

    def __init__(self, rule: str, root: Any, options: Mapping[str, Any]) -> None:
        self._rule, self._root, self._options = rule, root, options
        self._comma = word(options.get("item_separator", ","))
        self._colon = word(options.get("key_separator", ":"))
        self._names: dict[str, str] = {}
        self.lines: list[str] = []

    def of(self, node: Any, path: str) -> str:
        """Returns the name of a schema's rule. Raises SchemaError."""
        key = json.dumps(node)
        if key not in self._names:
            # A trial names no rule that ends so.
            self._names[key] = f"{self._rule}_{len(self._names)}_" if self._names else self._rule
            body = self._body(node, path)
            if not body:
                raise SchemaError(path, "matches nothing")
            self.lines.append(f"{self._names[key]}: {body}")
        return self._names[key]

    def _any_of(self, ways: Sequence[Any], path: str) -> str:
        return " | ".join(self.of(each, path) for each in ways)

    def _body(self, node: Any, path: str) -> str:
        if node is False:
            return ""
        node, inner = {} if node is True else node, [x for x in within(node) if isinstance(x, dict)]
        is_whole = node == self._root or not any("$ref" in each for each in inner)
        if is_whole and not any(map(_is_own, inner)):
            return f"%json {json.dumps({**node, 'x-guidance': self._options})}"
        node = {name: node[name] for name in node if name not in _ASIDE}
        types = [node["type"]] if isinstance(node.get("type"), str) else node.get("type", _TYPES)
        name = next((each for each in (*_WAYS, "const", "enum") if each in node), "")
        if not name and len(types) != 1:
            said = {each for names in _SAID.values() for each in names}
            ways = [said.difference(_SAID.get(each, ())) for each in types]
            parts = [{x: node[x] for x in node if x not in others} for others in ways]
            return self._any_of([p | {"type": t} for p, t in zip(parts, types, strict=True)], path)
        known = (name, "required") if name in _WAYS else (name, "type", *_SAID.get(types[0], ()))
        known = (name, "type") if name in ("const", "enum") else known
        unknown = sorted(node.keys() - {*known})
        if unknown or (name == "allOf" and len(node[name]) > 1):
            reason = "is not supported beside integers beyond 2^53 or patterns that look around"
            raise SchemaError(f"{path}.{unknown[0] if unknown else name}", reason)
        if name in _WAYS:
            found = [pointed_at(self._root, node[name])] if name == "$ref" else node[name]
            if required := node.get("required"):
                found = [x | {"required": [*x.get("required", ()), *required]} for x in found]
            return self._any_of(found, f"{path}.{name}")
        if name:
            values = node[name] if name == "enum" else [node[name]]
            kinds = {*types, *(["integer"] if "number" in types else [])}
            return " | ".join(self._value(each) for each in values if kind_of(each) in kinds)
        own = {"object": self._object, "array": self._array, "string": self._string}
        return own.get(types[0], self._number)(node, path)

    def _value(self, value: Any) -> str:
        comma = f" {self._comma} "
        if isinstance(value, list):
            return f'"[" {comma.join(map(self._value, value))} "]"'
        if isinstance(value, dict):
            pairs = (f"{_quoted(name)} {self._colon} {self._value(value[name])}" for name in value)
            return f'"{{" {comma.join(pairs)} "}}"'
        return _quoted(value)

    def _object(self, node: dict[str, Any], path: str) -> str:
        more, required = node.get("additionalProperties", True), node.get("required", [])
        named = dict.fromkeys(required, more) | node.get("properties", {})
        members = []
        for name in dict.fromkeys((*node.get("properties", ()), *required)):
            if named[name] is not False or name in required:
                value = self.of(named[name], f"{path}.properties.{name}")
                members.append((f"{_quoted(name)} {self._colon} {value}", name in required))
        if more is not False:
            taken = f" & ~({' | '.join(map(_quoted, named))})" if named else ""
            key = self._terminal(_KEY + taken)
            item = f"{key} {self._colon} {self.of(more, f'{path}.additionalProperties')}"
            members.append((f"{item} ({self._comma} {item})*", False))
        return f'"{{" ({listed(members, self._comma)}) "}}"'

    def _array(self, node: dict[str, Any], path: str) -> str:
        items = self.of(node.get("items", True), f"{path}.items")
        least, most = node.get("minItems", 0), node.get("maxItems", "")
        if most != "" and most < max(1, least):
            return "" if least else '"[" "]"'
        bounds = f"{max(0, least - 1)},{most and most - 1}"
        more = "" if most == 1 else f"({self._comma} {items}){{{bounds}}}"
        return f'"[" ({items} {more}){"" if least else "?"} "]"'

    def _string(self, node: dict[str, Any], path: str) -> str:
        length = f"{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}"
        held = found_in(node["pattern"], '"', '"', f"{path}.pattern")
        # Without characters that JSON escapes.
        return self._terminal(rf'({held}) & /"[^"\\\x00-\x1F\x7F]{length}"/')

    def _number(self, node: dict[str, Any], path: str) -> str:
        found: list[Bound] = []
        for sign, names in ((1, _BOUNDS[:2]), (-1, _BOUNDS[2:])):
            given = [(node[name], name.startswith("ex")) for name in names if name in node]
            if not all(abs(each) < _MOST and each == int(each) for each, _ in given):
                raise SchemaError(path, "has a bound that is not supported beside one beyond 2^53")
            found.append(
                max(((sign * int(each), is_open) for each, is_open in given), default=None)
            )
        # The upper one has the other sign.
        low, high = found
        form = "/(0|[1-9][0-9]*)/" if node["type"] == "integer" else r"/(0|[1-9][0-9]*)(\.[0-9]+)?/"
        ways = []
        if high is None or high[0] <= 0:
            ways.append(_magnitudes(form, low if low and low[0] >= 0 else None, high))
        if low is None or low[0] < 0:
            ways.append('"-" ' + _magnitudes(form, high if high and high[0] >= 0 else None, low))
        return ways and self._terminal(" | ".join(ways)) or ""

    def _terminal(self, text: str) -> str:
        """Returns the name of a new terminal."""
        name = f"{self._rule}_t{len(self.lines)}".upper()
        self.lines.append(f"{name}: {text}")
        return name


def _is_own(node: dict[str, Any]) -> bool:
    """Whether llguidance by itself cannot hold a text to what a schema says."""
    values = within([node.get("const"), node.get("enum")])
    bounds = [node[name] for name in _BOUNDS if type(node.get(name)) in (int, float)]
    is_large = any(type(each) is int and abs(each) > _LARGE for each in values)
    return (
        is_large or any(abs(x) >= _LARGE for x in bounds) or looks_around(node.get("pattern", ""))
    )
