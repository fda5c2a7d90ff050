"""Promise 1 under grammars: random JSON schemas, every drafter, chains and trees, greedy and sampled. The
text is what gamma 0 writes under the same grammar, and it is valid. NUM_SCHEMAS in the environment says
how many; 1000 take two minutes.

Under rejection and block verification a draft changes which of the possible texts is written, so there a
text can only be valid; ``tests/engine/verification/test_distribution_kept_grammar.py`` has its law.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jsonschema
import pytest
import torch

from drafters.registry import drafter_names
from engine.core import EngineCore
from engine.request.params import GenerationRequest, SamplingParams, VerificationName
from worlds.engine_harness import (
    Driver,
    Setup,
    circle_prompt,
    drafting,
    request,
    traces_of,
)
from worlds.equality import NUM_PROMPTS, SITUATIONS, partly_right
from worlds.every_drafter import EveryDrafterTarget
from worlds.grammar_world import EOS, json_grammar, random_schema, tiny_compiler, tiny_tokenizer

pytestmark = pytest.mark.slow

NUM_SCHEMAS = int(os.environ.get("NUM_SCHEMAS", "200"))
NUM_AT_ONCE = 50
SETUP = Setup(
    num_blocks=320,
    block_size=16,
    max_num_seqs=NUM_AT_ONCE,
    max_num_batched_tokens=2048,
    eos_token_ids=(EOS,),
    constrain=tiny_compiler().constraint,
)


class Way(NamedTuple):
    """How a text is drafted."""

    drafter: str
    width: int
    temperature: float
    verification: VerificationName = "match"


SAMPLING = ("small_model", "stand", "medusa")
WAYS = [
    Way(name, width, temperature)
    for name in drafter_names()
    for width in (1, 3)
    for temperature in (0.0, 0.7)
] + [
    Way(name, width, 0.7, verification)
    for name in SAMPLING
    for width, verification in ((1, "block"), (1, "rejection"), (3, "rejection"))
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> EveryDrafterTarget:
    torch.set_num_threads(1)
    return EveryDrafterTarget(tmp_path_factory.mktemp("near"))


def subject(index: int, way: Way, plain: Sequence[int] | None = None) -> GenerationRequest:
    """Schema number ``index``, written this way; ``plain``: without drafts."""
    sampling = SamplingParams(
        max_tokens=200,
        temperature=way.temperature,
        seed=index,
        grammar=json_grammar(random_schema(index)),
    )
    if plain is None:
        return request(str(index), circle_prompt(index), sampling)
    policy = ("goodput", "fixed", "target_rate")[index % 3]
    wanted = replace(
        drafting(way.drafter, policy, 8, way.width),
        verification=way.verification,
    )
    told = partly_right(plain) if way.drafter == "prediction" else ()
    return request(str(index), circle_prompt(index), sampling, wanted, prediction=told)


class GrammarTarget:
    """The target, with grammars in whatever situation."""

    def __init__(self, target: EveryDrafterTarget) -> None:
        self._target = target

    def core(self, setup: Setup) -> EngineCore:
        return self._target.core(
            setup.but(eos_token_ids=SETUP.eos_token_ids, constrain=SETUP.constrain)
        )


def of_few_prompts(each: GenerationRequest) -> GenerationRequest:
    """With one of the prompts that situations share."""
    prompt = circle_prompt(int(each.request_id) % NUM_PROMPTS)
    return replace(each, prompt_token_ids=tuple(prompt))


@pytest.mark.parametrize("situation", SITUATIONS)
def test_constrained_texts_are_equal_in_every_situation(
    target: EveryDrafterTarget, situation: str
) -> None:
    """All drafters as chains and trees in one batch, each with a schema of its own."""
    own: Any = GrammarTarget(target)
    shift = list(SITUATIONS).index(situation)
    ways = [
        Way(drafter, width, (index + shift + width) % 3 * 0.5)
        for index, drafter in enumerate(drafter_names())
        for width in (1, 3)
    ]
    numbers = range(100 * shift, 100 * shift + len(ways))
    bare = [of_few_prompts(subject(*each)) for each in zip(numbers, ways, strict=True)]
    texts = Driver(own.core(Setup(max_num_seqs=8))).run(*bare).token_ids
    asked = [
        of_few_prompts(subject(number, way, texts[str(number)]))
        for number, way in zip(numbers, ways, strict=True)
    ]
    driver = SITUATIONS[situation](own, asked)
    for each in asked:
        name = each.request_id
        # Where blocks are short, so is the longest text.
        room = driver.core.limits.max_model_len - len(each.prompt_token_ids)
        assert driver.token_ids[name] == texts[name][:room], each
        assert driver.finishes[name].reason == ("stop" if len(texts[name]) < room else "length")
    assert traces_of(driver.core, driver.finishes) == []


@pytest.mark.parametrize("first", range(0, NUM_SCHEMAS, NUM_AT_ONCE))
def test_drafts_change_no_text_that_a_grammar_constrains(
    target: EveryDrafterTarget, first: int
) -> None:
    ways = {index: WAYS[index % len(WAYS)] for index in range(first, first + NUM_AT_ONCE)}
    plain = Driver(target.core(SETUP))
    plain.run(*(subject(index, way) for index, way in ways.items()))
    drafted = Driver(target.core(SETUP))
    drafted.run(*(subject(index, way, plain.token_ids[str(index)]) for index, way in ways.items()))
    for index, way in ways.items():
        name = str(index)
        assert drafted.finishes[name].reason == plain.finishes[name].reason == "stop", way
        if way.verification == "match":
            assert drafted.token_ids[name] == plain.token_ids[name], (index, way)
        judge = jsonschema.Draft202012Validator(random_schema(index))
        for text in {tuple(each.token_ids[name]) for each in (plain, drafted)}:
            judge.validate(json.loads(tiny_tokenizer().decode(text)))
    if first == 0:
        assert 0 < drafted.num_steps < plain.num_steps
