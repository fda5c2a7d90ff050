"""Promise 1 on weights that others trained: SmolLM2 in exact mode, in bf16, in 8 bits and in the bits of
its file, writes the bits that gamma 0 writes alone, whoever drafts, in whatever shape, with whatever
sampling, and beside whom.

The draft models are SmolLM2 itself, copies of it in fewer bits, and some of its layers. Some samplings
hold the model to a schema: what is written is valid then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from engine.request.params import (
    PLAIN,
    GenerationRequest,
    SamplingParams,
    SpeculativeParams,
)
from server.request.grammars import json_grammar
from worlds.engine_harness import Driver, drafting, request
from worlds.real_engine import DRAFTERS, RealEngine, code, licence
from worlds.real_heads import RANDOM_HEADS
from worlds.real_model import REAL
from worlds.situations import LARGE, SITUATIONS, WIDTHS, Signature, partly_right, plain, signature

pytestmark = REAL
Count = Callable[[int], None]

_USUAL = SamplingParams(max_tokens=40, temperature=0.0, logprobs=0, ignore_eos=True)
_SAMPLED = replace(_USUAL, temperature=0.8)
_PLACES = {
    "type": "array",
    "items": {"type": "string", "maxLength": 12},
    "minItems": 1,
    "maxItems": 3,
}


def an_object(**properties: Any) -> Any:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


SCHEMAS = {
    "Describe a planet of our solar system as JSON.": an_object(
        name={"type": "string", "maxLength": 16},
        kind={"enum": ["rocky planet", "gas giant", "ice giant"]},
        number_of_moons={"type": "integer", "minimum": 0, "maximum": 200},
        has_rings={"type": "boolean"},
    ),
    "Call the function get_weather for Paris and Berlin.": an_object(
        name={"const": "get_weather"},
        arguments=an_object(locations=_PLACES, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
}
"""The schema that each question's answer has to match."""
JUDGES = [jsonschema.Draft202012Validator(schema) for schema in SCHEMAS.values()]


def held(question: str, temperature: float) -> SamplingParams:
    grammar = json_grammar(SCHEMAS[question], "schema").text
    return SamplingParams(160, temperature, logprobs=0, grammar=grammar)


SAMPLINGS = {
    "greedy": _USUAL,
    "t08": _SAMPLED,
    "t08_top_p": replace(_SAMPLED, top_p=0.9),
    "t13_top_k_min_p": replace(_USUAL, temperature=1.3, top_k=60, min_p=0.05),
    "greedy_repetition": replace(_USUAL, repetition_penalty=1.15),
    "t08_penalties": replace(_SAMPLED, presence_penalty=0.6, frequency_penalty=-0.4),
    **{f"schema_{at}": held(question, 0.8 * at) for at, question in enumerate(SCHEMAS)},
    **{f"schema_{3 - at}": held(question, 0.8 - 0.8 * at) for at, question in enumerate(SCHEMAS)},
}
QUESTIONS = dict(zip([f"schema_{at}" for at in (0, 1, 3, 2)], 2 * [*SCHEMAS], strict=True))
POLICIES = {
    "fixed": drafting("", "fixed", 8),
    "target_rate": replace(drafting("", "target_rate", 4), target_acceptance_rate=0.5),
    "goodput": drafting("", "goodput", 8),
}
FAST = ("prefix_hit", "preempted")
"""Situations that all lanes look at."""
Asked = Mapping[str, tuple[GenerationRequest, Signature]]
"""A request and what it has to write, by its id."""


@cache
def expected_of(engine: RealEngine, sampling: str, prompt: int) -> Signature:
    return signature(plain(engine, bare(engine, sampling, prompt)), "plain")


def bare(engine: RealEngine, sampling: str, prompt: int) -> GenerationRequest:
    """``prompt``: which of the engine's; samplings by a schema have their own."""
    asked = QUESTIONS.get(sampling)
    prompt_ids = engine.prompts[prompt] if asked is None else engine.chat(asked)
    return request("plain", prompt_ids, replace(SAMPLINGS[sampling], seed=prompt))


