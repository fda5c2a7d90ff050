"""Random constraints of outputs, good, empty, endless, huge and broken, as fields of a request's body."""

from __future__ import annotations

import json
import random
from typing import Any

_ATOMS = (
    "a",
    "b",
    "[a-c]",
    "[^a]",
    ".",
    r"\d",
    r"\s",
    r"\w",
    r"[^\s\S]",
    "ab",
    "é",
    "(?i:q)",
    "",
    r"\n",
)
_TERMINALS = (
    '"a"',
    '"b "',
    '"{"',
    '""',
    "/[a-z]+/",
    r"/[^\s\S]/",
    "/x{1,40}/",
    "/(.*a){9}/",
    "<[3-5]>",
    "<x>",
)
_KEYWORDS = ("pattern", "format", "not", "multipleOf", "minLength", "uniqueItems", "if", "const")


def random_constraint(seed: int) -> dict[str, Any]:
    """Returns ``structured_outputs`` or ``response_format``."""
    rng = random.Random(seed)
    kind = rng.randrange(4)
    if kind == 0:
        return {"structured_outputs": {"regex": _regex(rng, rng.randint(1, 5)) or "a"}}
    if kind == 1:
        return {"structured_outputs": {"grammar": _rules(rng, "start: ", ": ")}}
    if kind == 2:
        return {"structured_outputs": {"grammar": _rules(rng, "root ::= ", " ::= ")}}
    schema = _schema(rng, rng.randint(0, 4))
    if rng.random() < 0.5:
        return {"structured_outputs": {"json": schema}}
    form = {"name": "random", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def _count(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, 3, 7, 40, rng.randint(0, 900), rng.randint(0, 200_000)])


def _range(rng: random.Random) -> str:
    low, high = _count(rng), _count(rng)
    if rng.random() < 0.9:
        low, high = sorted((low, high))
    return f"{{{rng.choice([str(low), f'{low},', f'{low},{high}'])}}}"


def _regex(rng: random.Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(_ATOMS)
    kind = rng.randrange(5)
    if kind == 0:
        return "".join(_regex(rng, depth - 1) for _ in range(rng.randint(1, 4)))
    if kind == 1:
        return "(" + "|".join(_regex(rng, depth - 1) for _ in range(rng.randint(1, 4))) + ")"
    if kind == 2:
        return f"({_regex(rng, depth - 1)}){rng.choice('*+?')}"
    if kind == 3:
        return f"({_regex(rng, depth - 1)}){_range(rng)}"
    return rng.choice(["^", "$", r"\b", "(", "[", "(?=a)", ""]) + _regex(rng, depth - 1)


def _rules(rng: random.Random, start: str, arrow: str) -> str:
    """Some rules that lead to each other, and chains of many."""
    names = [f"r{index}" for index in range(rng.choice([0, 1, 3, 6, 12, 40]))]
    lines = [start + _either(rng, names, 3)]
    lines += [f"{name}{arrow}{_either(rng, names, rng.randint(0, 3))}" for name in names]
    if rng.random() < 0.05:
        length = rng.choice([50, 400, 900])
        lines += [
            f"c{index}{arrow}c{index + 1} " + rng.choice(["", "c0"]) for index in range(length)
        ]
        lines.append(f'c{length}{arrow}"c"')
        lines[0] += " | c0"
    return "\n".join(lines)


def _either(rng: random.Random, names: list[str], depth: int) -> str:
    ways = []
    for _ in range(rng.choice([1, 1, 2, 3, 9])):
        ways.append(" ".join(_item(rng, names, depth) for _ in range(rng.choice([1, 1, 2, 3, 5]))))
    return " | ".join(ways)


def _item(rng: random.Random, names: list[str], depth: int) -> str:
    if depth > 0 and rng.random() < 0.3:
        end = rng.choice(["", "?", "*", "+", _range(rng)])
        return f"({_either(rng, names, depth - 1)}){end}"
    if names and rng.random() < 0.5:
        return rng.choice(names) + rng.choice(["", "", "?", "*", _range(rng)])
    return rng.choice(_TERMINALS)


def _schema(rng: random.Random, depth: int) -> Any:
    schema = _own_schema(rng, depth)
    if rng.random() < 0.1:
        schema["$defs"] = {"d": _own_schema(rng, 1)}
    if rng.random() < 0.05:
        schema[rng.choice(_KEYWORDS)] = rng.choice([1, -2, "a", "^a+$", {}, [], True, 10_007])
    return schema


def _own_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_text, _number, _words, _reference]
    if depth > 0:
        kinds += [_object, _array, _either_schema] * 2
    return rng.choice(kinds)(rng, depth - 1)


def _text(rng: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for name in ("minLength", "maxLength"):
        if rng.random() < 0.3:
            made[name] = _count(rng)
    if rng.random() < 0.3:
        made["pattern"] = _regex(rng, max(0, depth))
    if rng.random() < 0.1:
        made["format"] = rng.choice(["date", "email", "uuid", "ipv6", "nonsense"])
    return made


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    made: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    for name in ("minimum", "maximum", "exclusiveMinimum", "multipleOf"):
        if rng.random() < 0.3:
            made[name] = rng.choice([_count(rng), -_count(rng), rng.random(), 1e300])
    return made


def _words(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    words = ["red", 7, None, True, "a b", {"a": [1]}, 1.5, ""]
    return {"enum": rng.sample(words, rng.randint(0, 5))}


def _reference(rng: random.Random, depth: int) -> dict[str, Any]:
    del depth
    return {"$ref": rng.choice(["#", "#", "#/$defs/d", "#/nowhere", "http://elsewhere/"])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    num = rng.choice([0, 1, 2, 4, 4, 40, 300 if depth < 2 else 4])
    keys = [f"k{index}" for index in range(num)]
    made: dict[str, Any] = {
        "type": "object",
        "properties": {key: _own_schema(rng, depth if num < 9 else 0) for key in keys},
        "required": [key for key in keys if rng.random() < 0.5],
    }
    if rng.random() < 0.6:
        made["additionalProperties"] = rng.choice([False, False, {"type": "string"}])
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "items": _own_schema(rng, depth)}
    for name in ("minItems", "maxItems"):
        if rng.random() < 0.3:
            made[name] = _count(rng)
    if rng.random() < 0.2:
        made["prefixItems"] = [rng.choice([False, _own_schema(rng, 0)])]
    return made


def _either_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    name = rng.choice(["anyOf", "allOf", "oneOf"])
    return {name: [_own_schema(rng, depth) for _ in range(rng.randint(0, 3))]}


def text_of(constraint: dict[str, Any]) -> str:
    return json.dumps(constraint)
