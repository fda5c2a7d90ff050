"""Whom a drafter is asked for: by what drafts have brought, what calls take, and what rows cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.base import DrafterNeeds, DraftRequest
from drafters.tree import EMPTY, DraftTree, chain
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams
from engine.sampling.state import SamplingState
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.cost import CostModel
from engine.speculation.ledgers import Ledgers, Traffic
from worlds.engine_harness import DictatedCost
from worlds.fake_drafters import FakeDrafter
from worlds.speculation_world import World

GOODPUT = SpeculativeParams(
    draft_strategy="fake", num_speculative_tokens=4, max_speculative_tokens=4
)
ROWS = 0.001


def dear(
    seconds: float = 0.3, row_seconds: float = ROWS, needs: DrafterNeeds | None = None
) -> World:
    """A call takes so long for each request, where a plain step takes a second."""

    def four(ask: DraftRequest) -> DraftTree:
        return chain([0] * min(4, ask.max_nodes))

    drafter = FakeDrafter("fake", four, needs=needs or DrafterNeeds())
    return World(drafter, cost=DictatedCost(row_seconds, {"fake": seconds}))


def opened(world: World, name: str = "r", wanted: SpeculativeParams = GOODPUT) -> Request:
    """A request that has much to write."""
    return world.open(name, wanted, max_tokens=100_000)


WINDOW = DrafterNeeds(all_or_nothing=True)
MODEL = DrafterNeeds(draft_slots=True)


def story_of(
    world: World, requests: Sequence[Request], num_steps: int, accepted: int = 0
) -> list[str]:
    """One letter per step for each request: ``x`` verified, ``-`` asked only, ``.`` at rest."""
    stories = ["" for _ in requests]
    for _ in range(num_steps):
        scheduled = world.draft(*requests)
        world.observe(*scheduled, num_accepted=accepted)
        for at, each in enumerate(scheduled):
            stories[at] += "x" if each.draft.token_ids else "-" if each.num_asked else "."
            if not each.num_asked:
                assert each.reason == ("policy" if world.plan.is_plain else "low_acceptance")
    return stories


def test_a_costly_drafter_is_tried_now_and_then_while_it_does_not_pay() -> None:
    world = dear()
    request = opened(world)
    (story,) = story_of(world, [request], 800)
    assert story[0] in "x-"
    late = story[100:]
    num_asked = len(late) - late.count(".")
    assert 15 <= num_asked <= 0.01 * len(late) / 0.3
    # Where it pays again it stops resting.
    (story,) = story_of(world, [request], 300, accepted=3)
    assert set(story[-100:]) == {"x"}


def test_where_drafts_always_pay_a_plain_step_comes_now_and_then() -> None:
    """Three of four drafts are right and cost nothing: a plain step leaves out three tokens, and the 375
    before it wrote 1,500. It is no rest, after which there was more to take in."""
    world = dear(0.0)
    request = opened(world)
    story_of(world, [request], 400, accepted=3)
    late = ""
    for _ in range(1600):
        late += story_of(world, [request], 1, accepted=3)[0]
        assert not request.drafting.has_rested
    assert set(late) == {"x", "."}
    assert ".." not in late
    assert late.count(".") in (4, 5)


@pytest.mark.parametrize(("row_seconds", "steps"), [(0.95, 19), (1.0, 16), (2.0, 16), (ROWS, 375)])
def test_plain_steps_come_the_more_often_the_less_drafts_gain(
    row_seconds: float, steps: int
) -> None:
    """All of three drafts are right; a plain step takes a second. Prompts are read in no such step, and
    one that happens to have no drafts is as good."""
    world = dear()
    ledgers = Ledgers(DictatedCost(row_seconds))
    each = ScheduledRequest(world.open("r"), 1)
    plan, with_prompt = Plan([each], num_rows=1), Plan([each], num_rows=9)

    def step(num_drafts: int) -> None:
        each.draft = chain([0] * num_drafts)
        each.outcome = Outcome((0,) * 4, (0,), (0,), num_drafts)
        ledgers.begin_step(plan)
        ledgers.granted(plan)
        ledgers.wrote(plan, [each])

    for _ in range(2):
        for _ in range(steps):
            assert not ledgers.wants_plain(plan)
            step(3)
        assert ledgers.wants_plain(plan)
        assert not ledgers.wants_plain(with_prompt)
        step(0)


def test_a_drafter_that_brings_more_than_its_call_takes_is_asked_in_every_step() -> None:
    world = dear(0.1)
    request = opened(world)
    (story,) = story_of(world, [request], 300, accepted=1)
    assert story.count("x") == 300 - story.count(".")
    assert story.count(".") <= 300 / 17, "plain steps"
    assert not request.drafting.has_rested


def test_a_trial_is_paid_for_once_and_not_by_every_request_of_its_kind() -> None:
    world = dear()
    num_asked = 0
    for turn in range(60):
        request = world.open(f"r{turn}", GOODPUT)
        (story,) = story_of(world, [request], 10)
        num_asked += len(story) - story.count(".")
        world.speculation.close(request)
        world.pool.free(request.request_id)
    assert num_asked < 60


def test_one_request_is_tried_at_a_time_and_each_in_its_turn() -> None:
    world = dear()
    requests = [world.open(name, GOODPUT, max_tokens=10_000) for name in "ab"]
    story_of(world, requests, 200)
    first, second = story_of(world, requests, 1000)
    assert all("." in pair for pair in zip(first, second, strict=True))
    assert first.replace(".", "")
    assert second.replace(".", "")


def test_one_tenant_never_steers_another() -> None:
    """Not even through what the two have in common: drafter, temperature and length."""
    stories = []
    for has_neighbour in (True, False):
        world = dear(0.7)
        if has_neighbour:
            loser = world.open("loser", GOODPUT, salt="unlucky", max_tokens=10_000)
            assert story_of(world, [loser], 60)[0][-1] == "."
            world.speculation.close(loser)
            world.pool.free("loser")
        other = world.open("other", GOODPUT, salt="tenant", max_tokens=10_000)
        stories.append(story_of(world, [other], 10, accepted=4)[0])
    assert stories[0] == stories[1]
    assert "x" in stories[0]


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


def test_prompts_of_a_step_are_no_time_in_which_its_drafts_could_write() -> None:
    """Two requests of 3 seconds a step get a prompt of 100 rows, a second each, beside them."""
    ledgers = Ledgers(CostModel([(1, 0, 2.0), (2, 0, 3.0), (200, 0, 201.0)]))
    scheduled: list[Any] = [SimpleNamespace(samples=True, base=0)] * 2
    assert ledgers.begin_step(Plan(scheduled, num_rows=2)) == pytest.approx(2 / 3)
    assert ledgers.prompt_seconds == 0.0
    prompt: list[Any] = [SimpleNamespace(samples=False, base=0)]
    assert ledgers.begin_step(Plan(scheduled + prompt, num_rows=102)) == pytest.approx(2 / 3)
    assert ledgers.prompt_seconds == pytest.approx(100.0)


def test_a_floor_and_policies_that_weigh_no_cost_are_always_asked() -> None:
    for params in (
        replace(GOODPUT, min_speculative_tokens=1),
        replace(GOODPUT, adaptive_depth="fixed"),
    ):
        world = dear(5.0)
        request = world.open("r", params, max_tokens=10_000)
        assert set(story_of(world, [request], 100)[0]) == {"x"}


# --- drafts that are granted whole or not at all ---


def test_what_windows_bring_on_average_pays_for_their_rows() -> None:
    """Four rows cost 0.4 of a step: one token in two drafts pays for them, none does not."""
    world = dear(0.0, 0.1, WINDOW)
    request = opened(world)
    story = ""
    for step in range(200):
        story += story_of(world, [request], 1, accepted=step % 2)[0]
    assert set(story) == {"x"}


def test_a_window_is_tried_for_as_many_steps_as_it_needs() -> None:
    world = dear(0.0, 0.1, WINDOW)
    request = opened(world)
    story_of(world, [request], 50)
    (story,) = story_of(world, [request], 1000)
    trials = [run for run in story.split(".") if run]
    assert {len(run) for run in trials[1:-1]} == {6}
    assert story.count("x") * 0.4 <= 0.01 * 1000 + 6 * 0.4
    (story,) = story_of(world, [request], 400, accepted=3)
    assert set(story[story.index("x") :]) == {"x"}


def test_a_model_has_taken_in_a_text_once_it_drafts() -> None:
    """Calls before say nothing of what a call takes, but what a trial does."""
    told: list[DraftTree] = [EMPTY, EMPTY, chain([0]), chain([0])]
    drafter = FakeDrafter("fake", lambda _: told.pop(0), needs=MODEL)
    cost = DictatedCost(ROWS, {"fake": 0.0})
    seen: list[int] = []
    cost.observe_draft = lambda *_: seen.append(len(told))  # type: ignore[method-assign]
    world = World(drafter, cost=cost)
    request = opened(world)
    rested = []
    while told:
        rested.append(request.drafting.has_rested)
        world.observe(*world.draft(request))
    assert rested == [True, True, True, False]
    assert seen == [0]


def test_a_model_that_can_never_draft_does_not_take_in_a_text_for_ever() -> None:
    drafter = FakeDrafter("fake", lambda _: EMPTY, needs=MODEL)
    world = World(drafter, cost=DictatedCost(ROWS, {"fake": 0.0}))
    request = opened(world)
    for _ in range(65):
        assert request.drafting.has_rested
        world.observe(*world.draft(request))
    assert not request.drafting.has_rested


def test_a_trial_ends_with_its_request() -> None:
    world = dear(0.0, 0.1, WINDOW)
    first = opened(world, "first")
    story = story_of(world, [first], 50)[0]
    while story[-1] != "x" or story[-2] != ".":
        story += story_of(world, [first], 1)[0]
    world.speculation.close(first)
    world.pool.free("first")
    second = opened(world, "second")
    (story,) = story_of(world, [second], 1000)
    first_look, *trials = [run for run in story.split(".") if run]
    assert len(first_look) == 1  # how many rows its windows have
    assert {len(run) for run in trials[:-1]} == {6}
    assert story.index("x" * 6) > 50


def test_under_load_a_window_that_paid_alone_is_not_asked() -> None:
    world = dear(0.0, 0.1, WINDOW)
    request = opened(world)
    assert set(story_of(world, [request], 50, accepted=1)[0]) == {"x"}
    crowd = [world.open(f"c{rank}", replace(GOODPUT, draft_strategy="none")) for rank in range(3)]
    scheduled = world.draft(request, *crowd)
    assert (scheduled[0].num_asked, scheduled[0].reason) == (0, "low_acceptance")
    assert set(story_of(world, [request], 5, accepted=1)[0]) == {"x"}


def test_the_rows_of_a_draft_are_taken_off_what_it_brings() -> None:
    world = dear(0.0, 0.1)
    request = opened(world)
    story_of(world, [request], 300, accepted=3)
    gain = request.drafting.gain
    assert gain.expect() == pytest.approx(3 - 4 * 0.1, abs=0.15)


@pytest.mark.parametrize(("row_seconds", "accepted", "most_asked"), [(ROWS, 3, 8), (0.5, 1, 1)])
def test_of_an_untried_draft_no_more_is_hoped_than_its_row_leaves(
    row_seconds: float, accepted: int, most_asked: int
) -> None:
    """Eight requests, all of which one lucky trial would have asked at once: a row takes the time of 0.01
    tokens, or of 0.89."""
    world = dear(0.05, row_seconds)
    requests = [opened(world, f"r{rank}") for rank in range(8)]
    steps = zip(*story_of(world, requests, 20, accepted=accepted), strict=True)
    assert max(8 - step.count(".") for step in steps) == most_asked


def test_rows_are_charged_what_they_take_in_their_own_step() -> None:
    """Not in the next one, without drafts, that is planned before they are read."""
    world = dear(0.0, 0.1)
    drafter = world.speculation.drafters["fake"]
    drafter.copies = lambda *_: (1, 1)  # type: ignore[method-assign]
    request = world.open("r", replace(GOODPUT, tree_strategy="linear"), max_tokens=10_000)
    request.sampling.is_greedy = True
    for _ in range(300):
        scheduled = world.draft(request)
        later = Plan([ScheduledRequest(request, 1)], num_rows=1, is_ahead=True)
        assert not world.speculation.draft_ahead(later)
        world.observe(*scheduled, num_accepted=3)
    gain = request.drafting.gain
    assert gain.expect() == pytest.approx(3 - 4 * 0.1, abs=0.15)


def test_rows_never_cost_less_than_nothing() -> None:
    """Where steps with drafts went by faster than others: a draft that brings nothing gains nothing."""
    cost = CostModel([(1, 0, 1.0), (64, 0, 1.0)])
    for _ in range(40):
        cost.observe(4, 0, 4, 1.0)
        cost.observe(20, 0, 4, 0.8, has_drafts=True)
    ledgers = Ledgers(cost)
    scheduled: list[Any] = [SimpleNamespace(samples=True, base=0, draft=[0] * 4)] * 4
    plan = Plan(scheduled, num_rows=4)
    ledgers.begin_step(plan)
    ledgers.granted(plan)
    assert plan.row_tokens == 0.0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_rows_that_a_device_drafts_by_itself_are_not_charged_its_waiting(is_ahead: bool) -> None:
    cost = CostModel([(1, 0, 1.0), (2, 0, 1.5)], overhead_seconds=0.5)
    cost.observe_overhead(0.1, is_hidden=True)
    seconds = Ledgers(cost)._seconds(Plan(num_rows=1, is_ahead=is_ahead), 1)
    assert seconds == pytest.approx(1.6 if is_ahead else 2.0)
