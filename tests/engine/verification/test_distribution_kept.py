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
from dataclasses import replace
from functools import cache

import pytest

from engine.request.params import SamplingParams, SpeculativeParams
from worlds.engine_harness import DictatedCost, Driver, Setup, drafting
from worlds.sampling_oracle import truncated_probs
from worlds.scripted_target import ScriptedTarget
from worlds.verified_streams import ALPHA, p_value, run_many

pytestmark = pytest.mark.slow

VOCAB = 6
NUM_REQUESTS = 2_500
NUM_TOKENS = 3
TARGET = ScriptedTarget(VOCAB, habit=16, sharpness=1.2)
PROMPT = [0, 1, 2, 3, 4, 5, 0, 2, 4, 1, 3, 5, 5, 1, 0, 4, 3, 2, 0, 1]

CASES: dict[str, tuple[SamplingParams, SpeculativeParams]] = {
    "chain": (SamplingParams(temperature=1.0), drafting("ngram", num_tokens=2, ngram_min=1)),
    "tree": (SamplingParams(temperature=1.0), drafting("nasd", num_tokens=12, width=4, n=2)),
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


RARE = "top_k_random_drafts"
"""Requests of three tokens that weigh what drafts cost join a drafter after their first token, and few
do: there are four times as many."""


def text_probs(sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    contexts = list(itertools.product(range(VOCAB), repeat=2))
    rows = TARGET.logits([TARGET.logit_row(0, last, before) for before, last in contexts])
    laws = [truncated_probs(row, sampling) for row in rows]
    after = dict(zip(contexts, laws, strict=True))
    found = {}
    for text in itertools.product(range(VOCAB), repeat=NUM_TOKENS):
        context = [*PROMPT[-2:], *text]
        places = range(NUM_TOKENS)
        found[text] = math.prod(after[context[i], context[i + 1]][context[i + 2]] for i in places)
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
    sampling = replace(sampling, max_tokens=NUM_TOKENS)
    num_requests = NUM_REQUESTS * (4 if name == RARE else 1)
    driver = run_many(TARGET.core(setup), PROMPT, sampling, speculation, num_requests)
    return Counter(tuple(text) for text in driver.token_ids.values()), driver


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
    for at in (1,) if name == RARE else (0, 1):
        assert sum(flags[at] for flags in driver.drafted.values()) > NUM_REQUESTS // 50
