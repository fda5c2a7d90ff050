"""Rules of every policy, and their turns in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafters.tree import DraftTree
from engine.request.params import SpeculativeParams
from engine.speculation.gamma import gamma_policy_names, policy
from engine.speculation.gamma.fixed import FixedPolicy
from engine.speculation.gamma.policy import DraftCandidate, GammaPolicy, gamma_policy
from worlds.gamma_cases import DictatedCost, chain_candidate, grants_of, load_of

FIXED = SpeculativeParams(adaptive_depth="fixed", num_speculative_tokens=4)
TARGET = SpeculativeParams(
    adaptive_depth="target_rate", num_speculative_tokens=3, min_speculative_tokens=1
)
GOODPUT = SpeculativeParams(adaptive_depth="goodput")
HALF = SpeculativeParams(adaptive_depth="half", max_speculative_tokens=6)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> type[GammaPolicy]:
    """A policy as a file of one's own would have it."""
    monkeypatch.setattr(policy, "_POLICIES", dict(policy._POLICIES))

    @gamma_policy("half", "half of the most", ["max_speculative_tokens"])
    class Half(GammaPolicy):
        def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:  # noqa: ARG002
            return params.max_speculative_tokens // 2

    return Half


def test_a_new_policy_needs_only_its_registration(half: type[GammaPolicy]) -> None:
    assert gamma_policy_names() == ("fixed", "half", "target_rate", "goodput")
    (grant,) = grants_of(DictatedCost(float), [chain_candidate("r", [0.5] * 8, HALF)], load_of(1))
    assert (list(grant.nodes), grant.reason) == ([0, 1, 2], "policy")
    assert not half.weighs_cost
    with pytest.raises(ValueError, match="two gamma policies named 'half'"):
        gamma_policy("half", "again", [])(GammaPolicy)
    with pytest.raises(ValueError, match=r"'quarter' reads \['num_spec'\], which no request has"):
        gamma_policy("quarter", "reads a field that is none", ["num_spec"])


def test_policies_that_weigh_cost_come_after_those_that_do_not(half: type[GammaPolicy]) -> None:
    """Their rows are facts to it: one spare row goes to the policy that grants at any price."""
    assert not half.weighs_cost
    cost = DictatedCost(lambda _: 1.0)
    candidates = [chain_candidate("goodput", [0.9], GOODPUT), chain_candidate("half", [0.1], HALF)]
    assert [each.gamma for each in grants_of(cost, candidates, load_of(2, None, 1))] == [0, 1]


def test_fixed_grants_the_first_nodes_in_the_drafters_order_and_names_what_left_it_empty() -> None:
    tree = DraftTree([1, 2, 3, 4, 5], [-1, 0, -1, 2, 3], [0] * 5)
    candidates = [
        DraftCandidate("r", FIXED, tree, [0.1] * 5, 64),
        chain_candidate("silent", [], FIXED),
        DraftCandidate("full", FIXED, DraftTree(), [], 0),
        chain_candidate("off", [], replace(FIXED, num_speculative_tokens=0)),
        chain_candidate("short", [0.5], FIXED),
    ]
    first, *others = FixedPolicy(DictatedCost(float)).grant(candidates, load_of(5))
    assert (list(first.nodes), first.reason) == ([0, 1, 2, 3], "client_cap")
    assert [grant.reason for grant in others] == ["no_match", "client_cap", "client_cap", ""]


def test_each_request_is_ruled_by_its_own_policy() -> None:
    cost = DictatedCost(lambda num_rows: 1.0 + 0.1 * num_rows)
    good = [0.9**k for k in range(1, 9)]
    candidates = [
        chain_candidate("goodput", [0.001] * 8, GOODPUT),
        chain_candidate("fixed", good, FIXED),
        chain_candidate("target", good, TARGET),
    ]
    assert [each.gamma for each in grants_of(cost, candidates, load_of(3))] == [0, 4, 3]


def test_rows_granted_by_the_other_policies_are_base_load_to_goodput() -> None:
    """Rows are free up to eight and dear beyond; fixed drafts fill the free ones first."""
    cost = DictatedCost(lambda num_rows: 1.0 if num_rows <= 8 else float(num_rows))
    willing = chain_candidate("goodput", [0.5] * 8, GOODPUT)
    fixed = chain_candidate("fixed", [0.5] * 8, FIXED)
    assert grants_of(cost, [willing], load_of(2))[0].gamma == 6
    assert grants_of(cost, [willing, fixed], load_of(2))[0].gamma == 2


def test_all_grants_together_stay_within_the_spare_rows() -> None:
    candidates = [
        chain_candidate(params.adaptive_depth, [0.5] * 8, params)
        for params in (GOODPUT, TARGET, FIXED)
    ]
    for spare in range(12):
        grants = grants_of(DictatedCost(lambda _: 1.0), candidates, load_of(3, None, spare))
        assert sum(grant.gamma for grant in grants) == spare


def test_time_spent_drafting_is_spent_whatever_is_granted() -> None:
    """A longer fixed part of a step makes more rows per step worth while."""
    cost = DictatedCost(lambda num_rows: 1.0 + 0.5 * num_rows)
    loads = (load_of(1)._replace(draft_seconds=seconds) for seconds in (0.0, 10.0))
    candidates = [chain_candidate("r", [0.3], GOODPUT)]
    gammas = [grants_of(cost, candidates, load)[0].gamma for load in loads]
    assert gammas == [0, 1]