def all_drafters(engine: RealEngine, samplings: Sequence[str], policy: int) -> Asked:
    """Every drafter as a chain and as a tree. Samplings and policies go round, these beginning at number
    ``policy``; a sampling has two prompts."""
    ways = [(name, width) for width in WIDTHS.values() for name in DRAFTERS]
    found = {}
    for index, (drafter, width) in enumerate(ways):
        sampling = samplings[index % len(samplings)]
        prompt = (2 * list(SAMPLINGS).index(sampling) + index // 2 % 2) % len(engine.prompts)
        expected = expected_of(engine, sampling, prompt)
        each = replace(
            bare(engine, sampling, prompt),
            request_id=f"{drafter}-{width}",
            speculative=way(drafter, width, policy + index),
            prediction_token_ids=foretold(drafter, expected),
        )
        found[each.request_id] = each, expected
    return found


def way(drafter: str, width: int, policy: int) -> SpeculativeParams:
    usual = list(POLICIES.values())[policy % len(POLICIES)]
    return replace(usual, draft_strategy=drafter, tree_width=width)


def foretold(drafter: str, expected: Signature) -> tuple[int, ...]:
    """Only ``prediction`` is told what will be written, in part."""
    return tuple(partly_right([token for token, _ in expected])) if drafter == "prediction" else ()


def expect_equal(engine: RealEngine, driver: Driver, asked: Asked, count: Count) -> dict[str, int]:
    """Accepted drafts, by drafter."""
    accepted: dict[str, int] = dict.fromkeys(DRAFTERS, 0)
    num_drafted = 0
    for name, (each, expected) in asked.items():
        assert signature(driver, name) == expected, each.speculative
        if each.sampling.grammar:
            assert driver.finishes[name].reason == "stop"
            text = engine.tokenizer.decode(driver.token_ids[name], skip_special_tokens=True)
            assert any(
                jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
                for schema in SCHEMAS.values()
            )
        account = driver.finishes[name].speculative
        assert account.num_failed_drafts == 0, each.speculative
        accepted[each.speculative.draft_strategy] += account.num_accepted_tokens
        num_drafted += account.num_draft_tokens
    assert 0 < sum(accepted.values()) < num_drafted
    count(len(asked))
    return accepted


@pytest.mark.parametrize(
    "sampling",
    [
        name
        if name in ("greedy", "t08", "schema_1")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in SAMPLINGS
    ],
)
def test_no_drafter_changes_a_bit(engine: RealEngine, sampling: str, count: Count) -> None:
    """All in one batch, with a neighbour."""
    asked = all_drafters(engine, [sampling], 0)
    assert len(asked) == 2 * len(DRAFTERS) >= 28
    driver = SITUATIONS["mixed_batch"](engine, [each for each, _ in asked.values()])
    accepted = expect_equal(engine, driver, asked, count)
    if sampling == "greedy":
        # Nothing is forced here, and heads that know nothing are right by chance alone.
        useless = {name for name, num in accepted.items() if not num}
        assert useless - set(RANDOM_HEADS) == {"grammar"}
    assert accepted["grammar"] > 0 or sampling not in QUESTIONS


@pytest.mark.parametrize(
    ("situation", "turn"),
    [
        pytest.param(name, turn, marks=() if name in FAST and not turn else pytest.mark.slow)
        for name in LARGE
        for turn in range(2)
    ],
)
def test_no_situation_changes_a_bit(
    engine: RealEngine, situation: str, turn: int, count: Count
) -> None:
    """Samplings go round over all drafters, other ones in every turn."""
    names = list(SAMPLINGS)
    asked = all_drafters(engine, [*names[5 * turn :], *names[: 5 * turn]], turn)
    driver = SITUATIONS[situation](engine, [each for each, _ in asked.values()])
    expect_equal(engine, driver, asked, count)


def test_a_schema_takes_fewer_steps_with_drafts(engine: RealEngine, count: Count) -> None:
    each = bare(engine, "schema_0", 0)
    without, drafted = (
        Driver(engine.core(engine.setup)).run(replace(each, speculative=way))
        for way in (PLAIN, drafting("grammar"))
    )
    assert without.token_ids == drafted.token_ids
    assert drafted.num_steps < 0.8 * without.num_steps
    count(1)


@pytest.mark.slow
def test_a_prompt_of_four_thousand_tokens_changes_nothing(engine: RealEngine, count: Count) -> None:
    """In pieces and in none: all read it from the prefix cache, but for the first one and for heads,
    whose rows it has not left."""
    text = f"{licence(13000)}\n\n{code(7500)}\n\nRepeat the first two sentences."
    prompt = engine.chat(text)
    assert 4000 < len(prompt) < 5000
    short = [replace(each, max_tokens=24) for each in (_USUAL, _SAMPLED)]
    drivers = [plain(engine, request("plain", prompt, each)) for each in short]
    texts = [signature(each, "plain") for each in drivers]
    asked = {}
    for index, drafter in enumerate(DRAFTERS):
        sampling, expected = short[index % 2], texts[index % 2]
        speculative = way(drafter, list(WIDTHS.values())[index // 2 % 2], index)
        told = foretold(drafter, expected)
        wanted = request(drafter, prompt, sampling, speculative, prediction=told)
        asked[drafter] = wanted, expected
    driver = Driver(engine.core(engine.setup.but(prefill_chunk=200)))
    first, *others = [each for each, _ in asked.values()]
    driver.run(first).run(*others)
    heads = {"eagle3", *RANDOM_HEADS}
    cached = [
        driver.finishes[each.request_id].num_cached_tokens
        for each in others
        if each.request_id not in heads
    ]
    assert min(cached) > 3900
    expect_equal(engine, driver, asked, count)


def test_the_whole_vocabulary_is_drafted_and_accepted(engine: RealEngine, count: Count) -> None:
    """So hot that any token is as likely as another. Half of what is written is foretold, and nothing
    but that can be drafted."""
    hot = replace(_USUAL, max_tokens=256, temperature=1000.0)
    prompt = engine.prompts[0]
    expected = signature(plain(engine, request("plain", prompt, hot)), "plain")
    tokens = [token for token, _ in expected]
    sixteenth = engine.info.vocab_size // 16
    assert engine.info.vocab_size == 49152
    asked = {}
    for index, width in enumerate(WIDTHS.values()):
        speculative = way("prediction", width, 0)
        told = foretold("prediction", expected)
        wanted = request(str(index), prompt, hot, speculative, prediction=told)
        asked[str(index)] = wanted, expected
    driver = Driver(engine.core(engine.setup)).run(*(each for each, _ in asked.values()))
    expect_equal(engine, driver, asked, count)
    for name in asked:
        pairs = zip(tokens, driver.drafted[name], strict=True)
        accepted = [token for token, drafted in pairs if drafted]
        assert {token // sixteenth for token in accepted} == set(range(16))
