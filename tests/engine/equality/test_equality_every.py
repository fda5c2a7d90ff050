"""Promise 1 for every drafter in the registry, those with models and heads included, in fp32.

``test_equality.py`` goes deep for drafters that need no model. Here every drafter that is registered
passes through every situation, by itself and with all the others in one batch; a new one is taken up
by its name, and fails here until the tiny target can lend it what it asks for. Requests differ in
sampling, policy and shape; streams are compared with gamma 0, alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from drafters.registry import build_drafters, drafter_names
from engine.request.params import GenerationRequest, SpeculativeParams
from worlds.engine_harness import Driver, Setup, circle_prompt, drafting, request, traces_of
from worlds.equality import (
    DRAFTERS,
    NUM_PROMPTS,
    SAMPLINGS,
    SITUATIONS,
    WIDTHS,
    partly_right,
    plain,
)
from worlds.every_drafter import EveryDrafterTarget

pytestmark = pytest.mark.slow

WITH_MODELS = sorted(set(drafter_names()) - set(build_drafters()))
POLICIES = {
    "fixed": drafting("", "fixed", 6),
    "target_rate": replace(drafting("", "target_rate", 3), target_acceptance_rate=0.5),
    "goodput": drafting("", "goodput", 8),
}
SHAPES = [(policy, width) for width in WIDTHS.values() for policy in POLICIES.values()]
Streams = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> EveryDrafterTarget:
    torch.set_num_threads(1)
    return EveryDrafterTarget(tmp_path_factory.mktemp("near"))


@pytest.fixture(scope="module")
def plain_streams(target: EveryDrafterTarget) -> Streams:
    """By sampling and prompt."""
    return {
        (name, index): plain(
            target, request("plain", circle_prompt(index), replace(sampling, seed=index))
        )
        for name, sampling in SAMPLINGS.items()
        for index in range(NUM_PROMPTS)
    }


def wanted(drafter: str, kind: int) -> SpeculativeParams:
    """The ``kind``-th policy and shape for a drafter."""
    policy, width = SHAPES[kind % len(SHAPES)]
    # Small draft models are unsure of much.
    options = {"min_confidence": 0.02} if drafter in WITH_MODELS and drafter != "medusa" else {}
    return replace(
        policy, draft_strategy=drafter, tree_width=width, options=options, verification="match"
    )


def subjects(
    kinds: Sequence[tuple[str, int]], streams: Streams, shift: int
) -> dict[str, tuple[GenerationRequest, list[int]]]:
    """By id, a request per (drafter, kind of drafting) and the text it has to write. Samplings,
    prompts and seeds go round, beginning at ``shift``."""
    found = {}
    names = list(SAMPLINGS)
    for index, (drafter, kind) in enumerate(kinds):
        sampling = names[(index + shift) % len(names)]
        prompt = (index + shift) % NUM_PROMPTS
        text = streams[sampling, prompt]
        each = request(
            f"{drafter}-{index}",
            circle_prompt(prompt),
            replace(SAMPLINGS[sampling], seed=prompt),
            wanted(drafter, kind),
            prediction=partly_right(text),
        )
        found[each.request_id] = each, text
    return found


def expect_texts(driver: Driver, asked: dict[str, tuple[GenerationRequest, list[int]]]) -> None:
    num_drafted: dict[str, int] = {}
    for name, (each, text) in asked.items():
        finish = driver.finishes[name]
        assert driver.token_ids[name] == text, each
        assert finish.reason == "length"
        assert finish.speculative.num_failed_drafts == 0
        drafter = each.speculative.draft_strategy
        num_drafted[drafter] = num_drafted.get(drafter, 0) + finish.speculative.num_draft_tokens
    # Nothing is forced here.
    assert {drafter for drafter, num in num_drafted.items() if not num} <= {"none", "grammar"}


def expect_nothing_left(driver: Driver) -> None:
    counts = driver.core.pool.counts()
    assert counts["free"] + counts["cached"] == sum(counts.values())
    assert traces_of(driver.core, driver.finishes) == []


def test_every_drafter_is_in_the_matrix(target: EveryDrafterTarget) -> None:

    assert set(target.core(Setup()).speculation.drafters) == set(drafter_names())
    assert set(DRAFTERS) | set(WITH_MODELS) == set(drafter_names())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", WITH_MODELS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_drafter_with_a_model_changes_no_token(
    target: EveryDrafterTarget, plain_streams: Streams, situation: str, drafter: str
) -> None:
    shift = list(SITUATIONS).index(situation)
    asked = subjects([(drafter, kind) for kind in range(len(SHAPES))], plain_streams, shift)
    driver = SITUATIONS[situation](target, [each for each, _ in asked.values()])
    expect_texts(driver, asked)
    expect_nothing_left(driver)


@pytest.mark.parametrize("situation", sorted(set(SITUATIONS) - {"alone"}))
def test_all_drafters_in_one_batch_change_no_token(
    target: EveryDrafterTarget, plain_streams: Streams, situation: str
) -> None:
    """Every drafter twice, as a chain and as a tree, under other policies in each situation."""
    shift = list(SITUATIONS).index(situation)
    kinds = [
        (drafter, (index + shift + tree) % 3 + 3 * tree)
        for tree in (False, True)
        for index, drafter in enumerate(drafter_names())
    ]
    asked = subjects(kinds, plain_streams, shift)
    driver = SITUATIONS[situation](target, [each for each, _ in asked.values()])
    expect_texts(driver, asked)
    expect_nothing_left(driver)
