"""Drafts that are granted whole or not at all, under every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request.params import SpeculativeParams
from engine.speculation.gamma.goodput import MAX_NUM_KINDS, GoodputPolicy
from engine.speculation.gamma.policy import DraftCandidate, Load, Traffic
from worlds.gamma_cases import DictatedCost, chain_candidate, grants_of, load_of
from worlds.lanes import examples

PARAMS = SpeculativeParams(
    adaptive_depth="goodput", num_speculative_tokens=2, max_speculative_tokens=16
)


def whole(
    num_nodes: int = 8,
    params: SpeculativeParams = PARAMS,
    request_id: str = "r",
    survival: float = 0.0,
) -> DraftCandidate:
    """Its survivals alone are not worth a row."""
    survivals = [survival] * num_nodes
    return replace(
        chain_candidate(request_id, survivals, params, drafter="window"), all_or_nothing=True
    )


def rows_at(seconds: float) -> DictatedCost:
    return DictatedCost(lambda num_rows: 1.0 + seconds * num_rows)


@pytest.mark.parametrize("policy", ["fixed", "target_rate"])
def test_fixed_gammas_grant_what_fits_whole_and_nothing_of_what_does_not(policy: str) -> None:
    params = SpeculativeParams(adaptive_depth=policy, num_speculative_tokens=8)
    for num_nodes, spare, gamma, reason in (
        (8, 8, 8, ""),
        (5, 8, 5, ""),
        (8, 7, 0, "overload"),
        (9, 99, 0, "client_cap" if policy == "fixed" else "policy"),
    ):
        load = load_of(1, None, spare)
        (grant,) = grants_of(rows_at(0.0), [whole(num_nodes, params)], load)
        assert (grant.gamma, grant.reason) == (gamma, reason)


@settings(max_examples=examples(200))
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    accepted=st.lists(st.integers(0, 4), max_size=12),
    spare=st.integers(0, 24),
    row_seconds=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    floor=st.integers(0, 1),
)
def test_goodput_never_cuts_one_and_stays_within_the_rows(
    sizes: list[int], accepted: list[int], spare: int, row_seconds: float, floor: int
) -> None:
    policy = GoodputPolicy(rows_at(row_seconds))
    params = replace(PARAMS, min_speculative_tokens=floor)
    for num_accepted in [0, *accepted]:
        candidates = [whole(size, params, f"r{rank}") for rank, size in enumerate(sizes)]
        candidates.append(chain_candidate("chain", [0.8, 0.6, 0.4], PARAMS))
        grants = policy.grant(candidates, load_of(len(candidates), None, spare))
        assert sum(grant.gamma for grant in grants) <= spare
        for candidate, grant in zip(candidates, grants, strict=True):
            if candidate.all_or_nothing:
                assert grant.gamma in (0, len(candidate.tree))
                assert (grant.reason == "") == (grant.gamma > 0)
            policy.observe(candidate.request_id, grant.gamma, num_accepted)


def granted(
    policy: GoodputPolicy, num_accepted: int, num_steps: int, load: Load, size: int = 8
) -> str:
    """One letter per step: ``x`` verified, ``-`` refused, ``.`` not asked."""
    story = ""
    for _ in range(num_steps):
        asked = policy.num_to_propose("r", PARAMS) > 0
        (grant,) = policy.grant([whole(size if asked else 0)], load)
        policy.observe("r", grant.gamma, num_accepted)
        story += "x" if grant.gamma else "-" if asked else "."
    return story


def test_what_drafts_gain_on_average_pays_for_rows_that_their_survivals_never_would() -> None:
    """Eight rows cost 0.4 of a step; one token in two drafts pays for them, one in five does not."""
    policy = GoodputPolicy(rows_at(0.05))
    story = ""
    for step in range(200):
        story += granted(policy, step % 2, 1, load_of(1))
    assert set(story) == {"x"}
    poor = GoodputPolicy(rows_at(0.05))
    story = ""
    for step in range(200):
        story += granted(poor, int(step % 5 == 0), 1, load_of(1))
    assert story.count("x") < 70


def test_a_drafter_that_gains_nothing_is_tried_less_and_less() -> None:
    story = granted(GoodputPolicy(rows_at(0.05)), 0, 1000, load_of(1))
    first, *trials = [run for run in story.replace("-", ".").split(".") if run]
    assert len(first) > 6  # what is hoped for at first, then the first trial
    assert {len(run) for run in trials} == {6}
    rests = [len(run) for run in story.replace("-", ".").split("x") if run]
    assert rests[:6] == [6, 12, 24, 48, 96, 192]
    assert story.count("x") < 60


def test_a_drafter_that_comes_to_gain_is_taken_back() -> None:
    policy = GoodputPolicy(rows_at(0.05))
    granted(policy, 0, 100, load_of(1))
    story = granted(policy, 3, 400, load_of(1))
    assert set(story[story.index("x") :]) == {"x"}


def test_under_load_nothing_is_tried_and_the_reason_says_so() -> None:
    cost = rows_at(0.05)
    policy = GoodputPolicy(cost)
    granted(policy, 2, 20, load_of(1))
    crowd = load_of(64)
    (grant,) = policy.grant([whole()], crowd)
    assert (grant.gamma, grant.reason) == (0, "overload")
    assert "x" not in granted(policy, 2, 100, crowd)
    assert "x" in granted(policy, 2, 40, load_of(1))


def test_new_requests_go_on_where_others_of_their_kind_ended() -> None:
    policy = GoodputPolicy(rows_at(0.05))
    granted(policy, 0, 300, load_of(1))
    policy.forget("r")
    policy.observe("r", 8, 3)  # must not count for anybody
    story = granted(policy, 0, 400, load_of(1))
    assert story.count("x") <= 12  # the end of a trial, and another
    # Where others gained, they do not rest.
    policy = GoodputPolicy(rows_at(0.05))
    granted(policy, 1, 300, load_of(1))
    policy.forget("r")
    assert granted(policy, 1, 30, load_of(1)) == "x" * 30


def test_one_request_tries_for_all_of_its_kind() -> None:
    policy = GoodputPolicy(rows_at(0.02))
    most = 0
    for step in range(300):
        candidates = [
            whole(8 if policy.num_to_propose(each, PARAMS) > 0 else 0, request_id=each)
            for each in ("a", "b", "c")
        ]
        grants = policy.grant(candidates, load_of(3))
        if step > 60:
            most = max(most, sum(grant.gamma > 0 for grant in grants))
        for each, grant in zip(candidates, grants, strict=True):
            policy.observe(each.request_id, grant.gamma, 0)
    assert most == 1


def test_kinds_are_remembered_up_to_a_number_and_those_of_open_requests_always() -> None:
    policy = GoodputPolicy(rows_at(0.05))

    def others(number: int) -> None:
        for rank in range(number):
            policy.open(f"s{rank}", Traffic("ngram", f"tenant {rank}"))
            policy.forget(f"s{rank}")

    policy.open("r", Traffic("window"))
    granted(policy, 0, 100, load_of(1))
    others(MAX_NUM_KINDS - 1)
    policy.forget("r")
    policy.open("r", Traffic("window"))
    others(MAX_NUM_KINDS)
    story = granted(policy, 0, 60, load_of(1))
    assert story.count("x") <= 12  # it goes on where it was
    policy.forget("r")
    policy.open("r", Traffic("window"))
    assert granted(policy, 0, 7, load_of(1)) == "x" * 7  # as at first


def test_a_likely_draft_is_granted_whatever_others_gained_and_its_rows_count() -> None:
    policy = GoodputPolicy(rows_at(0.05))
    granted(policy, 0, 50, load_of(1))
    likely = [whole(8, request_id=name, survival=0.5) for name in "ab"]
    grants = policy.grant(likely, load_of(2, num_spare_rows=12))
    assert [(grant.gamma, grant.reason) for grant in grants] == [(8, ""), (0, "overload")]


def test_time_spent_drafting_has_to_be_earned_too() -> None:
    """Half a token per draft pays for rows at a hundredth of a step, not for drafting at half of one:
    among trials, refusals show it."""
    for seconds, is_granted in ((0.0, True), (0.5, False)):
        policy = GoodputPolicy(
            DictatedCost(lambda num_rows: 1.0 + 0.01 * num_rows, {"window": seconds})
        )
        load = load_of(1)._replace(draft_seconds=seconds)
        for step in range(40):
            (grant,) = policy.grant([whole()], load)
            policy.observe("r", 8, step % 2)
        grants = [policy.grant([whole()], load)[0].gamma for _ in range(8)]
        assert (min(grants) == 8) == is_granted


def test_floors_and_target_rates_hold_for_whole_drafts_and_limits_are_named() -> None:
    policy = GoodputPolicy(rows_at(1.0))
    (floor,) = policy.grant([whole(8, replace(PARAMS, min_speculative_tokens=1))], load_of(1))
    assert floor.gamma == 8
    policy = GoodputPolicy(rows_at(0.0))
    (strict,) = policy.grant([whole(8, replace(PARAMS, target_acceptance_rate=0.5))], load_of(1))
    assert (strict.gamma, strict.reason) == (0, "policy")
    (mild,) = policy.grant([whole(8, replace(PARAMS, target_acceptance_rate=0.1))], load_of(1))
    assert mild.gamma == 8
    policy = GoodputPolicy(rows_at(0.0))
    wide = replace(PARAMS, max_speculative_tokens=4)
    assert policy.grant([whole(8, wide)], load_of(1))[0].reason == "client_cap"
    assert policy.grant([whole(8)], load_of(1, num_spare_rows=7))[0].reason == "overload"
    assert policy.grant([whole(0)], load_of(1))[0].reason == "no_match"
    # A refused one leaves its rows to others.
    params = SpeculativeParams(adaptive_depth="fixed", num_speculative_tokens=8)
    candidates = [whole(8, params), chain_candidate("other", [0.5] * 6, params)]
    grants = grants_of(rows_at(0.0), candidates, load_of(2, None, 7))
    assert [grant.gamma for grant in grants] == [0, 6]
