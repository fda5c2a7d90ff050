"""Under a grammar sampled text follows the target's distribution over what the grammar allows, token by
token, whatever verifies the drafts.

The target is a Markov chain over six tokens and the grammar a regular expression over five of them, so
every text's probability is known. The drafter draws from a distribution that knows nothing of the
grammar: many of its tokens are forbidden, and after some texts a token is forced.

False alarms: seeds are fixed, so a run always gives the same answer. Over the choice of seeds, each of
the five tests would fail a correct engine once in 10,000 times (``ALPHA``).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from llguidance import LLMatcher

from engine.grammar.compiler import GrammarCompiler
from engine.request.params import SamplingParams, SpeculativeParams
from worlds.drawing_drafter import DrawingDrafter, as_mapping, as_tensor
from worlds.engine_harness import DictatedCost, Driver, Setup, drafting
from worlds.grammar_world import letter_tokenizer
from worlds.scripted_target import ScriptedTarget
from worlds.verified_streams import ALPHA, p_value, run_many

pytestmark = pytest.mark.slow

NUM_REQUESTS = 2_500
TARGET = ScriptedTarget(6, habit=16, sharpness=1.2)
PROMPT = [1, 2, 3, 4, 5, 2, 4, 1, 3, 5, 5, 1, 4, 3, 2, 1]
# After "a" or "b" and any letter, "c" is forced; so is "e" after "c" and "d".
GRAMMAR = "([ab][a-e]c|[cd]e[a-d]|eab)[ad]"
LETTERS = " abcde"
TEXTS = {
    tuple(LETTERS.index(each) for each in text)
    for text in (
        *(a + b + "c" for a, b in product("ab", "abcde")),
        *(a + "e" + b for a, b in product("cd", "abcd")),
        "eab",
    )
    for text in (text + "a", text + "d")
}
GUESSES = [1 / 15, 4 / 15, 2 / 15, 3 / 15, 2 / 15, 3 / 15]
DRAFT_PROBS = [GUESSES[row:] + GUESSES[:row] for row in range(6)]
DRAWN = drafting("drawing", num_tokens=6)
CASES: dict[str, tuple[SpeculativeParams, DrawingDrafter]] = {
    "match": (replace(DRAWN, verification="match"), DrawingDrafter(DRAFT_PROBS, [1, 1, 1])),
    "chain": (
        replace(DRAWN, verification="rejection"),
        DrawingDrafter(DRAFT_PROBS, [1, 1, 1], as_tensor),
    ),
    "chain_goodput": (
        replace(DRAWN, verification="rejection", adaptive_depth="goodput"),
        DrawingDrafter(DRAFT_PROBS, [1, 1, 1], as_mapping),
    ),
    "tree": (
        replace(drafting("drawing", num_tokens=12, width=2), verification="rejection"),
        DrawingDrafter(DRAFT_PROBS, [2, 2, 1]),
    ),
    "block": (
        replace(DRAWN, verification="block"),
        DrawingDrafter(DRAFT_PROBS, [1, 1, 1], as_mapping),
    ),
}


def next_probs(before: tuple[int, ...], text: tuple[int, ...]) -> list[float]:
    """The target's, of the tokens with which the text can still become one of ``TEXTS``."""
    context = [*PROMPT[-2:], *before]
    row = TARGET.logits([TARGET.logit_row(0, context[-1], context[-2])])[0].double()
    probs = torch.softmax(row, dim=-1).tolist()
    allowed = {each[len(before)] for each in TEXTS if each[: len(before)] == text[: len(before)]}
    total = sum(probs[each] for each in allowed)
    return [probs[each] / total if each in allowed else 0.0 for each in range(6)]


@cache
def text_probs() -> dict[tuple[int, ...], float]:
    return {
        text: math.prod(next_probs(text[:at], text)[text[at]] for at in range(len(text)))
        for text in TEXTS
    }


@cache
def sample(name: str) -> tuple[Counter[tuple[int, ...]], Driver]:
    speculation, drafter = CASES[name]
    setup = Setup(
        num_blocks=256,
        block_size=16,
        max_num_seqs=96,
        max_num_batched_tokens=2048,
        eos_token_ids=(0,),
        cost=DictatedCost(row_seconds=1e-4),
        prefix_cache=False,
        drafters={"drawing": drafter},
        constrain=GrammarCompiler(letter_tokenizer(LETTERS[1:]), 6, (0,), lambda _: "").constraint,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=8, grammar=LLMatcher.grammar_from_regex(GRAMMAR)
    )
    driver = run_many(TARGET.core(setup), PROMPT, sampling, speculation, NUM_REQUESTS)
    return Counter(tuple(text) for text in driver.token_ids.values()), driver


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_targets_distribution_over_what_is_allowed(name: str) -> None:
    counts, driver = sample(name)
    assert set(counts) <= TEXTS
    assert p_value(counts, text_probs(), 14) > ALPHA
    accounts = [finish.speculative for finish in driver.finishes.values()]
    assert all(finish.reason == "stop" for finish in driver.finishes.values())
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    assert num_accepted > NUM_REQUESTS // 2
    assert num_accepted < sum(account.num_draft_tokens for account in accounts)


def test_the_test_sees_a_bias() -> None:
    """One text in twelve replaced by the likeliest: what believing drafts too often would do."""
    counts, driver = sample("tree")
    favoured = max(text_probs(), key=lambda text: text_probs()[text])
    texts = [tuple(text) for text in driver.token_ids.values()]
    biased = Counter(favoured if index % 12 == 0 else text for index, text in enumerate(texts))
    assert p_value(counts, text_probs(), 14) > ALPHA > p_value(biased, text_probs(), 14)
