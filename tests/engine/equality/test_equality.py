"""Promise 1, in fp32: the same tokens whatever drafts, how much, in what shape and beside whom.

Every stream is compared with that of the same request at gamma 0, alone, its prompt in one piece;
that one is compared with transformers' own forward over the whole text, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from worlds.engine_harness import (
    TinyTarget,
    circle_prompt,
    drafting,
    request,
)
from worlds.equality import (
    DRAFTERS,
    NUM_PROMPTS,
    NUM_TOKENS,
    SAMPLINGS,
    SITUATIONS,
    WIDTHS,
    partly_right,
    plain,
)

pytestmark = pytest.mark.slow


def gammas(drafter: str, width: int) -> list[SpeculativeParams]:
    fixed = [drafting(drafter, "fixed", gamma, width) for gamma in (0, 1, 2, 4, 7, 11, 16)]
    rates = [
        replace(drafting(drafter, "target_rate", 4, width), target_acceptance_rate=rate)
        for rate in (0.2, 0.8)
    ]
    return [*fixed, *rates, drafting(drafter, "goodput", 8, width)]


def subjects(
    drafter: str, sampling: SamplingParams, expected: Sequence[Sequence[int]]
) -> list[GenerationRequest]:
    """A request for every shape and gamma, over a few prompts and seeds; ``expected`` are the texts of
    these."""
    variants = [params for width in WIDTHS.values() for params in gammas(drafter, width)]
    return [
        request(
            f"subject-{index}",
            circle_prompt(index % NUM_PROMPTS),
            replace(sampling, seed=index % NUM_PROMPTS),
            params,
            prediction=partly_right(expected[index % NUM_PROMPTS]),
        )
        for index, params in enumerate(variants)
    ]


# --- situations: serve the subjects, and show that the situation came about ---


# --- references ---


@pytest.fixture(scope="module")
def plain_streams(tiny_target: TinyTarget) -> dict[tuple[str, int], list[int]]:
    """By sampling and prompt."""
    return {
        (name, index): plain(
            tiny_target, request("plain", circle_prompt(index), replace(sampling, seed=index))
        )
        for name, sampling in SAMPLINGS.items()
        for index in range(NUM_PROMPTS)
    }


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_stream_is_the_one_transformers_writes(
    tiny_target: TinyTarget, sampling: str, plain_streams: dict[tuple[str, int], list[int]]
) -> None:
    for index in range(NUM_PROMPTS):
        each = request("r", circle_prompt(index), replace(SAMPLINGS[sampling], seed=index))
        assert plain_streams[sampling, index] == tiny_target.recomputed(each, NUM_TOKENS)


def test_streams_differ_between_prompts_seeds_and_temperatures(
    plain_streams: dict[tuple[str, int], list[int]],
) -> None:
    """Else equality would say little."""
    assert len({tuple(stream) for stream in plain_streams.values()}) == len(plain_streams)


@pytest.mark.parametrize("drafter", [each for each in DRAFTERS if each != "grammar"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_drafting_changes_no_token(
    tiny_target: TinyTarget,
    situation: str,
    sampling: str,
    drafter: str,
    plain_streams: dict[tuple[str, int], list[int]],
) -> None:
    texts = [plain_streams[sampling, index] for index in range(NUM_PROMPTS)]
    asked = list(enumerate(subjects(drafter, SAMPLINGS[sampling], texts)))
    if situation == "alone":
        # With nobody to share steps they are dear: some gammas as chains, the others as trees.
        asked = [(index, each) for index, each in asked if index % 4 in (1, 2)]
    requests = [each for _, each in asked]
    driver = SITUATIONS[situation](tiny_target, requests)
    for index, each in asked:
        expected = texts[index % NUM_PROMPTS]
        assert driver.token_ids[each.request_id] == expected, each.speculative
        assert driver.finishes[each.request_id].reason == "length"
    accounts = [driver.finishes[each.request_id].speculative for each in requests]
    num_drafted = sum(account.num_draft_tokens for account in accounts)
    num_accepted = sum(account.num_accepted_tokens for account in accounts)
    if drafter == "none":
        assert num_drafted == 0
    else:
        assert 0 < num_accepted < num_drafted
