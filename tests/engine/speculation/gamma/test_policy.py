from __future__ import annotations

import pytest

from engine.request.params import SpeculativeParams
from engine.speculation.gamma import GammaController, gamma_policy_names, policy
from worlds.gamma_cases import DictatedCost, chain_candidate, load_of


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> str:
    """A policy as a file of one's own would have it."""
    monkeypatch.setattr(policy, "_POLICIES", dict(policy._POLICIES))

    @policy.gamma_policy("half", "half of the most", ["max_speculative_tokens"])
    class Half(policy.GammaPolicy):
        def num_to_propose(self, request_id: str, params: SpeculativeParams) -> int:  # noqa: ARG002
            return params.max_speculative_tokens // 2

    return "half"


def test_every_file_registers_its_policy() -> None:
    assert gamma_policy_names() == ("fixed", "target_rate", "goodput")


def test_a_new_policy_needs_only_its_registration(half: str) -> None:
    assert half in gamma_policy_names()
    params = SpeculativeParams(adaptive_depth=half, max_speculative_tokens=6)
    controller = GammaController(DictatedCost(float))
    assert controller.num_to_propose("r", params) == 3
    grant = controller.grant([chain_candidate("r", [0.5] * 8, params)], load_of(1))[0]
    assert (list(grant.nodes), grant.reason) == ([0, 1, 2], "policy")
    assert not controller.weighs_cost(params)


def test_policies_that_weigh_cost_come_after_those_that_do_not(half: str) -> None:
    """Their rows are facts to it: one spare row goes to the policy that grants at any price."""
    controller = GammaController(DictatedCost(lambda _: 1.0))
    candidates = [
        chain_candidate("goodput", [0.9], SpeculativeParams(adaptive_depth="goodput")),
        chain_candidate(
            "half", [0.1], SpeculativeParams(adaptive_depth=half, max_speculative_tokens=6)
        ),
    ]
    grants = controller.grant(candidates, load_of(2, None, 1))
    assert [grant.gamma for grant in grants] == [0, 1]


def test_a_name_is_given_once(half: str) -> None:
    with pytest.raises(ValueError, match="two gamma policies named 'half'"):
        policy.gamma_policy(half, "again", [])(policy.GammaPolicy)
