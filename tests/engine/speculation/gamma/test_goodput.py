from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.state import SamplingState
from engine.speculation.gamma.goodput import GoodputPolicy
from engine.speculation.gamma.policy import DraftCandidate, Grant, Traffic
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


def _run(
    policy: GoodputPolicy,
    num_steps: int,
    accepted: int = 0,
    *,
    request_ids: Sequence[str] = ("r",),
    survivals: Sequence[float] = BAD,
) -> str:
    """One letter per step: ``x`` asked, ``.`` at rest. All requests are asked in the same steps."""
    story = ""
    for _ in range(num_steps):
        wanted = [policy.num_to_propose(each, SpeculativeParams()) > 0 for each in request_ids]
        assert len(set(wanted)) == 1
        asked = wanted[0]
        candidates = [
            replace(
                chain_candidate(each, survivals if asked else [], drafter="model"),
                max_nodes=64 if asked else 0,
            )
            for each in request_ids
        ]
        grants = policy.grant(candidates, load_of(len(request_ids)))
        for request_id, grant in zip(request_ids, grants, strict=True):
            policy.observe(request_id, grant.gamma, min(accepted, grant.gamma))
        story += "x" if asked else "."
    return story


def _rests(story: str) -> list[int]:
    return [len(run) for run in story.strip(".").split("x") if run]


DEAR = {"model": 0.3}


@pytest.mark.parametrize("survivals", [BAD, GOOD])
def test_a_costly_drafter_rests_longer_and_longer_while_it_does_not_pay(
    survivals: list[float],
) -> None:
    """Accepted tokens count, not those hoped for; one that is nearly free never rests."""
    policy = GoodputPolicy(DictatedCost(flat, DEAR))
    story = _run(policy, 600, survivals=survivals)
    trial, rests = story.index("."), _rests(story)
    assert 2 <= trial <= 5  # a step's worth of time is lost by then
    assert rests[:5] == sorted(rests[:5])
    assert rests[0] <= 3
    assert 24 <= max(rests) <= 63
    assert "x" in story[-130:]
    assert story.count("x") < 30
    assert _run(policy, 130).count(".") > 100
    silent = replace(chain_candidate("r", [], drafter="model"), max_nodes=0)
    while policy.num_to_propose("r", SpeculativeParams()):
        _run(policy, 1)
    assert policy.grant([silent], load_of(1))[0].reason == "low_acceptance"
    assert set(_run(GoodputPolicy(DictatedCost(flat, {"model": 0.001})), 50)) == {"x"}
    # Where it pays again it stops resting.
    story = _run(policy, 200, accepted=3, survivals=GOOD)
    assert set(story[story.index("x") :]) == {"x"}


@pytest.mark.parametrize(("price", "longest"), [(0.3, 32), (2.5, 256), (80.0, 1024)])
def test_dear_trials_are_so_rare_that_they_cost_a_hundredth(price: float, longest: int) -> None:
    """As those of a head are, which first has to read what its requests have written meanwhile."""
    story = _run(GoodputPolicy(DictatedCost(flat, {"model": price})), 8000)
    last = _rests(story)[-1]
    assert longest // 2 <= last <= 2 * longest
    assert price / last < 0.02 or longest == 1024


def test_a_trial_is_paid_for_once_and_not_by_every_request() -> None:
    policy = GoodputPolicy(DictatedCost(flat, DEAR))
    kind = Traffic("model", "tenant")
    num_asked = 0
    for turn in range(60):
        policy.open(f"r{turn}", kind)
        num_asked += _run(policy, 10, request_ids=[f"r{turn}"]).count("x")
        policy.forget(f"r{turn}")
    assert num_asked < 30


def test_rests_of_different_kinds_end_in_the_same_steps() -> None:
    policy = GoodputPolicy(DictatedCost(flat, DEAR))
    ends: dict[str, list[int]] = {"a": [], "b": []}
    for request_id, kind in (("a", Traffic("model", "x")), ("b", Traffic("model", "y"))):
        policy.open(request_id, kind)
    for step in range(900):
        candidates = []
        for request_id in ("a", "b"):
            asked = policy.num_to_propose(request_id, SpeculativeParams()) > 0
            if request_id == "b" and step < 5:
                asked = False  # it is still at its prompt
            elif asked:
                ends[request_id].append(step)
            each = chain_candidate(request_id, BAD if asked else [], drafter="model")
            candidates.append(replace(each, max_nodes=64 if asked else 0))
        policy.grant(candidates, load_of(2))
    late = [{step for step in steps if step > 300} for steps in ends.values()]
    assert late[0] == late[1]
    assert len(late[0]) > 5
    # Of one kind they are asked in the same steps, however late they come.
    request_ids = ["r0"]
    for rank in range(1, 8):
        policy.open(f"r{rank - 1}", Traffic("model"))
        _run(policy, 7, request_ids=request_ids)  # asserts it
        request_ids.append(f"r{rank}")


