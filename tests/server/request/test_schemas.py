"""Schemas as clients' libraries write them: held to exactly, told, or refused with their path."""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.parse import unquote

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import error_of, new_matcher
from engine.request.errors import RequestError
from server.errors import ApiError
from server.reply.streaming import IGNORED_HEADER
from server.request.grammars import json_grammar
from server.request.parsing import read_float
from worlds.scripted_engine import EOS, VOCAB_SIZE, ScriptedEngine, byte_tokenizer
from worlds.serving import Connect, allows

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "a"}]
BIG = 1234567890123456789
FLOAT = int(sys.float_info.max)
# zod's ``z.email()``.
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
I64 = {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1}
# pydantic's union by a tag that has a default, and a list of itself.
PETS = {
    "$defs": {
        "Cat": CLOSED | {"properties": {"kind": {"const": "cat", "default": "cat"}}},
        "Dog": CLOSED
        | {
            "properties": {
                "kind": {"const": "dog", "default": "dog"},
                "pups": {"items": {"$ref": "#"}, "maxItems": 2**53 - 1, "type": "array"},
                "id": I64,
            }
        },
    },
    "discriminator": {"propertyName": "kind"},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
}


SCHEMAS: list[tuple[Any, list[Any], list[Any]]] = [
    (
        {"enum": [BIG, -BIG, [BIG, {"a": 2**64}], "x", None, 0.1, read_float("1e400")]},
        [BIG, -BIG, [BIG, {"a": 2**64}], "x", None, 0.1, 10**400],
        [BIG - 21, 1, False],
    ),
    ({"type": "string", "enum": [BIG, "a"]}, ["a"], [BIG]),
    (
        {"type": "integer", "minimum": BIG, "exclusiveMaximum": BIG + 2},
        [BIG, BIG + 1],
        [BIG - 1, BIG + 2],
    ),
    ({"type": "integer", "maximum": -BIG}, [-BIG, -BIG * 10], [1 - BIG, 0, BIG]),
    (I64, [-(2**63), 2**63 - 1, 0, None], [-(2**63) - 1, 2**63, "a"]),
    (
        {"type": "number", "exclusiveMinimum": -3.4e38, "maximum": sys.float_info.max},
        [1 - int(3.4e38), FLOAT, 0, -0.5, 1e15],
        [-int(3.4e38), FLOAT + 1],
    ),
    (
        CLOSED
        | {"properties": {"a": {"type": "string"}, "id": {"const": BIG}}, "required": ["id"]},
        [{"id": BIG}, {"a": "q", "id": BIG}],
        [{}, {"id": BIG + 1}, {"id": BIG, "b": 1}],
    ),
    (
        {"type": "object", "properties": {"id": I64}, "additionalProperties": {"type": "boolean"}},
        [{}, {"id": 2**60 + 1}, {'b\\n"': True, "c": False}],
        [{"id": 2**63}, {"b": 1}],
    ),
    (
        {"type": "array", "items": {"const": BIG}, "minItems": 1, "maxItems": 2},
        [[BIG], [BIG, BIG]],
        [[], [BIG] * 3],
    ),
    (
        PETS,
        [{"kind": "cat"}, {"kind": "dog", "pups": [{"kind": "cat"}], "id": 2**63 - 1}],
        [{}, {"kind": "cow"}],
    ),
    (
        {"type": "string", "pattern": EMAIL, "maxLength": 20},
        ["a.b@c.de"],
        [".a@c.de", "a..b@c.de", f"{'a' * 20}@c.de"],
    ),
    (
        {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?!x|y$).{4,}$"},
        ["Abc1"],
        ["abc1", "Abcd", "xA123"],
    ),
    ({"oneOf": [{"const": 1}, {"const": 1.5}, {"type": "string"}]}, [1, 1.5, "a"], [2]),
    ({"type": "string", "maxLength": 2**53 - 1, "minLength": 1.0}, ["a"], [""]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS)
def test_texts_are_held_to_it_exactly(schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = json_grammar(schema, "f").text
    judge = Draft202012Validator(schema)
    for value in (*good, *bad):
        assert judge.is_valid(value) or schema is PETS or value in bad
        assert allows(grammar, json.dumps(value)) is (value in good), value


PATH = "schema.properties.p"


def fault(grammar: str) -> str:
    """As a trial finds it, without its process."""
    tokenizer = LLTokenizer(byte_tokenizer().backend_tokenizer.to_str(), n_vocab=VOCAB_SIZE)
    return error_of(new_matcher(tokenizer, grammar))


@pytest.mark.parametrize(
    ("schema", "path", "reason"),
    [
        ({"type": "string", "pattern": r"(a)\1"}, "", "backreferences are not supported"),
        ({"type": "string", "pattern": "a(?!b)c"}, ".pattern", "look ahead at its beginning"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf", "branches 0 and 1"),
        ({"type": "string", "minLength": 2**53}, ".minLength", "that a text can reach"),
        ({"type": "integer", "maximum": 2**63, "multipleOf": 3}, ".multipleOf", "beyond 2^53"),
        ({"type": "array", "uniqueItems": True}, "", 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "string", "not": {"const": "a"}}, "", 'Unimplemented keys: ["not"]'),
        ({"items": {"type": "number", "multipleOf": 0.07}}, ".items", "too many digits"),
    ],
)
def test_what_cannot_be_held_to_is_refused_with_its_path(
    schema: Any, path: str, reason: str
) -> None:
    whole = CLOSED | {"properties": {"o": {"pattern": "^a$"}, "p": schema}}
    with pytest.raises((ApiError, RequestError)) as caught:  # noqa: PT012
        made = json_grammar(whole, "schema")
        compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (EOS,), fault)
        compiler.constraint(made.text, made.fields)
    assert caught.value.param == PATH + path
    assert reason in str(caught.value)


SCHEMA = CLOSED | {
    "properties": {
        "id": {"const": BIG, "format": "int64", "deprecated": True},
        "é,": {"type": "string", "format": "uri-reference", "maxLenght": 3},
    },
    "required": ["id"],
}
FUNCTION = {"name": "f", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            "chat/completions",
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            "structured_outputs.json",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
            "tools.0.function.parameters",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
            "tools.0.function.parameters",
        ),
        ("responses", {"input": "a", "text": {"format": FORMAT}}, "text.format.schema"),
        (
            "messages",
            {
                "max_tokens": 9,
                "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            },
            "output_config.format.schema",
        ),
        (
            "messages",
            {
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any"},
            },
            "tools.0.input_schema",
        ),
        ("../api/chat", {"model": "test/scripted", "format": SCHEMA}, "format"),
    ],
)
async def test_every_api_writes_integers_whole_and_tells_what_is_not_enforced(
    connect: Connect, path: str, fields: dict[str, Any], where: str
) -> None:
    engine = ScriptedEngine("x")
    body = ({} if "input" in fields else {"messages": MESSAGES}) | fields
    async with connect(engine) as client:
        reply = await client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    told = [unquote(each) for each in reply.headers[IGNORED_HEADER].split(", ")]
    names = ("id.format", "é,.format", "é,.maxLenght")
    assert told == [f"{where}.properties.{name}" for name in names]
    grammar = engine.requests[0].sampling.grammar
    arguments = f'{{"id": {BIG}}}'
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    text = call if "tools" in fields else arguments
    assert allows(grammar, text)
    assert not allows(grammar, text.replace(str(BIG), "1234567890123456768"))
