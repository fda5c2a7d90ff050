"""A tenant's drafts do not depend on what other tenants were written: for every drafter in the registry,
in the engine, over blocks and stores that change hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from drafters.registry import drafter_names
from engine.request.params import GenerationRequest, SamplingParams
from engine.schedule.request import ScheduledRequest
from worlds.engine_harness import Driver, Setup, circle_prompt, drafting, request
from worlds.every_drafter import EveryDrafterTarget

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=16, temperature=0.0)
COUNTS_OF_ALL = {"auto"}
"""Drafters whose choice of draft depends on how often drafts of all requests were right. They may
draft other tokens, but none that only another tenant's text would bring up."""


def wanted(
    target: EveryDrafterTarget, name: str, drafter: str, cache_salt: str
) -> list[GenerationRequest]:
    """A tenant's requests, nearly the same twice. Chains as long as asked for: how a draft model's trees
    branch depends on how often it was right, whoever's text that was."""
    info = target.core(Setup()).speculation.drafters[drafter].info
    options = {"share": True, "min_confidence": 0.0}
    known = {option.name for option in info.options}
    given = {option: value for option, value in options.items() if option in known}
    speculative = drafting(drafter, "fixed", 6, **given)
    prompt = circle_prompt(5 if cache_salt == "mine" else 9)
    return [
        request(
            f"{name}-{index}",
            prompt[index:],
            GREEDY,
            speculative,
            cache_salt=cache_salt,
            prediction=circle_prompt(5),
        )
        for index in range(2)
    ]


def drafts_of(
    target: EveryDrafterTarget, drafter: str, before: Sequence[GenerationRequest]
) -> list[tuple[list[int], list[int], list[int]]]:
    """Returns the drafts for a tenant at every step, after others' requests ``before``, in blocks that
    were theirs."""
    core = target.core(Setup(num_blocks=16, max_num_seqs=2))
    driver = Driver(core).run(*before)
    proposed: list[tuple[list[int], list[int], list[int]]] = []
    granting: Any = core.speculation._granting
    grant = granting.grant

    def watched(drafting: Sequence[ScheduledRequest], *rest: Any) -> None:
        proposed.extend(
            (
                list(each.request.token_ids),
                list(each.proposal.token_ids),
                list(each.proposal.parents),
            )
            for each in drafting
        )
        grant(drafting, *rest)

    granting.grant = watched
    for each in wanted(target, "subject", drafter, "mine"):
        driver.run(each)
    return proposed


@pytest.mark.parametrize("drafter", sorted(set(drafter_names()) - {"none", "grammar"}))
def test_another_tenants_texts_change_no_draft(target: EveryDrafterTarget, drafter: str) -> None:
    alone = drafts_of(target, drafter, [])
    assert any(token_ids for _, token_ids, _ in alone)
    others = wanted(target, "other", drafter, "theirs") + wanted(target, "third", drafter, "third")
    beside = drafts_of(target, drafter, others)
    if drafter not in COUNTS_OF_ALL:
        assert beside == alone
    foreign = {token for each in others for token in each.prompt_token_ids}
    foreign -= {token for text, tokens, _ in alone for token in (*text, *tokens)}
    assert foreign
    assert not foreign & {token for _, tokens, _ in beside for token in tokens}
