"""Structured output on weights that others trained: SmolLM2 held to a schema writes the same text whoever
drafts, greedy and sampled, and it is valid."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from engine.request.params import GenerationRequest, SamplingParams
from server.request.grammars import json_grammar
from worlds.engine_harness import Driver, drafting, request
from worlds.real_engine import DRAFTERS, RealEngine
from worlds.real_model import REAL
from worlds.situations import SITUATIONS, WIDTHS, partly_right, plain, signature

pytestmark = REAL

Schema = dict[str, Any]
SCHEMAS: dict[str, Schema] = {
    "Describe a planet of our solar system as JSON.": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 16},
            "kind": {"enum": ["rocky planet", "gas giant", "ice giant"]},
            "number_of_moons": {"type": "integer", "minimum": 0, "maximum": 200},
            "has_rings": {"type": "boolean"},
        },
        "required": ["name", "kind", "number_of_moons", "has_rings"],
        "additionalProperties": False,
    },
    "Call the function get_weather for Paris and Berlin.": {
        "type": "object",
        "properties": {
            "name": {"const": "get_weather"},
            "arguments": {
                "type": "object",
                "properties": {
                    "locations": {
                        "type": "array",
                        "items": {"type": "string", "maxLength": 12},
                        "minItems": 1,
                        "maxItems": 3,
                    },
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["locations", "unit"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    },
}
"""What has to be written, by what is asked."""
TEMPERATURES = (0.0, 0.8)


def ask(engine: RealEngine, question: str, temperature: float) -> GenerationRequest:
    grammar = json_grammar(SCHEMAS[question], "schema")
    sampling = SamplingParams(
        max_tokens=160, temperature=temperature, seed=3, logprobs=0, grammar=grammar
    )
    return request("plain", engine.chat(question), sampling)


@pytest.mark.parametrize(
    "situation",
    [
        "mixed_batch",
        pytest.param("preempted", marks=pytest.mark.slow),
        pytest.param("alone", marks=pytest.mark.slow),
    ],
)
def test_no_drafter_changes_what_a_schema_constrains(
    engine: RealEngine, situation: str, count: Any
) -> None:
    """Every drafter as a chain and as a tree, each with one of the schemas and of the temperatures."""
    cases = [(question, each) for question in SCHEMAS for each in TEMPERATURES]
    asked = {case: ask(engine, *case) for case in cases}
    expected = {case: signature(plain(engine, each), "plain") for case, each in asked.items()}
    ways = [(name, width) for width in WIDTHS.values() for name in DRAFTERS]
    requests = {}
    for index, (drafter, width) in enumerate(ways):
        case = cases[index % len(cases)]
        tokens = [token for token, _ in expected[case]]
        told = partly_right(tokens) if drafter == "prediction" else ()
        each = replace(
            asked[case],
            request_id=f"{drafter}-{width}",
            speculative=drafting(drafter, ("fixed", "goodput")[index % 2], 8, width),
            prediction_token_ids=told,
        )
        requests[each.request_id] = case, each
    driver = SITUATIONS[situation](engine, [each for _, each in requests.values()])
    num_accepted = num_forced = 0
    for name, (case, each) in requests.items():
        finish = driver.finishes[name]
        assert finish.reason == "stop"
        assert signature(driver, name) == expected[case], each.speculative
        text = engine.tokenizer.decode(driver.token_ids[name], skip_special_tokens=True)
        jsonschema.validate(json.loads(text), SCHEMAS[case[0]])
        num_accepted += finish.speculative.num_accepted_tokens
        if each.speculative.draft_strategy == "grammar":
            num_forced += finish.speculative.num_accepted_tokens
    assert num_forced > 0
    assert num_accepted > 2 * len(requests)
    count(len(requests))


def test_a_schema_takes_fewer_steps_with_drafts(engine: RealEngine, count: Any) -> None:
    (question, *_) = SCHEMAS
    bare = ask(engine, question, 0.0)
    drafted = replace(bare, speculative=drafting("grammar"))
    runs = [Driver(engine.core(engine.setup)).run(each) for each in (bare, drafted)]
    assert runs[0].token_ids == runs[1].token_ids
    assert runs[1].num_steps < 0.8 * runs[0].num_steps
    count(1)
