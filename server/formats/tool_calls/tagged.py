"""Arguments that are written one by one between tags, texts as they are: for what looks like XML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regex import Pattern, compile, escape, fullmatch

from server.formats.format import ArgumentsReader, Schema
from server.formats.json_rules import (
    found_in,
    json_rule,
    types_of,
    types_within,
    values_of,
    word,
)
from server.formats.tool_calls.arguments import (
    ANNOTATIONS,
    Parameter,
    escaped,
    in_regex,
    json_of,
    parameters_of,
    schema_of,
    takes_any,
)

_SAID_OF_TEXTS = {
    "type",
    "enum",
    "const",
    "minLength",
    "maxLength",
    "pattern",
    "$defs",
    "definitions",
}
_NAME = r"[^<>\s]{1,128}"


@dataclass(frozen=True)
class Tags:
    """``begin``: a regular expression for what comes before a value, with the argument's ``name``;
    ``end``: the tag after it, ``close`` the one after all. ``on_lines``: line breaks next to a value are
    not its own.

    ``before``, ``after``: how they are written, where ``NAME`` stands for the argument's.
    """

    begin: str
    end: str
    close: str
    on_lines: bool
    before: str
    after: str

    def reader(self, schema: Schema) -> TaggedArguments:
        return TaggedArguments(self, schema)

    def rules(self, rule: str, schema: Schema) -> Iterator[str]:
        """Lines of a grammar: the arguments in the order of the schema, which is ``rule``'s.

        Raises ValueError where they cannot be held to it.
        """
        names = []
        for number, each in enumerate(parameters_of(schema)):
            names.append(f"{rule}_{number}" + ("" if each.is_required else "?"))
            yield from self._rules_of(f"{rule}_{number}", each)
        if takes_any(schema):
            names.append(f"{rule}_any*")
            begin, end = (word(each) for each in self.before.split("NAME"))
            yield f"{rule}_any: {begin} /{_NAME}/ {end} {rule}_any_text"
            yield from self._text_rules(f"{rule}_any_text", {})
        yield f"{rule}: {' '.join(names)}" if names else f'{rule}: ""'

    def _rules_of(self, rule: str, each: Parameter) -> Iterator[str]:
        if not fullmatch(_NAME, each.name):
            raise ValueError(f"the name {each.name!r} cannot be written in this model's format")
        yield f"{rule}: {word(self.before.replace('NAME', each.name))} {rule}_value"
        if types_of(each.schema) == {"string"}:
            yield from self._text_rules(f"{rule}_value", each.schema)
            return
        yield f"{rule}_value: {rule}_json {word(self.after)}"
        yield from json_rule(f"{rule}_json", each.schema)

    def _text_rules(self, rule: str, schema: dict[str, Any]) -> Iterator[str]:
        """A text up to and with the tag after it."""
        if unknown := sorted(schema.keys() - _SAID_OF_TEXTS - ANNOTATIONS):
            raise ValueError(f"{unknown[0]!r} of a text cannot be held to in this model's format")
        if (values := values_of(schema)) is not None:
            yield f"{rule}: ({' | '.join(map(word, values))}) {word(self.after)}"
            return
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        # Up to the first tag: no text can hold one.
        terminal, after = rule.upper(), in_regex(self.after)
        held = f" & ({found_in(schema['pattern'], '', after)})" if "pattern" in schema else ""
        yield f"{rule}[lazy]: {terminal}"
        yield f"{terminal}: /(?s:.{{{least},{most}}}){after}/{held}"


class TaggedArguments(ArgumentsReader):
    """Reads one call's. Texts go out as they come, other values when they are there."""

    def __init__(self, tags: Tags, schema: Schema) -> None:
        super().__init__(self._between)
        self._schema = schema
        self._on_lines = tags.on_lines
        self._tag: Pattern[str] = compile(rf"{tags.begin}|(?P<close>{escape(tags.close)})")
        self._end: Pattern[str] = compile((r"\n?" if tags.on_lines else "") + escape(tags.end))
        self._types: set[str] = set()
        self._is_text = False
        self._held: list[str] = []
        self._num_arguments = 0

    def _between(self, final: bool) -> bool:
        _, found = self._until(self._tag, final)  # what is no tag is nobody's
        if found is None:
            return False
        if found["close"]:
            self._settled.append("}" if self._num_arguments else "{}")
            self.ended = True
            return False
        name = found["name"]
        parameter = schema_of(self._schema, name)
        self._is_text = types_of(parameter) == {"string"}
        self._types = types_within(parameter)
        begin = ", " if self._num_arguments else "{"
        self._settled.append(f'{begin}"{escaped(name)}": ' + ('"' if self._is_text else ""))
        self._num_arguments += 1
        self._state = self._line_break if self._on_lines else self._value
        return True

    def _line_break(self, final: bool) -> bool:  # noqa: ARG002
        if not self._buffer:
            return False
        self._take(1 if self._buffer[0] == "\n" else 0)
        self._state = self._value
        return True

    def _value(self, final: bool) -> bool:
        text, found = self._until(self._end, final)
        if self._is_text:
            self._settled.append(escaped(text))
        else:
            self._held.append(text)
        if found is None:
            if final:
                # Cut off in the midst: as it stands.
                self._settled += self._held
            return False
        self._settled.append('"' if self._is_text else json_of("".join(self._held), self._types))
        self._held.clear()
        self._state = self._between
        return True
