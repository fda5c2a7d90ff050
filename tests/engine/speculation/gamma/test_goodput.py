from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request.params import SpeculativeParams
from engine.speculation.gamma.goodput import GoodputPolicy
from engine.speculation.gamma.policy import DraftCandidate, Grant
from worlds.gamma_cases import (
    DictatedCost,
    best_goodput,
    chain_candidate,
    goodput,
    is_parent_closed,
    load_of,
    plain_grants,
    random_candidates,
    random_costs,
)
from worlds.lanes import examples

GOOD = [0.9**k for k in range(1, 9)]
BAD = [0.05**k for k in range(1, 9)]


def flat(num_rows: int) -> float:
    return 1.0 + 0.001 * num_rows


def steep(num_rows: int) -> float:
    return float(num_rows)


@settings(max_examples=examples(400))
@given(candidates=random_candidates(), cost=random_costs(), spare=st.integers(0, 20))
def test_what_is_granted_is_the_best_within_every_bound(
    candidates: list[DraftCandidate], cost: DictatedCost, spare: int
) -> None:
    """Flat arrays grant what the rule grants node by node, and no other grant writes more tokens."""
    load = load_of(len(candidates), len(candidates) + 1, spare)
    grants = GoodputPolicy(cost, hysteresis=0.0).grant(candidates, load)
    assert [list(grant.nodes) for grant in grants] == plain_grants(candidates, load, cost)
    assert sum(grant.gamma for grant in grants) <= spare
    left = spare
    for candidate, grant in zip(candidates, grants, strict=True):
        nodes, params = list(grant.nodes), candidate.params
        assert nodes == sorted(set(nodes))
        assert is_parent_closed(candidate.tree, nodes)
        most = min(params.max_speculative_tokens, candidate.max_nodes, len(candidate.tree))
        floor = min(params.min_speculative_tokens, most, left)
        left -= floor
        assert floor <= len(nodes) <= most
        assert (grant.reason == "") == (len(nodes) == len(candidate.tree) > 0)
    if spare >= 6:
        achieved = goodput(candidates, grants, load, cost)
        assert achieved == pytest.approx(best_goodput(candidates, load, cost), rel=1e-12)


@settings(max_examples=examples(200))
@given(candidates=random_candidates(with_floors=False), cost=random_costs())
def test_no_node_is_granted_that_is_less_likely_than_what_it_says_before(
    candidates: list[DraftCandidate], cost: DictatedCost
) -> None:
    load = load_of(len(candidates), len(candidates) + 1, 20)
    policy = GoodputPolicy(cost)
    num_nodes = sum(each.max_nodes for each in candidates)
    prices = policy.row_prices(load, num_nodes)
    assert policy.row_prices(load, num_nodes, first_only=True) == pytest.approx(prices[:1] or [0.0])
    granted = [
        candidate.survivals[node]
        for candidate, grant in zip(candidates, policy.grant(candidates, load), strict=True)
        for node in grant.nodes
    ]
    granted.sort(reverse=True)
    assert all(survival > prices[0] for survival in granted)
    for survival, price in zip(granted, prices, strict=False):
        assert survival >= price - 1e-12


@settings(max_examples=examples(200))
@given(cost=random_costs(), most=st.integers(1, 20), stride=st.integers(1, 4))
def test_a_price_is_what_a_row_costs_on_average_up_to_where_that_is_least(
    cost: DictatedCost, most: int, stride: int
) -> None:
    load = load_of(1, 1, most)
    prices = GoodputPolicy(cost).row_prices(load, most, stride)
    table = cost.step_seconds_table(1, most, load.num_kv_tokens, load.num_requests)
    rate = load.expected_tokens / (load.other_seconds + table[0])
    at = range(0, most + 1, stride)
    assert list(prices) == pytest.approx(
        [
            rate * min((table[end] - table[start]) / (end - start) for end in at if end > start)
            for start in at[:-1]
        ]
    )


@settings(max_examples=examples(100))
@given(
    steps=st.lists(
        st.tuples(random_candidates(with_floors=False), random_costs()), min_size=2, max_size=5
    )
)
def test_hysteresis_gives_up_two_per_cent_at_most_and_is_never_worse_than_gamma_zero(
    steps: list[tuple[list[DraftCandidate], DictatedCost]],
) -> None:
    now = DictatedCost(flat)
    policy = GoodputPolicy(now)
    for candidates, cost in steps:
        now.seconds = cost.seconds
        load = load_of(len(candidates))
        achieved = goodput(candidates, policy.grant(candidates, load), load, cost)
        plain = goodput(candidates, [Grant((), "") for _ in candidates], load, cost)
        assert achieved >= plain
        assert achieved * 1.02 >= best_goodput(candidates, load, cost) * (1 - 1e-12)


def test_what_was_granted_before_is_not_kept_where_nothing_writes_faster() -> None:
    cost = DictatedCost(lambda rows: 0.7 + 0.3 * rows)
    policy = GoodputPolicy(cost)
    candidates = [chain_candidate("one", [0.7, 0.1, 0.1])]
    assert [grant.gamma for grant in policy.grant(candidates, load_of(1))] == [1]
    # One node now brings 1.7 tokens in 1.71 seconds. Three would be cheap, and are not likely.
    cost.seconds = lambda rows: 1.0 if rows == 1 else 1.69 + 0.01 * rows
    assert [grant.gamma for grant in policy.grant(candidates, load_of(1))] == [0]


