"""Fields that constrain the output: ``response_format`` as OpenAI has it, and vLLM's
``structured_outputs``; and the grammar that they come to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue
from pydantic.config import JsonDict

from server.errors import refused
from server.formats.format import AS_WRITTEN
from server.request.body import Body, in_case

MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 4096
MAX_GRAMMAR_CHARS = 1 << 17

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

    json_: Schema | str | None = Field(
        default=None, alias="json", description="A JSON schema, or its text."
    )
    json_object: Literal[True] | None = Field(default=None, description="Any JSON object.")
    regex: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = Field(
        default=None, description="A regular expression that the whole output matches."
    )
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_CHOICE_CHARS)]],
            Field(min_length=1, max_length=MAX_CHOICES),
        ]
        | None
    ) = Field(default=None, description="Texts, of which the output is one.")
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = Field(
        default=None, description="A grammar in Lark's notation, or GBNF."
    )
    disable_any_whitespace: bool | None = Field(
        default=None,
        description="For JSON. Default true: a space after commas and colons, and no other.",
    )
    whitespace_pattern: str | None = Field(
        default=None, max_length=256, description="For JSON: a regular expression for whitespace."
    )


def grammar_of(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
) -> str:
    """What the output has to match, for ``SamplingParams.grammar``; "" for anything. Raises ApiError 400
    naming the field at fault."""
    wanted = "" if response_format is None else of_response_format(response_format)
    if structured_outputs is None:
        return wanted
    if wanted:
        raise refused("structured_outputs", "contradicts response_format; leave one out")
    return of_structured_outputs(structured_outputs)


def of_response_format(wanted: ResponseFormat, field: str = "response_format") -> str:
    """Raises ApiError 400."""
    needs_schema = wanted.type == "json_schema"
    if needs_schema and wanted.json_schema is None:
        raise refused(f"{field}.json_schema", "is missing")
    if not needs_schema and wanted.json_schema is not None:
        raise refused(f"{field}.json_schema", f"has no effect with type {wanted.type!r}")
    if wanted.json_schema is not None:
        return json_grammar(wanted.json_schema.schema_, f"{field}.json_schema.schema")
    return json_grammar(_ANY_OBJECT, field) if wanted.type == "json_object" else ""


def of_structured_outputs(wanted: StructuredOutputs) -> str:
    """Raises ApiError 400."""
    given = wanted.model_dump(by_alias=True, exclude_none=True)
    ways = [name for name in _WAYS if name in given]
    if len(ways) != 1:
        raise refused("structured_outputs", f"takes one of: {', '.join(_WAYS)}")
    way, field = ways[0], f"structured_outputs.{ways[0]}"
    is_json = way.startswith("json")
    for name in _FOR_JSON:
        if name in given and not is_json:
            raise refused(f"structured_outputs.{name}", f"has no effect with {way!r}")
    if is_json:
        schema = _ANY_OBJECT if way == "json_object" else _schema(given[way], field)
        return json_grammar(schema, field, _whitespace(given))
    return _checked(_WRITERS[way], given[way], field)


def json_grammar(schema: Any, field: str, options: Mapping[str, Any] | None = None) -> str:
    """JSON that matches a schema. ``options``: of llguidance's JSON compiler. Raises ApiError 400 naming
    ``field`` where the schema is none, or says what cannot be held to."""

    def write(schema: Any) -> str:
        from llguidance import LLMatcher

        overrides: Any = AS_WRITTEN if options is None else options
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)

    if schema is False:
        raise refused(field, "matches nothing")
    return _checked(write, {} if schema is True else schema, field)


def _schema(given: Any, field: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        schema = json.loads(given)
    except ValueError as error:
        raise refused(field, f"is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise refused(field, "is no schema: one is an object or a boolean")
    return schema


def _whitespace(given: Mapping[str, Any]) -> dict[str, Any] | None:
    pattern = given.get("whitespace_pattern")
    is_free = given.get("disable_any_whitespace") is False
    if pattern is not None:
        if given.get("disable_any_whitespace"):
            name = "structured_outputs.whitespace_pattern"
            raise refused(name, "contradicts disable_any_whitespace")
        return {"whitespace_flexible": True, "whitespace_pattern": pattern}
    return {"whitespace_flexible": True} if is_free else None


def _write_regex(pattern: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def _write_choice(texts: list[str]) -> str:
    from llguidance import LLMatcher

    options = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
    return LLMatcher.grammar_from_lark(f"start: {options}")


def _write_grammar(text: str) -> str:
    from llguidance import grammar_from

    return grammar_from("grammar", text)


_WRITERS: dict[str, Callable[[Any], str]] = {
    "regex": _write_regex,
    "choice": _write_choice,
    "grammar": _write_grammar,
}


def _checked(write: Callable[[Any], str], given: Any, field: str) -> str:
    """A grammar that can be used, but for what hangs on the tokenizer."""
    from llguidance import LLMatcher

    try:
        grammar = write(given)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"cannot be used: {error}") from error
    fault = LLMatcher.validate_grammar(grammar)
    if fault:
        raise refused(field, f"cannot be used: {fault.strip()}")
    return grammar
