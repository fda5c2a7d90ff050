"""Fields that constrain the output: ``response_format`` as OpenAI has it, and vLLM's
``structured_outputs``; and the grammar that they come to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, JsonValue
from pydantic.config import JsonDict

from server.errors import OwnNames, refused
from server.formats.json_rules import AS_WRITTEN, SchemaError, json_rule
from server.formats.schemas import SchemaReader
from server.request.body import Body, in_case, optional
from server.request.parsing import read_float

_Grammar = Annotated[str, Field(min_length=1, max_length=1 << 17)]
_Choice = Annotated[str, Field(min_length=1, max_length=4096)]
_Choices = Annotated[list[_Choice], Field(min_length=1, max_length=4096)]
Schema = dict[str, JsonValue] | bool

_ANY_OBJECT: Schema = {"type": "object"}


class JsonSchema(Body):
    """OpenAI's. ``strict`` or not, the output matches; the name and the description are for models that
    are shown them, which is up to the messages."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")
    description: str | None = Field(default=None, max_length=4096)
    schema_: Schema = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


_FORMATS: JsonDict = {
    "anyOf": [
        in_case({"type": {"enum": ["text", "json_object"]}}, ("json_schema",)),
        in_case({"type": {"const": "json_schema"}, "json_schema": {"type": "object"}}),
    ]
}


class ResponseFormat(Body):
    model_config = ConfigDict(json_schema_extra=_FORMATS)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @classmethod
    def matching(cls, name: str, schema: Schema) -> ResponseFormat:
        return cls.of(type="json_schema", json_schema=JsonSchema.of(name=name, schema=schema))


_WAYS: dict[str, JsonDict] = {
    "json": {"type": ["object", "boolean", "string"]},
    "json_object": {"const": True},
    "regex": {"type": "string"},
    "choice": {"type": "array"},
    "grammar": {"type": "string"},
}
_FOR_JSON = ("disable_any_whitespace", "whitespace_pattern")


def _one_way(way: str) -> JsonDict:
    barred = [each for each in _WAYS if each != way]
    return in_case({way: _WAYS[way]}, barred if way.startswith("json") else [*barred, *_FOR_JSON])