def test_a_steep_cost_cuts_everyone_to_zero_and_cheap_rows_bring_them_back() -> None:
    cost = DictatedCost(flat)
    policy = GoodputPolicy(cost)
    candidates = [chain_candidate(f"r{rank}", GOOD) for rank in range(4)]
    gammas = []
    for seconds in (flat, steep, steep, flat):
        cost.seconds = seconds
        grants = policy.grant(candidates, load_of(4))
        gammas.append([grant.gamma for grant in grants])
    assert gammas == [[8] * 4, [0] * 4, [0] * 4, [8] * 4]


def test_beside_prompts_a_row_has_to_bring_as_much_as_without_them() -> None:
    """A row costs half of a plain step, however long the step's prompts make it."""
    likely, unlikely = chain_candidate("likely", [0.6]), chain_candidate("unlikely", [0.4])
    policy = GoodputPolicy(DictatedCost(lambda rows: 100.0 + 0.5 * (rows - 102)))
    load = load_of(2, num_rows=102)
    grants = policy.grant([likely, unlikely], load._replace(prompt_seconds=98.0))
    assert [grant.gamma for grant in grants] == [1, 0]
    assert [grant.gamma for grant in policy.grant([likely, unlikely], load)] == [1, 1]


def test_overload_and_low_acceptance_are_told_apart() -> None:
    def loaded_only(num_rows: int) -> float:
        return 1.0 if num_rows <= 8 else float(num_rows - 7)

    policy = GoodputPolicy(DictatedCost(lambda rows: loaded_only(rows) + 0.06 * rows))
    good, bad = chain_candidate("good", GOOD), chain_candidate("bad", BAD)
    reasons = [grant.reason for grant in policy.grant([good, bad], load_of(16))]
    assert reasons == ["overload", "low_acceptance"]
    # A request alone is never overloaded.
    alone = GoodputPolicy(DictatedCost(steep)).grant([good], load_of(1))
    assert alone == [Grant([], "low_acceptance")]


def test_a_survival_that_rises_downward_does_not_orphan_a_node() -> None:
    candidate = chain_candidate(
        "r", [0.5, 0.5000001, 0.6], SpeculativeParams(max_speculative_tokens=2)
    )
    assert GoodputPolicy(DictatedCost(flat)).grant([candidate], load_of(1))[0].nodes == [0, 1]


def test_who_limits_a_grant_is_named() -> None:
    policy = GoodputPolicy(DictatedCost(flat))
    client = chain_candidate("client", GOOD, SpeculativeParams(max_speculative_tokens=2))
    full = chain_candidate("full", GOOD, max_nodes=3)
    none_left = chain_candidate("none", [], max_nodes=0)
    silent = chain_candidate("silent", [])
    refused = chain_candidate("refused", [], SpeculativeParams(max_speculative_tokens=0))
    grants = policy.grant([client, full, none_left, silent, refused], load_of(5))
    assert [(grant.gamma, grant.reason) for grant in grants] == [
        (2, "client_cap"),
        (3, "client_cap"),
        (0, "client_cap"),
        (0, "no_match"),
        (0, "client_cap"),
    ]


def test_small_gains_do_not_make_gamma_flap() -> None:
    cost = DictatedCost(lambda num_rows: 1.0 + 0.5 * num_rows)
    policy = GoodputPolicy(cost)
    # Break-even for one node on one request: 1.5 -> 2.0 seconds, so a survival of a third.
    gammas = [
        policy.grant([chain_candidate("r", [survival])], load_of(1))[0].gamma
        for survival in (0.30, 0.34, 0.32, 0.34, 0.60, 0.35, 0.34, 0.33)
    ]
    # The last is a loss, if a small one: nothing holds a grant below gamma 0.
    assert gammas == [0, 0, 0, 0, 1, 1, 1, 0]


def test_one_drafting_request_among_many_is_not_drowned_by_hysteresis() -> None:
    """It gains far less than two per cent of a batch of 64, but two fifths of its own speed."""
    cost = DictatedCost(lambda num_rows: 1.0 + 0.005 * num_rows)
    policy = GoodputPolicy(cost)
    others = [chain_candidate(f"r{rank}", [0.001]) for rank in range(63)]
    assert all(grant.gamma == 0 for grant in policy.grant(others, load_of(64)))
    grants = policy.grant([*others, chain_candidate("drafts", [0.4])], load_of(64))
    assert grants[-1].gamma == 1


def test_the_first_draft_of_a_request_is_held_to_num_tokens() -> None:
    params = SpeculativeParams(num_speculative_tokens=3, max_speculative_tokens=8)
    candidate = replace(chain_candidate("a", GOOD, params), is_first=True)
    policy = GoodputPolicy(DictatedCost(flat))
    assert policy.grant([candidate], load_of(1))[0] == Grant([0, 1, 2], "client_cap")
    candidate.is_first = False
    assert policy.grant([candidate], load_of(1))[0].gamma == 8


def test_a_target_rate_is_the_least_that_is_expected_of_a_grant() -> None:
    survivals = [0.9, 0.8, 0.7, 0.3, 0.2]  # means: .9 .85 .8 .675 .58
    for rate, gamma in ((0.95, 0), (0.85, 2), (0.79, 3), (0.6, 4), (0.5, 5)):
        params = SpeculativeParams(target_acceptance_rate=rate)
        grant = GoodputPolicy(DictatedCost(flat)).grant(
            [chain_candidate("a", survivals, params)], load_of(1)
        )[0]
        assert grant.gamma == gamma
        assert grant.reason == ("" if gamma == 5 else "policy")
