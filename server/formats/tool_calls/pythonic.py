"""``[name(key="value", other=1), ...]``, calls as Python writes them: Llama 4 and others that are
shown so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from regex import DOTALL, Pattern, compile, fullmatch

from server.formats.tool_calls.arguments import (
    Schema,
    escaped,
    json_of,
    json_rule,
    parameters_of,
    takes_any,
    types_of,
    word,
)
from server.formats.tool_calls.format import SPACE, CallSyntax, Spelling, ToolCallFormat

_KEY: Pattern[str] = compile(rf"(?P<key>[A-Za-z_]\w{{0,127}}){SPACE}=|(?P<close>\))")
# A word ends where something else begins.
_PIECE: Pattern[str] = compile(
    r"""\s+|(?P<mark>["'\[\]{}(),:])|(?P<word>[^\s"'\[\]{}(),:]+)(?=[\s"'\[\]{}(),:])"""
)
_LAST_WORD: Pattern[str] = compile(r"""(?P<word>[^\s"'\[\]{}(),:]+)""")
_TEXT: Pattern[str] = compile(r"[^\\\"']+")
_ESCAPE: Pattern[str] = compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[^xuU])", DOTALL
)
_MEANT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "/": "/"}
_MEANT |= {"a": "\a", "v": "\v", "0": "\0", "\\": "\\", "'": "'", '"': '"'}
_CLOSING = {"[": "]", "(": "]", "{": "}"}
_AS_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}


class PythonArguments:
    """Reads keyword arguments up to and with the bracket that closes the call."""

    def __init__(self, schema: Schema) -> None:  # noqa: ARG002
        self._json: list[str] = []
        self._num_arguments = 0
        self._step = self._between
        self._open: list[str] = []
        self._quote = ""
        # What stands between values only if another one comes.
        self._comma = ""
        self.ended = False

    def feed(self, text: str, final: bool) -> tuple[int, str]:
        at = 0
        while not self.ended and at < len(text):
            num_chars = self._step(text[at:], final)
            if not num_chars:
                break
            at += num_chars
        settled = "".join(self._json)
        self._json.clear()
        return at, settled

    # Each returns how many characters it has taken, 0 where it has to wait for more.

    def _between(self, text: str, final: bool) -> int:
        found = _KEY.search(text, partial=not final)
        if found is None:
            return len(text)
        if found.partial:
            return int(found.start())
        if found["close"]:
            self._close()
        else:
            self._json.append(f'{", " if self._num_arguments else "{"}"{found["key"]}": ')
            self._num_arguments += 1
            self._step = self._value
        return int(found.end())

    def _close(self) -> None:
        self._json.append("}" if self._num_arguments else "{}")
        self.ended = True

    def _value(self, text: str, final: bool) -> int:
        found = _PIECE.match(text) or (_LAST_WORD.match(text) if final else None)
        if found is None:
            return 0
        groups = found.groupdict()
        if groups["word"]:
            self._write(json_of(groups["word"], set()))
        elif mark := groups.get("mark"):
            self._mark(mark)
        return int(found.end())

    def _mark(self, mark: str) -> None:
        if mark in "\"'":
            self._write('"')
            self._quote, self._step = mark, self._text
        elif mark in _CLOSING:
            self._write("[" if mark == "(" else mark)
            self._open.append(_CLOSING[mark])
        elif mark == ":":
            self._json.append(": ")
        elif self._open and mark == ",":
            self._comma = ", "
        elif self._open:
            self._comma = ""
            self._json.append(self._open.pop())
        else:
            self._step = self._between
            if mark == ")":
                self._close()

    def _write(self, text: str) -> None:
        self._json.append(self._comma + text)
        self._comma = ""

    def _text(self, text: str, final: bool) -> int:
        if text[0] == self._quote:
            self._json.append('"')
            self._step = self._value
            return 1
        if text[0] == "\\":
            return self._escape(text, final)
        found = _TEXT.match(text)
        plain = found[0] if found else text[0]
        self._json.append(escaped(plain))
        return len(plain)

    def _escape(self, text: str, final: bool) -> int:
        found = _ESCAPE.match(text, partial=not final)
        if found is None:
            self._json.append("\\\\")
            return 1
        if found.partial:
            return 0
        kind, digits = found[0][1], found[0][2:]
        if kind == "u":
            # As JSON has it, which may be half of a character.
            self._json.append(found[0])
        elif digits:
            code = int(digits, 16)
            self._json.append(escaped(chr(code)) if code < 0x110000 else escaped(found[0]))
        else:
            self._json.append(escaped(_MEANT.get(kind, found[0])))
        return int(found.end())


def _rules(rule: str, schema: Schema) -> Iterator[str]:
    """Required arguments first, then those that may be left out, each in the order of the schema."""
    required: list[str] = []
    optional: list[str] = []
    for number, each in enumerate(parameters_of(schema)):
        if not fullmatch(r"[A-Za-z_]\w{0,127}", each.name):
            raise ValueError(f"the name {each.name!r} cannot be written in this model's format")
        part = f"{rule}_{number}"
        (required if each.is_required else optional).append(part)
        yield f"{part}: {word(each.name + '=')} {part}_value"
        yield from _value_rules(f"{part}_value", each.schema)
    if takes_any(schema):
        yield f'{rule}: ({rule}_any (", " {rule}_any)*)?'
        yield f'{rule}_any: /[A-Za-z_][A-Za-z_0-9]{{0,63}}/ "=" {rule}_any_value'
        yield from json_rule(f"{rule}_any_value", {})
        return
    first = ' ", " '.join(required)
    ways = [first] if first else ['""', *optional]
    rest = [optional[at + 1 :] for at in range(len(optional))]
    tails = [optional] if first else [[], *rest]
    yield f"{rule}: " + " | ".join(
        " ".join([way, *(f'(", " {each})?' for each in tail)])
        for way, tail in zip(ways, tails, strict=True)
    )


def _value_rules(rule: str, schema: dict[str, Any]) -> Iterator[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    types = types_of(schema)
    if values is not None:
        yield f"{rule}: {' | '.join(word(_in_python(each)) for each in values)}"
    elif len(types) == 1 and (own := _AS_PYTHON.get(next(iter(types)))):
        yield f"{rule}: {own}"
    else:
        yield from json_rule(rule, schema)


def _in_python(value: object) -> str:
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value)


_SPELLING = Spelling(begin="[", before="NAME(", after=")", between=", ", end="]", arguments=_rules)

FORMAT = ToolCallFormat(
    name="pythonic",
    markers=("<|python_start|>",),
    opener=compile(rf"<\|python_start\|>{SPACE}\["),
    syntaxes=(
        CallSyntax(
            rf"(?:{SPACE}\[)?{SPACE}(?P<name>[\w.-]{{1,128}})\((?P<arguments>)"
            rf"(?={SPACE}(?:\)|[A-Za-z_]\w{{0,127}}{SPACE}=))",
            following=rf"{SPACE}(?:(?P<more>,)|\])",
            reader=PythonArguments,
        ),
    ),
    bare=compile(rf"{SPACE}(?=\[)"),
    in_text=False,
    never_first=r"\s*\[\s*[A-Za-z_0-9.-]+\(",
    spelling=lambda _: _SPELLING,
    # The templates show how.
    writes=lambda template: "func_name1(" in template,
)
