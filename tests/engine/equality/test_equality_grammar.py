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
from typing import NamedTuple

import jsonschema
import pytest

from engine.request.params import GenerationRequest, SamplingParams, VerificationName
from worlds.engine_harness import Driver, circle_prompt, drafting, request
from worlds.every_drafter import DRAFTERS, EveryDrafterTarget
from worlds.grammar_world import json_grammar, random_schema, tiny_tokenizer
from worlds.situations import partly_right

pytestmark = pytest.mark.slow

NUM_SCHEMAS = int(os.environ.get("NUM_SCHEMAS", "200"))
NUM_AT_ONCE = 50
SETUP = EveryDrafterTarget.setup.but(
    num_blocks=320, block_size=16, max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=2048
)


class Way(NamedTuple):
    """How a text is drafted."""

    drafter: str
    width: int
    temperature: float
    verification: VerificationName = "match"


SAMPLING = ("small_model", "stand", "medusa", "eagle3_reduced", "p_eagle", "dspark")
WAYS = [
    Way(name, width, temperature)
    for name in DRAFTERS
    for width in (1, 3)
    for temperature in (0.0, 0.7)
] + [
    Way(name, width, 0.7, verification)
    for name in SAMPLING
    for width, verification in ((1, "block"), (1, "rejection"), (3, "rejection"))
]


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
    drafts = drafting(way.drafter, policy, 8, way.width)
    wanted = replace(drafts, verification=way.verification)
    told = partly_right(plain) if way.drafter == "prediction" else ()
    return request(str(index), circle_prompt(index), sampling, wanted, prediction=told)


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
