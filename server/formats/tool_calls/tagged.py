"""Arguments that are written one by one between tags, texts as they are: for what looks like XML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from regex import Pattern, compile, escape, fullmatch

from server.formats.tool_calls.arguments import (
    ANNOTATIONS,
    Parameter,
    Schema,
    escaped,
    in_regex,
    json_of,
    json_rule,
    parameters_of,
    schema_of,
    takes_any,
    types_of,
    word,
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
        if "enum" in schema or "const" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            yield f"{rule}: ({' | '.join(map(word, values))}) {word(self.after)}"
            return
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        # Up to the first tag: no text can hold one.
        terminal, after = rule.upper(), in_regex(self.after)
        held = f" & /{_unanchored(schema['pattern'])}{after}/" if "pattern" in schema else ""
        yield f"{rule}[lazy]: {terminal}"
        yield f"{terminal}: /(?s:.{{{least},{most}}}){after}/{held}"


class TaggedArguments:
    """Reads one call's. Texts go out as they come, other values when they are there."""

    def __init__(self, tags: Tags, schema: Schema) -> None:
        self._schema = schema
        self._on_lines = tags.on_lines
        self._tag: Pattern[str] = compile(rf"{tags.begin}|(?P<close>{escape(tags.close)})")
        self._end: Pattern[str] = compile((r"\n?" if tags.on_lines else "") + escape(tags.end))
        self._at_start = self._in_value = False
        self._types: set[str] = set()
        self._held: list[str] = []
        self._json: list[str] = []
        self._num_arguments = 0
        self.ended = False

    def feed(self, text: str, final: bool) -> tuple[int, str]:
        at = 0
        while not self.ended:
            step = self._value if self._in_value else self._between
            num_chars = step(text[at:], final)
            at += abs(num_chars)
            if num_chars <= 0:
                break
        settled = "".join(self._json)
        self._json.clear()
        return at, settled

    # Each returns how many characters it has taken, less than 1 where it cannot go on.

    def _between(self, text: str, final: bool) -> int:
        found = self._tag.search(text, partial=not final)
        if found is None or found.partial:
            # What is no tag is nobody's.
            return -int(found.start() if found else len(text))
        if found["close"]:
            self._json.append("}" if self._num_arguments else "{}")
            self.ended = True
            return int(found.end())
        name = found["name"]
        self._types = types_of(schema_of(self._schema, name))
        begin = ", " if self._num_arguments else "{"
        self._json.append(f'{begin}"{escaped(name)}": ' + ('"' if self._is_text else ""))
        self._num_arguments += 1
        self._in_value, self._at_start = True, self._on_lines
        return int(found.end())

    @property
    def _is_text(self) -> bool:
        return self._types == {"string"}

    def _value(self, text: str, final: bool) -> int:
        if self._at_start and text:
            self._at_start = False
            if text[0] == "\n":
                return 1
        found = self._end.search(text, partial=not final)
        is_whole = found is not None and not found.partial
        num_chars = int(found.start() if found else len(text))
        (
            self._json.append(escaped(text[:num_chars]))
            if self._is_text
            else self._hold(text[:num_chars])
        )
        if not is_whole or found is None:
            if final:
                # Cut off in the midst: as it stands.
                self._json += self._held
            return -num_chars
        if self._is_text:
            self._json.append('"')
        else:
            self._json.append(json_of("".join(self._held), self._types))
            self._held.clear()
        self._in_value = False
        return int(found.end())

    def _hold(self, text: str) -> None:
        self._held.append(text)


def _unanchored(pattern: str) -> str:
    """What texts match in which the pattern is found."""
    before = "" if pattern.startswith("^") else "(?s:.*)"
    after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^").removesuffix("$" if not after else "")
    return f"{before}(?:{inner})".replace("/", "\\/") + after