def test_one_tenant_never_steers_another() -> None:
    """Not even through what the two have in common: drafter, temperature and length."""
    policy = GoodputPolicy(DictatedCost(flat, DEAR))
    policy.open("loser", Traffic("model", "unlucky"))
    _run(policy, 200, request_ids=["loser"])
    assert policy.num_to_propose("loser", SpeculativeParams()) == 0
    alone = GoodputPolicy(DictatedCost(flat, DEAR))
    stories = []
    for each in (policy, alone):
        each.forget("loser")
        each.open("other", Traffic("model", "tenant"))
        stories.append(_run(each, 20, request_ids=["other"]).index("."))
    assert stories[0] == stories[1]
    # Its own next request goes on where the last one ended.
    policy.open("again", Traffic("model", "unlucky"))
    assert _run(policy, 20, request_ids=["again"]).count("x") <= 2


def test_other_temperatures_and_lengths_are_other_kinds() -> None:
    def traffic(verification: str, temperature: float, length: int) -> Traffic:
        params = GenerationRequest(
            "r",
            (0,) * length,
            SamplingParams(temperature=temperature),
            SpeculativeParams(verification=verification),  # type: ignore[arg-type]
        )
        return Traffic.of(params, SamplingState(params, (), 9, 9999).verification)

    kinds = {
        traffic(verification, temperature, length)
        for verification in ("match", "rejection")
        for temperature in (0.3, 0.7, 1.0, 2.0)
        for length in (1, 100, 120, 500, 2_000)
    }
    assert len(kinds) == 2 * 3 * 4
    assert traffic("match", 0.0, 1) not in kinds


def test_the_first_draft_of_a_request_is_held_to_num_tokens() -> None:
    params = SpeculativeParams(num_speculative_tokens=3, max_speculative_tokens=8)
    candidate = chain_candidate("a", GOOD, params)
    policy = GoodputPolicy(DictatedCost(flat))
    assert policy.grant([candidate], load_of(1))[0] == Grant([0, 1, 2], "client_cap")
    policy.observe("a", 0, 0)  # a step without a draft proves nothing
    assert policy.grant([candidate], load_of(1))[0].gamma == 3
    policy.observe("a", 3, 3)
    assert policy.grant([candidate], load_of(1))[0].gamma == 8
    policy.forget("a")
    assert policy.grant([candidate], load_of(1))[0].gamma == 3


def test_a_target_rate_is_the_least_that_is_expected_of_a_grant() -> None:
    survivals = [0.9, 0.8, 0.7, 0.3, 0.2]  # means: .9 .85 .8 .675 .58
    for rate, gamma in ((0.95, 0), (0.85, 2), (0.79, 3), (0.6, 4), (0.5, 5)):
        params = SpeculativeParams(target_acceptance_rate=rate)
        grant = GoodputPolicy(DictatedCost(flat)).grant(
            [chain_candidate("a", survivals, params)], load_of(1)
        )[0]
        assert grant.gamma == gamma
        assert grant.reason == ("" if gamma == 5 else "policy")


def test_what_costs_little_rests_for_a_few_steps_at_a_time() -> None:
    """A copy may begin at any time; asking in some of the steps costs a hundredth of the time."""
    story = _run(GoodputPolicy(DictatedCost(flat, {"model": 0.06})), 3000)
    rests = _rests(story[1000:])
    assert 8 <= max(rests) <= 32
    assert story[1000:].count("x") * 0.06 < 0.02 * 2000


def test_a_kind_that_earns_in_runs_is_asked_again_the_sooner() -> None:
    """For the same price, and with as many steps in which nothing is accepted."""
    story = {}
    for accepted in (0, 4):
        policy = GoodputPolicy(DictatedCost(flat, {"model": 0.1}))
        story[accepted] = ""
        for _ in range(8):
            _run(policy, 20, accepted=accepted, survivals=GOOD)
            story[accepted] += _run(policy, 100)
    assert max(_rests(story[4])) <= 4 < max(_rests(story[0]))


def test_purses_count_in_tokens_of_their_own_requests() -> None:
    """The same time of drafting in a batch of eight is dear where it is for one request, which has to
    earn it alone, and cheap where all eight may gain by it."""
    alone = Traffic("model", "alone")
    tried = []
    for num_drafting in (1, 8):
        policy = GoodputPolicy(DictatedCost(flat, {"model": 0.02 / num_drafting}))
        request_ids = [f"r{rank}" for rank in range(num_drafting)]
        for request_id in request_ids:
            policy.open(request_id, alone)
        num_steps = 0
        while policy.num_to_propose("r0", SpeculativeParams()) > 0:
            candidates = [chain_candidate(each, [], drafter="model") for each in request_ids]
            policy.grant(candidates, load_of(8))
            num_steps += 1
        tried.append(num_steps)
    assert tried[1] == pytest.approx(8 * tried[0], rel=0.3)


def test_steps_pass_in_which_it_has_nobody_to_ask() -> None:
    policy = GoodputPolicy(DictatedCost(flat, DEAR))
    _run(policy, 400)
    while policy.num_to_propose("r", SpeculativeParams()) > 0:
        _run(policy, 1)
    assert policy.why_not_asked("r") == "low_acceptance"
    num_steps = 0
    while policy.num_to_propose("r", SpeculativeParams()) == 0:
        policy.pass_step()
        num_steps += 1
    assert 2 <= num_steps <= 64
