"""Promise 1, in fp32, for every drafter in the registry and every form of published heads: the same
tokens whatever drafts, how much, in what shape and beside whom.

A new drafter is taken up by its name, and fails here until the tiny target can lend it what it asks for.
Streams are compared with those of the same requests at gamma 0, alone, their prompts in one piece, and
these with transformers' own forward over the whole text, token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from drafters.registry import build_drafters
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import (
    Driver,
    Setup,
    drafting,
    request,
    tiny_hybrid,
    tiny_llama,
    traces_of,
)
from worlds.every_drafter import DRAFTERS, EveryDrafterTarget
from worlds.grammar_world import json_grammar, random_schema
from worlds.situations import SITUATIONS, WIDTHS, partly_right, plain

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
NUM_PROMPTS = len(EveryDrafterTarget.prompts)
WITH_MODELS = set(DRAFTERS) - set(build_drafters())
USUAL = SamplingParams(NUM_TOKENS, temperature=0.0, ignore_eos=True)
SAMPLINGS = {
    "greedy": USUAL,
    "t07_top_p": replace(USUAL, temperature=0.7, top_p=0.9),
    "t13": replace(USUAL, temperature=1.3),
    "json": replace(
        USUAL, temperature=0.7, ignore_eos=False, grammar="a schema of each prompt's own"
    ),
}
POLICIES = [
    *(drafting("", "fixed", gamma) for gamma in (0, 1, 2, 4, 7, 11, 16)),
    *(replace(drafting("", "target_rate", 4), target_acceptance_rate=rate) for rate in (0.2, 0.8)),
    drafting("", "goodput", 8),
]
WAYS = [replace(policy, tree_width=width) for width in WIDTHS.values() for policy in POLICIES]
Streams = Mapping[tuple[str, int], Driver]
"""The stream that a request writes at gamma 0, by sampling and prompt."""


@pytest.fixture(scope="module", params=[tiny_llama, tiny_hybrid], ids=["llama", "hybrid"])
def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EveryDrafterTarget:
    return EveryDrafterTarget(tmp_path_factory.mktemp("near"), request.param)


@pytest.fixture(scope="module")
def streams(target: EveryDrafterTarget) -> Streams:
    return {
        (name, prompt): plain(target, bare(target, name, prompt))
        for name in SAMPLINGS
        for prompt in range(NUM_PROMPTS)
    }


def bare(target: EveryDrafterTarget, sampling: str, prompt: int) -> GenerationRequest:
    grammar = json_grammar(random_schema(prompt)) if SAMPLINGS[sampling].grammar else ""
    asked = replace(SAMPLINGS[sampling], seed=prompt, grammar=grammar)
    return request("plain", target.prompts[prompt], asked)


def with_drafter(way: SpeculativeParams, drafter: str) -> SpeculativeParams:
    # Small draft models are unsure of much.
    options = {"min_confidence": 0.02} if drafter in WITH_MODELS - {"medusa"} else {}
    return replace(way, draft_strategy=drafter, options=options, verification="match")


def expect_same(
    target: EveryDrafterTarget,
    streams: Streams,
    situation: str,
    ways: Sequence[tuple[str, SpeculativeParams]],
) -> None:
    """Serves a request per (drafter, way). Samplings and prompts go round, beginning elsewhere in each
    situation, so that every way meets every sampling."""
    shift = list(SITUATIONS).index(situation)
    asked: dict[str, tuple[GenerationRequest, Driver]] = {}
    for index, (drafter, way) in enumerate(ways, shift):
        key = list(SAMPLINGS)[index % len(SAMPLINGS)], index // len(SAMPLINGS) % NUM_PROMPTS
        subject = replace(
            bare(target, *key),
            request_id=f"{drafter}-{index}",
            speculative=with_drafter(way, drafter),
            prediction_token_ids=partly_right(streams[key].token_ids["plain"]),
        )
        asked[subject.request_id] = subject, streams[key]
    driver = SITUATIONS[situation](target, [each for each, _ in asked.values()])
    accounts: dict[str, list[int]] = {drafter: [0, 0] for drafter, _ in ways}
    for name, (each, expected) in asked.items():
        finish = driver.finishes[name]
        assert driver.token_ids[name] == expected.token_ids["plain"], each
        assert finish.reason == expected.finishes["plain"].reason
        assert finish.speculative.num_failed_drafts == 0
        account = accounts[each.speculative.draft_strategy]
        account[0] += finish.speculative.num_accepted_tokens
        account[1] += finish.speculative.num_draft_tokens
    for drafter, (num_accepted, num_drafted) in accounts.items():
        if drafter == "none":
            assert num_drafted == 0
        elif len(accounts) == 1:
            assert 0 < num_accepted <= num_drafted
            assert num_accepted < num_drafted or drafter == "grammar", "no draft was wrong"
        else:  # Among others, grammar may have nothing to force.
            assert num_drafted > 0 or drafter == "grammar", drafter
    counts = driver.core.pool.counts()
    assert counts["free"] + counts["cached"] == sum(counts.values())
    assert traces_of(driver.core, driver.finishes) == []


def test_every_drafter_is_in_the_matrix(target: EveryDrafterTarget) -> None:
    assert set(target.core(Setup()).speculation.drafters) == set(DRAFTERS)


@pytest.mark.parametrize("sampling", sorted(SAMPLINGS.keys() - {"json"}))
def test_plain_stream_is_the_one_transformers_writes(
    target: EveryDrafterTarget, streams: Streams, sampling: str
) -> None:
    for prompt in range(NUM_PROMPTS):
        expected = target.recomputed(bare(target, sampling, prompt), NUM_TOKENS)
        assert streams[sampling, prompt].token_ids["plain"] == expected


def test_streams_differ_between_prompts_seeds_and_samplings(streams: Streams) -> None:
    """Else equality would say little."""
    assert len({tuple(each.token_ids["plain"]) for each in streams.values()}) == len(streams)
    reasons = {each.finishes["plain"].reason for each in streams.values()}
    assert reasons == {"length", "stop"}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_drafting_changes_no_token(
    target: EveryDrafterTarget, streams: Streams, situation: str, drafter: str
) -> None:
    # With nobody to share steps they are dear: some gammas as chains, the others as trees.
    ways = [way for index, way in enumerate(WAYS) if situation != "alone" or index % 4 in (1, 2)]
    expect_same(target, streams, situation, [(drafter, way) for way in ways])


@pytest.mark.parametrize("situation", sorted(SITUATIONS.keys() - {"alone"}))
def test_all_drafters_in_one_batch_change_no_token(
    target: EveryDrafterTarget, streams: Streams, situation: str
) -> None:
    """Every drafter twice, as a chain and as a tree, under other policies in each situation."""
    shift = list(SITUATIONS).index(situation)
    kinds = (6, 8, 9)
    ways = [
        (drafter, WAYS[kinds[(index + shift + tree) % 3] + 10 * tree])
        for index, drafter in enumerate(DRAFTERS)
        for tree in (False, True)
    ]
    expect_same(target, streams, situation, ways)
