"""Sampled text follows the target's distribution, through the whole core, drafts and all.

The target is a Markov chain over six tokens, so the probability of every text of three tokens is
known exactly. Thousands of requests that differ in their seed alone write three tokens each, most of
them from trees in which one draft is often right; the counts of the 216 texts face a chi-squared test.

False alarms: seeds are fixed, so a run always gives the same answer. Over the choice of seeds, each of
the five tests would fail a correct engine once in 10,000 times (``ALPHA``).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.request.params import SamplingParams, SpeculativeParams
from worlds.engine_harness import DictatedCost, Driver, Setup, drafting, request
from worlds.scripted_target import ScriptedTarget
from worlds.verified_streams import ALPHA, p_value

pytestmark = pytest.mark.slow

VOCAB = 6
NUM_REQUESTS = 2_500
NUM_TOKENS = 3
TARGET = ScriptedTarget(VOCAB, habit=16, sharpness=1.2)
PROMPT = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5, 5, 1, 0, 4, 3, 2, 0, 1]

CASES: dict[str, tuple[SamplingParams, SpeculativeParams]] = {
    "chain": (SamplingParams(temperature=1.0), drafting("ngram", num_tokens=2, ngram_min=1)),
    "tree": (
        SamplingParams(temperature=1.0),
        drafting("nasd", num_tokens=12, width=4, n=2),
    ),
    "cold_nucleus": (
        SamplingParams(temperature=0.7, top_p=0.9),
        drafting("nasd", num_tokens=8, width=3, n=2),
    ),
    "hot_min_p": (
        SamplingParams(temperature=1.3, min_p=0.1),
        drafting("nasd_one_level", num_tokens=6, width=2, n=2),
    ),
    "top_k_random_drafts": (
        SamplingParams(temperature=1.0, top_k=4),
        drafting("nasd", "goodput", width=2, stop_if_unknown=False),
    ),
}


def next_probs(sampling: SamplingParams, previous: int, token_id: int) -> list[float]:
    """The definition, by sorting: temperature, then top-k, top-p and min-p, then what is left."""
    row = TARGET.logit_row(0, token_id, previous)
    logits = TARGET.logits([row])[0].double()
    probs = torch.softmax(logits / sampling.temperature, dim=-1).tolist()
    order = sorted(range(VOCAB), key=lambda each: -probs[each])
    if sampling.top_k:
        order = order[: sampling.top_k]
    mass = sum(probs[each] for each in order)
    kept, above = [], 0.0
    for each in order:
        if above < sampling.top_p * mass and probs[each] >= sampling.min_p * probs[order[0]]:
            kept.append(each)
        above += probs[each]
    total = sum(probs[each] for each in kept)
    return [probs[each] / total if each in kept else 0.0 for each in range(VOCAB)]


def text_probs(sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    found = {}
    for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        context = [*PROMPT[-2:], *text]
        steps = range(NUM_TOKENS)
        found[text] = math.prod(
            next_probs(sampling, context[i], context[i + 1])[context[i + 2]] for i in steps
        )
    return found


@cache
def sample(name: str) -> tuple[Counter[tuple[int, ...]], Driver]:
    sampling, speculation = CASES[name]
    setup = Setup(
        num_blocks=1024,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        cost=DictatedCost(row_seconds=1e-4),
        prefix_cache=False,
    )
    driver = Driver(TARGET.core(setup))
    driver.run(
        *(
            request(
                f"r{seed}", PROMPT, replace(sampling, seed=seed, max_tokens=NUM_TOKENS), speculation
            )
            for seed in range(NUM_REQUESTS)
        )
    )
    return Counter(tuple(text) for text in driver.token_ids.values()), driver


def position_of_drafts(driver: Driver) -> Sequence[int]:
    """For each output position, how many requests had an accepted draft there."""
    return [sum(flags[at] for flags in driver.drafted.values()) for at in range(NUM_TOKENS)]


@pytest.mark.parametrize("name", CASES)
def test_texts_follow_the_targets_distribution(name: str) -> None:
    sampling, _ = CASES[name]
    probs = text_probs(sampling)
    counts, driver = sample(name)
    assert all(probs[text] > 0 for text in counts), "a text that truncation rules out"
    assert p_value(counts, probs) > ALPHA
    accounts = [finish.speculative for finish in driver.finishes.values()]
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    num_drafted = sum(account.num_draft_tokens for account in accounts)
    assert NUM_REQUESTS // 10 < num_accepted < num_drafted
    assert min(position_of_drafts(driver)[:2]) > NUM_REQUESTS // 50
