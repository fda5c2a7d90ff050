"""``[name(key="value", other=1), ...]``, calls as Python writes them: Llama 4 and others that are
shown so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from regex import DOTALL, Pattern, compile, fullmatch

from server.formats.format import (
    SPACE,
    ArgumentsReader,
    CallSyntax,
    Schema,
    Spelling,
    ToolCallFormat,
)
from server.formats.json_rules import json_rule, listed, types_of, values_of, word
from server.formats.tool_calls.arguments import escaped, json_of, parameters_of, takes_any

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


class PythonArguments(ArgumentsReader):
    """Reads keyword arguments up to and with the bracket that closes the call."""

    def __init__(self, schema: Schema) -> None:  # noqa: ARG002
        super().__init__(self._between)
        self._num_arguments = 0
        self._open: list[str] = []
        self._quote = ""
        # What stands between values only if another one comes.
        self._comma = ""

    def _between(self, final: bool) -> bool:
        _, found = self._until(_KEY, final)
        if found is None:
            return False
        if found["close"]:
            return self._close()
        self._settled.append(f'{", " if self._num_arguments else "{"}"{found["key"]}": ')
        self._num_arguments += 1
        self._state = self._value
        return True

    def _close(self) -> bool:
        self._settled.append("}" if self._num_arguments else "{}")
        self.ended = True
        return False

    def _value(self, final: bool) -> bool:
        found = _PIECE.match(self._buffer)
        found = found or (_LAST_WORD.match(self._buffer) if final else None)
        if found is None:
            return False
        self._take(found.end())
        groups = found.groupdict()
        if groups["word"]:
            self._write(json_of(groups["word"], set()))
        mark = groups.get("mark")
        return self._mark(mark) if mark else True

    def _mark(self, mark: str) -> bool:
        if mark in "\"'":
            self._write('"')
            self._quote, self._state = mark, self._text
        elif mark in _CLOSING:
            self._write("[" if mark == "(" else mark)
            self._open.append(_CLOSING[mark])
        elif mark == ":":
            self._settled.append(": ")
        elif self._open:
            self._comma = ", " if mark == "," else ""
            if mark != ",":
                self._settled.append(self._open.pop())
        else:
            self._state = self._between
            return self._close() if mark == ")" else True
        return True

    def _write(self, text: str) -> None:
        self._settled.append(self._comma + text)
        self._comma = ""

    def _text(self, final: bool) -> bool:
        if not self._buffer:
            return False
        first = self._buffer[0]
        if first == "\\":
            return self._escape(final)
        if first == self._quote:
            self._take(1)
            self._settled.append('"')
            self._state = self._value
            return True
        found = _TEXT.match(self._buffer)
        self._settled.append(escaped(self._take(found.end() if found else 1)))
        return True

    def _escape(self, final: bool) -> bool:
        found = _ESCAPE.match(self._buffer, partial=not final)
        if found and found.partial:
            return False
        self._take(found.end() if found else 1)
        self._settled.append("\\\\" if found is None else _meant(found[0]))
        return True


def _meant(escape: str) -> str:
    """Returns what stands in JSON for an escape of Python's."""
    kind, digits = escape[1], escape[2:]
    if kind == "u":
        # As JSON has it, which may be half of a character.
        return escape
    if digits:
        code = int(digits, 16)
        is_whole = code < 0xD800 or 0xDFFF < code < 0x110000
        return escaped(chr(code)) if is_whole else escaped(escape)
    return escaped(_MEANT.get(kind, escape))


def _rules(rule: str, schema: Schema) -> Iterator[str]:
    """Required arguments first, then those that may be left out, each in the order of the schema."""
    members: list[tuple[str, bool]] = []
    for number, each in enumerate(parameters_of(schema)):
        if not fullmatch(r"[A-Za-z_]\w{0,127}", each.name):
            raise ValueError(f"the name {each.name!r} cannot be written in this model's format")
        part = f"{rule}_{number}"
        members.append((part, each.is_required))
        yield f"{part}: {word(each.name + '=')} {part}_value"
        yield from _value_rules(f"{part}_value", each.schema)
    if takes_any(schema):
        yield f'{rule}: ({rule}_any (", " {rule}_any)*)?'
        yield f'{rule}_any: /[A-Za-z_][A-Za-z_0-9]{{0,63}}/ "=" {rule}_any_value'
        yield from json_rule(f"{rule}_any_value", {})
        return
    members.sort(key=lambda each: not each[1])
    yield f"{rule}: {listed(members, word(', '))}"


def _value_rules(rule: str, schema: dict[str, Any]) -> Iterator[str]:
    types = types_of(schema)
    if (values := values_of(schema)) is not None:
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
