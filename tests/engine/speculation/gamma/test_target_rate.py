from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.request.params import SpeculativeParams
from engine.speculation.gamma.target_rate import TargetRatePolicy
from worlds.gamma_cases import DictatedCost, chain_candidate, load_of


def within(start: int, least: int, most: int) -> SpeculativeParams:
    return SpeculativeParams(
        adaptive_depth="target_rate",
        num_speculative_tokens=start,
        min_speculative_tokens=least,
        max_speculative_tokens=most,
    )


PARAMS = replace(within(4, 1, 6), target_acceptance_rate=0.7)


def trace(
    policy: TargetRatePolicy, accepted: Sequence[int], params: SpeculativeParams
) -> list[int]:
    """The gamma of each step, when the drafter always has enough and the target says this."""
    gammas = []
    for num_accepted in accepted:
        candidate = chain_candidate("r", [0.5] * 8, params)
        gamma = policy.grant([candidate], load_of(1))[0].gamma
        gammas.append(gamma)
        policy.observe("r", gamma, min(num_accepted, gamma))
    return gammas


FIVE = replace(PARAMS, num_speculative_tokens=5, max_speculative_tokens=9)


@pytest.mark.parametrize(
    ("accepted", "params", "gammas"),
    [
        (9, PARAMS, [4, 5, 6, 6, 6]),
        (0, PARAMS, [4, 3, 2, 1, 1]),
        # 0.8 and 0.6 are on the border of a tenth: rounding must not push either across.
        (4, FIVE, [5] * 5),
        (3, FIVE, [5] * 5),
    ],
)
def test_gamma_moves_by_one_a_step_within_its_bounds(
    accepted: int, params: SpeculativeParams, gammas: list[int]
) -> None:
    policy = TargetRatePolicy(DictatedCost(float))
    assert trace(policy, [accepted] * 5, params) == gammas
    for _ in range(20):  # steps without a draft say nothing
        policy.observe("r", 0, 0)
    assert policy.num_to_propose("r", params) == gammas[-1]


def test_the_mean_of_the_last_ten_rates_decides_not_the_last_one() -> None:
    one = within(1, 1, 2)
    policy = TargetRatePolicy(DictatedCost(float))
    for _ in range(10):
        policy.num_to_propose("r", one)
        policy.observe("r", 10, 0)
    means_above = []
    for _ in range(10):
        policy.observe("r", 10, 10)
        means_above.append(policy.num_to_propose("r", one) == 2)
    # Nine of ten rates have to be 1 before the mean is above 0.8.
    assert means_above == [False] * 8 + [True] * 2


def test_gamma_zero_is_left_again_after_a_windows_worth_of_steps() -> None:
    params = within(1, 0, 4)
    policy = TargetRatePolicy(DictatedCost(float))
    assert trace(policy, [0] * 12, params) == [1] + [0] * 10 + [1]
    assert trace(policy, [9] * 13, params) == [0] * 10 + [1, 2, 3]


def test_the_start_is_clamped_and_requests_do_not_share_state() -> None:
    policy = TargetRatePolicy(DictatedCost(float))
    wide = within(9, 2, 5)
    assert policy.num_to_propose("other", wide) == 5
    trace(policy, [0, 0], PARAMS)
    assert policy.num_to_propose("other", wide) == 5
    policy.forget("r")
    assert policy.num_to_propose("r", PARAMS) == 4


def test_cuts_by_the_controller_are_called_policy_and_by_rows_overload() -> None:
    policy = TargetRatePolicy(DictatedCost(float))
    pair = [chain_candidate(name, [0.5] * 8, PARAMS) for name in ("a", "b")]
    grants = policy.grant(pair, load_of(2, 2, num_spare_rows=5))
    assert [(list(grant.nodes), grant.reason) for grant in grants] == [
        ([0, 1, 2, 3], "policy"),
        ([0], "overload"),
    ]
