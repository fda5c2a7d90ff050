from __future__ import annotations

from drafters.tree import DraftTree
from engine.request.params import SpeculativeParams
from engine.speculation.gamma import DraftCandidate, GammaController
from worlds.gamma_cases import DictatedCost, chain_candidate, load_of

FIXED = SpeculativeParams(adaptive_depth="fixed", num_speculative_tokens=4)
TARGET = SpeculativeParams(
    adaptive_depth="target_rate", num_speculative_tokens=3, min_speculative_tokens=1
)
GOODPUT = SpeculativeParams(adaptive_depth="goodput")


def test_fixed_grants_the_first_nodes_in_the_drafters_order() -> None:
    controller = GammaController(DictatedCost(float))
    tree = DraftTree([1, 2, 3, 4, 5], [-1, 0, -1, 2, 3], [0] * 5)
    candidate = DraftCandidate("r", "ngram", FIXED, tree, [0.1] * 5, 64)
    grant = controller.grant([candidate], load_of(1))[0]
    assert (list(grant.nodes), grant.reason) == ([0, 1, 2, 3], "client_cap")


def test_fixed_names_what_left_it_empty() -> None:
    controller = GammaController(DictatedCost(float))
    candidates = [
        chain_candidate("silent", [], FIXED),
        DraftCandidate("full", "ngram", FIXED, DraftTree(), [], 0),
        chain_candidate(
            "off", [], SpeculativeParams(adaptive_depth="fixed", num_speculative_tokens=0)
        ),
        chain_candidate("short", [0.5], FIXED),
    ]
    grants = controller.grant(candidates, load_of(4))
    assert [grant.reason for grant in grants] == ["no_match", "client_cap", "client_cap", ""]


def test_each_request_is_ruled_by_its_own_policy() -> None:
    controller = GammaController(DictatedCost(lambda num_rows: 1.0 + 0.1 * num_rows))
    good = [0.9**k for k in range(1, 9)]
    candidates = [
        chain_candidate("goodput", [0.001] * 8, GOODPUT),
        chain_candidate("fixed", good, FIXED),
        chain_candidate("target", good, TARGET),
    ]
    grants = controller.grant(candidates, load_of(3))
    assert [grant.gamma for grant in grants] == [0, 4, 3]


def test_rows_granted_by_the_other_policies_are_base_load_to_goodput() -> None:
    """Rows are free up to eight and dear beyond; fixed drafts fill the free ones first."""
    cost = DictatedCost(lambda num_rows: 1.0 if num_rows <= 8 else float(num_rows))
    willing = chain_candidate("goodput", [0.5] * 8, GOODPUT)
    alone = GammaController(cost).grant([willing], load_of(2))
    assert alone[0].gamma == 6
    fixed = chain_candidate("fixed", [0.5] * 8, FIXED)
    beside = GammaController(cost).grant([willing, fixed], load_of(2))
    assert beside[0].gamma == 2


def test_all_grants_together_stay_within_the_spare_rows() -> None:
    controller = GammaController(DictatedCost(lambda _: 1.0))
    candidates = [
        chain_candidate("goodput", [0.5] * 8, GOODPUT),
        chain_candidate("target", [0.5] * 8, TARGET),
        chain_candidate("fixed", [0.5] * 8, FIXED),
    ]
    for spare in range(12):
        grants = controller.grant(candidates, load_of(3, None, spare))
        assert sum(grant.gamma for grant in grants) == spare


def test_time_spent_drafting_is_spent_whatever_is_granted() -> None:
    """A longer fixed part of a step makes more rows per step worth while."""
    gammas = []
    for seconds in (0.0, 10.0):
        cost = DictatedCost(lambda num_rows: 1.0 + 0.5 * num_rows, {"ngram": seconds})
        grant = GammaController(cost).grant([chain_candidate("r", [0.3], GOODPUT)], load_of(1))[0]
        gammas.append(grant.gamma)
    assert gammas == [0, 1]


def test_observations_reach_the_policy_of_the_request_until_it_is_forgotten() -> None:
    controller = GammaController(DictatedCost(float))
    assert controller.num_to_propose("r", TARGET) == 3
    controller.observe("r", TARGET, 3, 3)
    assert controller.num_to_propose("r", TARGET) == 4
    controller.forget("r", TARGET)
    controller.observe("r", TARGET, 3, 3)
    assert controller.num_to_propose("r", TARGET) == 3


def test_each_policy_says_how_much_to_propose() -> None:
    controller = GammaController(DictatedCost(float))
    sizes = [
        controller.num_to_propose(params.adaptive_depth, params)
        for params in (FIXED, TARGET, SpeculativeParams(max_speculative_tokens=7))
    ]
    assert sizes == [4, 3, 7]
