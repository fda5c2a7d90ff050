"""Which grammars are tried in vain, and why."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher

from engine.grammar.trial import endless_rule, fault_of, read_rules
from engine.grammar.vocabulary import Vocabulary
from worlds.engine_harness import TINY_VOCAB
from worlds.grammar_world import EOS, json_grammar, random_schema, tiny_tokenizer

NESTED = {
    "grammars": [{"lark_grammar": 'start: "a" @b'}, {"name": "b", "json_schema": {"$ref": "#"}}]
}


@cache
def vocabulary() -> Any:
    return Vocabulary.of(tiny_tokenizer(), TINY_VOCAB, (EOS,)).build()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (LLMatcher.grammar_from_regex(r"[^\s\S]"), "it matches nothing"),
        ("start: start", "it matches nothing"),
        ("start: a\na: b\nb: a", "it matches nothing"),
        ('start: "a" b\nb: "c" b', "it matches nothing: no text of 'b' ends"),
        ('start: "a" | "b" x\nx: x "c"', "no text of 'x' ends"),
        ("start: A\nA: /a/ & /b/", "it matches nothing"),
        ('start: "a" | "b" X "c"' + "\nX: /[^\\s\\S]/", "a part of it matches nothing"),
        ('start: "a"{60000}', "too complex: Too many items"),
        ('start: %json {"$ref": "#"}', "no text of '#' ends"),
        (json.dumps(NESTED), "no text of '#' ends"),
        ("start: <nope>", "unknown special token"),
        ("start: @nowhere", "unknown grammar"),
        ('start: a::0x0\na::_ : "x" a::incr(_)', "its compiler failed"),
        ('start: "a" | "b" start', ""),
        (LLMatcher.grammar_from_regex("((x?){500}){500}"), ""),
    ],
)
def test_a_fault_is_said_in_one_line(grammar: str, reason: str) -> None:
    found = fault_of(vocabulary(), grammar)
    assert reason in found
    assert bool(reason) == bool(found)
    assert "\n" not in found


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "it matches nothing: no text of '#' ends"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "it matches nothing",
        ),
        (
            {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
            "no text of '#' ends",
        ),
        (
            {"type": "object", "properties": {"a": {}, "n": {"$ref": "#"}}, "required": ["a", "n"]},
            "no text of '#' ends",
        ),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no text of '#' ends"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "Unsatisfiable"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}}, ""),
        ({"type": "array", "items": {"$ref": "#"}}, ""),
        *((random_schema(seed), "") for seed in range(10)),
    ],
)
def test_schemas_without_a_text_are_told_from_those_that_have_one(
    schema: dict[str, Any], reason: str
) -> None:
    found = fault_of(vocabulary(), json_grammar(schema))
    assert reason in found
    assert bool(reason) == bool(found)


def test_rules_are_read_off_what_the_library_tells() -> None:
    told = (
        "LexerSpec { lexemes: [\n  [0] SKIP0  (Or)\n"
        "  [1] [1]  (ExprRef 'a')\n  [2] [2]  (ExprRef ∅)\n] }\n"
        "Grammar:\nstart           ⇦ start#2  \nstart#2         ⇦ [1]  \n                ⇦ x [1]  \n"
        "x               ⇦ [2]  \nstats: 2 terminals\n"
    )
    rules = read_rules(told)
    assert rules.of == {"start": [["start#2"]], "start#2": [["[1]"], ["x", "[1]"]], "x": [["[2]"]]}
    assert "[2]" in rules.empty
    assert endless_rule(rules) == "no text of 'x' ends"


def test_a_library_that_tells_nothing_of_its_rules_finds_no_fault() -> None:
    assert endless_rule(read_rules("")) == ""
