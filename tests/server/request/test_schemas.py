"""Schemas as clients' libraries write them: held to exactly, told, or refused with their path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from engine.grammar.compiler import GrammarCompiler
from engine.grammar.vocabulary import error_of, new_matcher
from engine.request.errors import RequestError
from server.errors import ApiError
from server.plan import IGNORED_HEADER
from server.request.grammars import StructuredOutputs, grammar_of, json_grammar
from worlds.request_bodies import with_values
from worlds.scripted_engine import EOS, VOCAB_SIZE, ScriptedEngine, byte_tokenizer
from worlds.serving import allows, post

BIG = 1234567890123456789
CASES = [*map(json.loads, Path(__file__).with_name("schemas.jsonl").read_text().splitlines())]


@pytest.mark.parametrize("case", CASES, ids=[each["name"] for each in CASES])
def test_texts_are_held_to_it_exactly(case: dict[str, Any]) -> None:
    grammar = json_grammar(case["schema"], "f").text
    judge = Draft202012Validator(case["schema"])
    for value in (*case["good"], *case["bad"]):
        is_good = value in case["good"]
        # A union's tag has to be there.
        assert judge.is_valid(value) is is_good or "discriminator" in case["schema"]
        assert allows(grammar, json.dumps(value)) is is_good, value


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
        ({"items": {"type": "number", "multipleOf": 0.07}}, ".items", "too many digits"),
    ],
)
def test_what_cannot_be_held_to_is_refused_by_its_path(schema: Any, path: str, reason: str) -> None:
    whole = {"type": "object", "properties": {"o": {"pattern": "^a$"}, "p": schema}}
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (EOS,), fault)

    def use() -> None:
        made = json_grammar(whole, "schema")
        compiler.constraint(made.text, made.fields)

    with pytest.raises((ApiError, RequestError), match=re.escape(reason)) as caught:
        use()
    assert caught.value.param == f"schema.properties.p{path}"


@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [(r"\d", "1"), (r"[\d.]", "1."), (r"\w", "1a"), (r"[\w１]", "1a１"), (r"\\d", r"\d")],
)
def test_digits_and_letters_of_a_regex_are_of_ascii(pattern: str, allowed: str) -> None:
    grammar = grammar_of(None, StructuredOutputs.of(regex=pattern)).text
    texts = ("1", "a", ".", r"\d", "１", "é")
    assert "".join(each for each in texts if allows(grammar, each)) == allowed


SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"const": BIG, "format": "int64", "deprecated": True},
        "é,": {"type": "string", "format": "uri-reference", "maxLenght": 3},
    },
    "required": ["id"],
}
PARAMETERS = "tools.0.function.parameters"
TOOLS = {"tools": [{}], "tools.function.name": "f", "tools.type": "function"}


@pytest.mark.parametrize(
    ("schema", "is_told"),
    [
        ({"minProperties": 2}, True),
        ({"minProperties": 2, "additionalProperties": {"type": "null"}}, True),
        ({"minProperties": 2, "patternProperties": {"^a": True}}, True),
        ({"minProperties": 1}, False),
        ({"minProperties": 2, "required": ["a", "b"]}, False),
        ({"minProperties": 2, "additionalProperties": False}, False),
    ],
)
def test_a_number_of_names_that_may_be_repeated_is_told(schema: Any, is_told: bool) -> None:
    properties = {name: {"type": "null"} for name in "abc"}
    given = {"type": "object", "properties": properties, **schema}
    ignored = json_grammar(given, "f").ignored
    assert ignored == (("f.minProperties",) if is_told else ())


@pytest.mark.parametrize(
    ("path", "where", "fields"),
    [
        (
            "chat/completions",
            "response_format.json_schema.schema",
            {"response_format.type": "json_schema", "response_format.json_schema.name": "n"},
        ),
        ("chat/completions", "structured_outputs.json", {}),
        ("chat/completions", PARAMETERS, TOOLS | {"tool_choice": "required"}),
        ("chat/completions", PARAMETERS, TOOLS | {"tools.function.strict": True}),
        (
            "responses",
            "text.format.schema",
            {"input": "a", "text.format.type": "json_schema", "text.format.name": "n"},
        ),
        ("messages", "output_config.format.schema", {"output_config.format.type": "json_schema"}),
        ("messages", "tools.0.input_schema", {"tools": [{"name": "f"}], "tool_choice.type": "any"}),
        ("../api/chat", "format", {"model": "test/scripted"}),
    ],
)
async def test_every_api_writes_integers_whole_and_tells_what_is_not_enforced(
    path: str, where: str, fields: dict[str, Any]
) -> None:
    engine = ScriptedEngine("x")
    body = {} if "input" in fields else {"messages": [{"role": "user", "content": "a"}]}
    body |= {"max_tokens": 9} if path == "messages" else {}
    sent = with_values(body, fields | {where.replace(".0", ""): SCHEMA})
    reply = await post(path, sent, engine)
    assert reply.status_code == 200, reply.text
    told = [unquote(each) for each in reply.headers[IGNORED_HEADER].split(", ")]
    names = ("id.format", "é,.format", "é,.maxLenght")
    assert told == [f"{where}.properties.{name}" for name in names]
    grammar, text = engine.requests[0].sampling.grammar, f'{{"id": {BIG}}}'
    if "tools" in where:
        text = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    assert allows(grammar, text)
    assert not allows(grammar, text.replace(str(BIG), "1234567890123456768"))