class StructuredOutputs(Body):
    """One of ``json``, ``json_object``, ``regex``, ``choice`` and ``grammar``."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [_one_way(each) for each in _WAYS]})

    unsupported: ClassVar[dict[str, str]] = {
        "structural_tag": "use 'tools', or write a 'grammar'",
        "disable_additional_properties": "say 'additionalProperties': false in the schema",
    }

    json_: Schema | str | None = optional("A JSON schema, or its text.", alias="json")
    json_object: Literal[True] | None = optional("Any JSON object.")
    regex: _Grammar | None = optional("A regular expression that the whole output matches.")
    choice: _Choices | None = optional("Texts, of which the output is one.")
    grammar: _Grammar | None = optional("A grammar in Lark's notation, or GBNF.")
    disable_any_whitespace: bool | None = optional(
        "For JSON. Default true: a space after commas and colons, and no other."
    )
    whitespace_pattern: str | None = optional(
        "For JSON: a regular expression for whitespace.", max_length=256
    )


class Grammar(NamedTuple):
    """For ``SamplingParams.grammar``; "" for any text. ``fields``: what it is made of, by the fields that
    say it, for ``SamplingParams.grammar_fields``. Whether it can be used is found by the engine.
    ``ignored``: paths of what of a ``schema``, which is as it was read, is not enforced."""

    text: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    schema: Any = None

    def __bool__(self) -> bool:
        return bool(self.text)

    def renamed(self, names: OwnNames) -> Grammar:
        fields = ((names.of(path), part) for path, part in self.fields)
        return self._replace(fields=tuple(fields), ignored=tuple(map(names.of, self.ignored)))


def grammar_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> Grammar:
    """Returns the grammar of the output. Raises ApiError 400 naming the field at fault."""
    wanted = Grammar() if response_format is None else _of_response_format(response_format)
    if structured_outputs is None:
        return wanted
    if wanted:
        raise refused("structured_outputs", "contradicts response_format; leave one out")
    return _of_structured_outputs(structured_outputs)


def _of_response_format(wanted: ResponseFormat) -> Grammar:
    field = "response_format.json_schema"
    if wanted.type == "json_schema" and wanted.json_schema is None:
        raise refused(field, "is missing")
    if wanted.type != "json_schema" and wanted.json_schema is not None:
        raise refused(field, f"has no effect with type {wanted.type!r}")
    if wanted.json_schema is not None:
        return json_grammar(wanted.json_schema.schema_, f"{field}.schema")
    return (
        json_grammar(_ANY_OBJECT, "response_format") if wanted.type == "json_object" else Grammar()
    )


def _of_structured_outputs(wanted: StructuredOutputs) -> Grammar:
    given = wanted.model_dump(by_alias=True, exclude_none=True)
    ways = [name for name in _WAYS if name in given]
    if len(ways) != 1:
        raise refused("structured_outputs", f"takes one of: {', '.join(_WAYS)}")
    way, field = ways[0], f"structured_outputs.{ways[0]}"
    if way in _WRITERS:
        for name in _FOR_JSON:
            if name in given:
                raise refused(f"structured_outputs.{name}", f"has no effect with {way!r}")
        return written(field, lambda library: _WRITERS[way](library, given[way]))
    schema = _ANY_OBJECT if way == "json_object" else _schema(given[way], field)
    return json_grammar(schema, field, AS_WRITTEN | _whitespace(given))


_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ASCII = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


def _of_ascii(pattern: str) -> str:
    """Digits and letters of ASCII alone, as in patterns of JSON schemas: models do pick others."""
    return _ESCAPED.sub(lambda found: _ASCII.get(found[1], found[0]), pattern)


_WRITERS: dict[str, Callable[[Any, Any], str]] = {
    "regex": lambda library, pattern: library.LLMatcher.grammar_from_regex(_of_ascii(pattern)),
    "choice": lambda library, texts: library.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    ),
    "grammar": lambda library, text: library.grammar_from("grammar", text),
}


def json_grammar(schema: Any, field: str, options: Mapping[str, Any] = AS_WRITTEN) -> Grammar:
    """JSON that matches a schema. ``options``: of llguidance's JSON compiler. Raises ApiError 400 naming
    ``field``, or the path in it that is at fault."""
    try:
        read = SchemaReader(schema)
        if read.schema is False:
            raise SchemaError("", "matches nothing")
        parts = [("", read.schema), *read.parts]
        fields = tuple((field + path, _json_text(part, options)) for path, part in parts)
    except SchemaError as error:
        raise refused(field + error.path, str(error)) from error
    except RecursionError as error:
        raise refused(field, "is nested too deeply") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise refused(field, "is not a well-formed JSON schema") from error
    ignored = tuple(field + each for each in read.ignored)
    return Grammar(fields[0][1], fields, ignored, read.schema)


def _json_text(schema: Any, options: Mapping[str, Any]) -> str:
    lines = [*json_rule("start", schema, options)]
    if options["whitespace_flexible"]:
        space = options.get("whitespace_pattern", r"[\x20\x0A\x0D\x09]+").replace("/", "\\/")
        lines += ['%llguidance {"ignore_once": true}', f"%ignore /{space}/"]
    return "\n".join(lines)


def written(field: str, write: Callable[[Any], str]) -> Grammar:
    """Returns the grammar that ``write`` makes of llguidance. Raises ApiError 400 naming the field where
    none can be made; most of what is wrong with one shows when it is compiled, which is the engine's."""
    import llguidance  # loaded with the first grammar

    try:
        grammar = write(llguidance)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"cannot be used: {error}") from error
    return Grammar(grammar, ((field, grammar),))


def _schema(given: Any, field: str) -> Any:
    try:
        schema = json.loads(given, parse_float=read_float) if isinstance(given, str) else given
    except ValueError as error:
        raise refused(field, f"is not JSON: {error}") from error
    except RecursionError as error:
        raise refused(field, "is nested too deeply") from error
    if not isinstance(schema, dict | bool):
        raise refused(field, "is no schema: one is an object or a boolean")
    return schema


def _whitespace(given: Mapping[str, Any]) -> dict[str, Any]:
    pattern = given.get("whitespace_pattern")
    is_barred = given.get("disable_any_whitespace")
    if pattern is None and is_barred is not False:
        return {}
    if pattern is not None and is_barred:
        name = "structured_outputs.whitespace_pattern"
        raise refused(name, "contradicts disable_any_whitespace")
    own = {} if pattern is None else {"whitespace_pattern": pattern}
    return {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":", **own}
