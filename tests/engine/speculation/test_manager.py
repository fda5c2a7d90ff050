"""Between drafters and step: who is asked for how much, what is granted, and who hears of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.base import DrafterNeeds, DraftRequest, Observation
from drafters.tree import EMPTY, DraftTree, chain
from engine.config import ShedSpeculation
from engine.request.outcome import Outcome
from engine.request.params import SpeculativeParams
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.gamma.policy import DraftCandidate, Grant, Load
from engine.transfer import Readback
from worlds.engine_harness import DictatedCost
from worlds.fake_drafters import FakeDrafter, TakingDrafter
from worlds.speculation_world import FIXED, TimedCost, World, fake, zeros


def test_each_drafter_is_asked_once_for_all_its_requests() -> None:
    first, second = fake("first"), fake("second")
    world = World(first, second)
    requests = [
        world.open(name, replace(FIXED, draft_strategy=drafter, num_speculative_tokens=num_tokens))
        for name, drafter, num_tokens in (("a", "first", 2), ("b", "second", 3), ("c", "first", 5))
    ]
    scheduled = world.draft(*requests)
    assert [[ask.request_id for ask in asks] for asks in first.asks] == [["a", "c"]]
    assert [[ask.request_id for ask in asks] for asks in second.asks] == [["b"]]
    assert [len(each.draft) for each in scheduled] == [2, 3, 5]
    world.observe(*scheduled)
    assert [[each.request_id for each in group] for group in first.observed] == [["a", "c"]]
    assert [[each.request_id for each in group] for group in second.observed] == [["b"]]


def test_policies_hear_what_a_call_took_also_for_whom_it_found_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = FakeDrafter("fake", lambda ask: chain([0, 0]) if ask.request_id == "a" else EMPTY)
    world = World(drafter, cost=DictatedCost(0.01, {"fake": 0.1}))
    policy: Any = world.speculation._policies["goodput"]
    grant, heard = policy.grant, []

    def listen(candidates: Sequence[DraftCandidate], load: Load) -> list[Grant]:
        heard.append(([each.request_id for each in candidates], load.draft_seconds))
        granted: list[Grant] = grant(candidates, load)
        return granted

    monkeypatch.setattr(policy, "grant", listen)
    wanted = replace(FIXED, adaptive_depth="goodput", min_speculative_tokens=1)  # always asked
    first, second = world.draft(*(world.open(name, wanted) for name in "ab"))
    assert heard == [(["a"], pytest.approx(0.2))]
    assert len(first.draft) == 2
    assert (second.draft, second.reason) == (EMPTY, "no_match")


class SlowReader(FakeDrafter):
    """Has so many tokens to read for every request."""

    def __init__(self, num_tokens: int, **options: Any) -> None:
        super().__init__(**options)
        self.num_tokens = num_tokens
        self.num_read: dict[str, int] = {}
        self.num_read_in_step = 0

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        if num_tokens:
            self._maybe_fail("read_prompt", request_id)
        before = self.num_read.get(request_id, 0)
        num_read = min(num_tokens, self.num_tokens - before)
        self.num_read[request_id] = before + num_read
        self.num_read_in_step += num_read
        return num_read


def test_long_prompts_are_read_over_several_steps_first_come_first() -> None:
    drafter = SlowReader(2500)
    world = World(drafter)
    requests = [world.open(name) for name in ("a", "b")]
    seen = []
    for _ in range(6):
        drafter.num_read_in_step = 0
        world.draft(*requests)
        seen.append((drafter.num_read_in_step, drafter.num_read.get("b", 0)))
    assert seen == [(1024, 0), (1024, 0), (1024, 572), (1024, 1596), (904, 2500), (0, 2500)]
    assert drafter.num_read["a"] == 2500
    # A step with a long prompt reads as much as it computes.
    part = ScheduledRequest(world.open("c"), 1)
    drafter.num_tokens = 5000
    world.speculation.draft(Plan([part], num_rows=3000), Readback())
    assert drafter.num_read["c"] == 3000


@pytest.mark.parametrize(
    ("max_tokens", "most", "spare", "depths", "gammas", "reason"),
    [
        (1, 64, 100, [], [0, 0], "client_cap"),  # the target writes the last token
        (2, 64, 100, [1, 1], [1, 1], ""),
        (4, 64, 100, [3, 3], [3, 3], ""),
        (50, 3, 100, [16, 16], [3, 3], ""),
        (50, 64, 20, [16, 16], [16, 4], "overload"),
    ],
)
def test_text_engine_and_rows_bound_a_draft(
    max_tokens: int, most: int, spare: int, depths: list[int], gammas: list[int], reason: str
) -> None:
    drafter = fake()
    world = World(drafter, max_num_nodes=most)
    wanted = replace(FIXED, num_speculative_tokens=30)
    requests = [world.open(name, wanted, max_tokens) for name in "ab"]
    scheduled = world.draft(*requests, spare_rows=spare)
    assert [ask.shape.depth for asks in drafter.asks for ask in asks] == depths
    assert [len(each.draft) for each in scheduled] == gammas
    assert scheduled[1].reason == reason
    chunk = ScheduledRequest(requests[0], 2)
    chunk.samples = False
    world.speculation.draft(Plan([chunk], num_rows=2, spare_rows=100), Readback())
    assert chunk.draft == EMPTY


def test_what_fails_or_ends_while_it_is_read_stops_nobody() -> None:
    drafter = SlowReader(1500, fails="read_prompt", failing={"a"})
    world = World(drafter)
    failing, ending, waiting = requests = [world.open(name) for name in ("a", "b", "c")]
    world.draft(*requests)
    assert drafter.num_read == {"a": 0, "b": 1024, "c": 0}
    world.speculation.close(ending)
    for _ in range(2):
        world.draft(failing, waiting)
    assert drafter.num_read == {"a": 0, "b": 1024, "c": 1500}
    assert world.speculation.close(failing) == 1


def test_a_proposal_nobody_verified_still_teaches() -> None:
    """Shadow labels: drafts that would have been right bring the request's gamma back."""
    world = World(fake(), cost=DictatedCost(row_seconds=0.8))
    request = world.open("r", replace(FIXED, adaptive_depth="goodput"))
    grants = []
    for _ in range(12):
        (scheduled,) = world.draft(request)
        grants.append(len(scheduled.draft))
        request.commit(1, [0])
        world.observe(scheduled, num_accepted=grants[-1])
        assert len(scheduled.proposal) == 16
    assert grants[0] == 0
    assert grants[-1] > 0


@pytest.mark.parametrize(("num_verified", "num_asked_next"), [(2, 5), (4, 3)])
def test_policies_hear_of_the_nodes_that_were_verified(
    num_verified: int, num_asked_next: int
) -> None:
    """Four are granted and two accepted: of two verified that is all, of four it is half."""
    drafter = fake()
    world = World(drafter)
    params = replace(FIXED, adaptive_depth="target_rate", target_acceptance_rate=0.8)
    request = world.open("r", params)
    (scheduled,) = world.draft(request)
    assert len(scheduled.draft) == 4
    scheduled.draft = scheduled.draft.subtree(range(num_verified))
    world.observe(scheduled, num_accepted=2)
    world.draft(request)
    assert drafter.asks[-1][0].max_nodes == num_asked_next


def test_drafting_time_is_shared_by_those_who_drafted() -> None:
    cost = TimedCost()
    world = World(fake(), cost=cost)
    plain = world.open("plain", SpeculativeParams(draft_strategy="none"))
    requests = world.open("a"), world.open("b"), plain
    for _ in range(2):
        first, second, third = world.draft(*requests)
        world.observe(first, second, third)
    ((name, num_requests, seconds),) = cost.draft_calls
    assert (name, num_requests) == ("fake", 2)
    own = world.plan.draft_seconds["fake"]
    assert seconds == pytest.approx(own + world.plan.speculation_seconds)
    assert own > 0 < world.plan.speculation_seconds
    assert first.draft_seconds == second.draft_seconds == seconds / 2
    assert third.draft_seconds == 0.0


def test_the_price_of_a_call_is_learned_from_those_who_did_not_rest() -> None:
    """A drafter that rested has more to take in."""
    cost = TimedCost()
    world = World(fake(), cost=cost)
    request = world.open("r")
    numbers = []
    for most in (64, 64, 0, 64, 64):
        world.speculation.max_num_nodes = most
        world.observe(*world.draft(request))
        numbers.append(len(cost.draft_calls))
    assert numbers == [0, 1, 1, 1, 2]


def test_who_takes_in_what_it_missed_pays_for_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("engine.speculation.drafting.time", clock)

    def takes_long(_: Sequence[Observation]) -> None:
        nonlocal now
        now += 1.0

    slow, other = fake("slow"), fake("other")
    slow.observe = takes_long  # type: ignore[method-assign]
    cost = TimedCost()
    world = World(slow, other, cost=cost)
    requests = [world.open(name, replace(FIXED, draft_strategy=name)) for name in ("slow", "other")]
    world.observe(*world.draft(*requests))
    world.speculation.max_num_nodes = 0
    written(world, requests[0], 7, 8)
    world.speculation.max_num_nodes = 64
    world.observe(*world.draft(*requests))
    assert world.plan.draft_seconds == {"slow": 2.0, "other": 0.0}
    assert world.plan.speculation_seconds == 0.0
    assert cost.draft_calls == [("other", 1, 0.0)]


@pytest.mark.parametrize(("rate", "is_verified"), [(None, True), (0.5, False)])
def test_rows_that_teach_are_verified_where_they_cost_less_than_that(
    rate: float | None, is_verified: bool
) -> None:
    """Not where a client bounds the share that is accepted."""
    wanted = replace(FIXED, adaptive_depth="goodput", target_acceptance_rate=rate)

    def unlikely(_: DraftRequest) -> DraftTree:
        return replace(chain([5, 6]), survivals=[0.0, 0.0])

    for worth, row_seconds in ((0.02, 0.01), (0.0, 0.01), (0.02, 0.1)):
        drafter = fake(propose=unlikely)
        drafter.row_worth = worth
        world = World(drafter, cost=TimedCost(row_seconds))
        (scheduled,) = world.draft(world.open("r", wanted))
        pays = is_verified and worth > row_seconds
        assert len(scheduled.draft) == (2 if pays else 0)


@pytest.mark.parametrize(
    ("bounds", "is_told"),
    [
        ({}, True),
        ({"min_speculative_tokens": 1}, False),
        ({"target_acceptance_rate": 0.5}, False),
        ({"adaptive_depth": "fixed"}, False),
        ({"verification": "rejection"}, False),
    ],
)
def test_drafters_are_told_how_likely_a_node_has_to_be(
    bounds: dict[str, Any], is_told: bool
) -> None:
    """But for what its row teaches, and where nothing else bounds what is granted."""
    told = []
    for worth in (0.0, 0.05):
        drafter = fake(propose=lambda each: told.append(each.row_price(0)) or zeros(each))
        drafter.row_worth = worth
        world = World(drafter, cost=TimedCost(row_seconds=0.5))
        world.draft(world.open("r", replace(FIXED, **{"adaptive_depth": "goodput"} | bounds)))
    dear, less = told
    assert (dear > 0.2) == is_told
    assert less == pytest.approx(max(0.0, dear - 0.05))


@pytest.mark.parametrize("bounds", [{"min_speculative_tokens": 1}, {"adaptive_depth": "fixed"}])
def test_nobody_is_told_beside_those_whose_rows_are_not_weighed(bounds: dict[str, Any]) -> None:
    told = []
    drafter = fake(propose=lambda each: told.append(each.row_price(0)) or zeros(each))
    world = World(drafter, cost=TimedCost(row_seconds=0.5))
    wanted = replace(FIXED, adaptive_depth="goodput", min_speculative_tokens=1)  # always asked
    world.draft(world.open("one", wanted), world.open("other", replace(wanted, **bounds)))
    assert told == [0.0, 0.0]


def test_closing_forgets_and_tells_the_failures() -> None:
    drafter = FakeDrafter(propose=zeros, fails="propose")
    world = World(drafter)
    request = world.open("r")
    for _ in range(3):
        world.draft(request)
    assert world.speculation.num_failures == 3
    assert world.speculation.close(request) == 3
    assert world.speculation.close(request) == 0
    assert drafter.closed == ["r"]
    assert world.draft(request)[0].draft == EMPTY


class Drawn(dict[int, float]):
    """A distribution that can be referred to weakly, as tensors can."""


def test_no_distribution_of_a_draft_outlives_its_step() -> None:
    made: list[weakref.ref[Drawn]] = []

    def draw(_: DraftRequest) -> DraftTree:
        probs = Drawn({5: 0.5, 6: 0.5})
        made.append(weakref.ref(probs))
        return replace(chain([5]), draft_probs={-1: probs})

    drafter = fake(propose=draw)
    world = World(drafter)
    request = world.open("r", replace(FIXED, verification="rejection"))
    world.observe(*world.draft(request))
    drafter.observed.clear()
    del world.plan
    gc.collect()
    assert [each() for each in made] == [None]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_how_much_of_a_drawn_chain_is_granted_does_not_depend_on_its_end(length: int) -> None:
    """A step of two spare rows grants two of four; a chain that ended after one has nothing cut."""
    world = World(fake(propose=lambda _: chain([5] * length)))
    request = world.open("r", replace(FIXED, verification="rejection"))
    (scheduled,) = world.draft(request, spare_rows=2)
    assert (len(scheduled.proposal), len(scheduled.draft)) == (length, min(length, 2))
    assert scheduled.reason == ("overload" if length > 2 else "")


def written(world: World, request: Request, *token_ids: int) -> None:
    """A step without drafts for each token."""
    for token_id in token_ids:
        (scheduled,) = world.draft(request)
        request.commit(1, [token_id])
        scheduled.outcome = Outcome((token_id,), (0,), (token_id,), 0)
        world.speculation.observe(world.plan, [scheduled])


def test_who_rests_costs_its_drafter_nothing_and_is_told_why() -> None:
    """Nor the price of asking: a step in which nobody is asked teaches the cost model nothing."""
    cost, drafter = TimedCost(), fake()
    world = World(drafter, cost=cost)
    off = replace(FIXED, num_speculative_tokens=0, max_speculative_tokens=0)
    resting, last = world.open("rests", off), world.open("last", max_tokens=1)
    for _ in range(3):
        scheduled = world.draft(resting, last)
        assert [each.reason for each in scheduled] == ["client_cap", "client_cap"]
        assert [len(each.draft) for each in scheduled] == [0, 0]
        world.observe(*scheduled)
    assert (drafter.asks, drafter.observed, cost.draft_calls) == ([], [], [])


def test_who_is_not_asked_hears_of_it_when_asked_again() -> None:
    drafter = fake(num_top=3)
    world = World(drafter, max_num_nodes=0)
    request = world.open("r")
    written(world, request, 7, 8, 9)
    (scheduled,) = world.draft(request)
    assert not scheduled.num_top_tokens
    assert drafter.observed == []
    world.speculation.max_num_nodes = 4
    (scheduled,) = world.draft(request)
    assert scheduled.num_top_tokens == 3
    (((seen,)),) = drafter.observed
    assert list(seen.token_ids) == [1, 2, 3, 7, 8, 9]
    assert list(seen.emitted_token_ids) == list(seen.row_token_ids) == [7, 8, 9]
    assert list(seen.path) == [0, 1, 2]
    assert list(seen.tree.token_ids) == [7, 8]
    world.draft(request)
    assert len(drafter.observed) == 1


def test_what_is_read_with_the_prompt_is_not_told_again() -> None:
    """A drafter that reads takes the text as it is by then, though it was not asked meanwhile."""
    slow, taking, other = SlowReader(1500), TakingDrafter(), fake("other")
    world = World(slow, taking, other, max_num_nodes=0)
    names = ("fake", "taking", "other")
    requests = [world.open(name, replace(FIXED, draft_strategy=name)) for name in names]
    for token_id in (7, 8, 9):
        scheduled = world.draft(*requests)
        for each in scheduled:
            each.request.commit(1, [token_id])
            each.outcome = Outcome((token_id,), (0,), (token_id,), 0)
        world.speculation.observe(world.plan, scheduled)
    world.speculation.max_num_nodes = 4
    world.draft(*requests)
    assert taking.made["taking"].taken == [1, 2, 3, 7, 8, 9]
    told = [token_id for (seen,) in other.observed for token_id in seen.emitted_token_ids]
    assert told == [7, 8, 9]


def test_who_missed_steps_is_told_of_all_in_order_where_the_device_drafts() -> None:
    drafter = fake()
    drafter.copies = lambda *_: (1, 1)  # type: ignore[method-assign]
    drafter.copied = lambda token_ids, **_: chain(token_ids)  # type: ignore[method-assign]
    world = World(drafter)
    request = world.open("r", replace(FIXED, tree_strategy="linear"))
    request.sampling.is_greedy = True
    world.observe(*world.draft(request))
    world.speculation.max_num_nodes = 0
    written(world, request, 7, 8)
    world.speculation.max_num_nodes = 4
    ahead = ScheduledRequest(request, 1)
    plan = Plan([ahead], num_rows=1, spare_rows=100, is_ahead=True)
    assert world.speculation.draft_ahead(plan)
    request.commit(1, [9])
    ahead.outcome = Outcome((9,) * 5, (0,), (9,), 0)
    world.speculation.observe(plan, [ahead])
    world.draft(request)
    assert [list(seen.emitted_token_ids) for (seen,) in drafter.observed] == [[0], [7, 8, 9]]


@pytest.mark.parametrize("fails", ["", "observe"])
def test_who_is_never_asked_hears_of_it_at_the_end(fails: str) -> None:
    drafter = FakeDrafter(propose=zeros, fails=fails)
    world = World(drafter, max_num_nodes=0)
    request = world.open("r")
    written(world, request, 7, 8)
    assert world.speculation.close(request) == (fails == "observe")
    ((seen,),) = drafter.observed
    assert list(seen.emitted_token_ids) == [7, 8]
    assert drafter.closed == ["r"]


@pytest.mark.parametrize(
    ("need", "hears_all"),
    [("hidden_rows", False), ("draft_slots", False), ("all_or_nothing", True)],
)
def test_who_keeps_a_window_hears_of_every_step_and_states_are_kept_for_who_reads_them(
    need: str, hears_all: bool
) -> None:
    drafter = fake(num_top=3)
    drafter.hidden_layers = (2,)
    drafter.info = replace(drafter.info, needs=DrafterNeeds(**{need: True}))
    world = World(drafter, max_num_nodes=0)
    request = world.open("r")
    written(world, request, 7, 8)
    heard = [list(seen.emitted_token_ids) for (seen,) in drafter.observed]
    assert heard == ([[7], [8]] if hears_all else [])
    (scheduled,) = world.draft(request)
    assert scheduled.hidden_layers == ((2,) if need == "hidden_rows" else ())
    assert bool(scheduled.num_top_tokens) == hears_all


GOODPUT = SpeculativeParams(
    draft_strategy="fake",
    adaptive_depth="goodput",
    num_speculative_tokens=4,
    max_speculative_tokens=4,
)
TARGET_RATE = replace(GOODPUT, adaptive_depth="target_rate")
CERTAIN = replace(GOODPUT, min_speculative_tokens=2)
OFF = replace(FIXED, num_speculative_tokens=0)


@pytest.mark.parametrize(
    ("shed", "params", "row_seconds", "gammas", "reason"),
    [
        ("unpaid", FIXED, 0.0, (4, 0, 4), "shed"),
        ("unpaid", TARGET_RATE, 0.0, (4, 0, 4), "shed"),
        ("unpaid", GOODPUT, 0.0, (4, 4, 4), ""),
        ("all", GOODPUT, 0.0, (4, 0, 4), "shed"),
        ("never", FIXED, 0.0, (4, 4, 4), ""),
        ("unpaid", CERTAIN, 10.0, (2, 0, 2), "low_acceptance"),
        ("all", OFF, 0.0, (0, 0, 0), "client_cap"),
    ],
)
def test_drafts_yield_while_many_wait(
    shed: ShedSpeculation,
    params: SpeculativeParams,
    row_seconds: float,
    gammas: tuple[int, ...],
    reason: str,
) -> None:
    """Unpaid ones are those that are granted whatever rows cost; from three waiting requests on."""
    drafter = fake()
    world = World(drafter, cost=TimedCost(row_seconds), shed=shed)
    request = world.open("r", params)
    found, asked = [], []
    for num_waiting in (2, 3, 0):
        (part,) = world.draft(request, num_waiting=num_waiting)
        world.pool.free_draft("r")
        found.append(len(part.draft))
        asked.append(len(drafter.asks))
        if num_waiting == 3:
            assert part.reason == reason
    assert tuple(found) == gammas
    assert (asked[0] == asked[1]) == (reason in ("shed", "client_cap"))


# --- what drafters read of a device ---


class Reading(FakeDrafter):
    """Notes in ``order`` when it begins and when it ends; ``fails`` then, if it is told to."""

    def __init__(self, name: str, order: list[str], fails: str = "") -> None:
        super().__init__(name, zeros)
        self._order = order
        self._fails = fails

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        self._note("begin")
        length = readback.add(torch.tensor([2]))

        def finish() -> list[DraftTree]:
            self._note("finish")
            return [chain([0] * length.tolist()[0]) for _ in requests]

        return finish

    def _note(self, part: str) -> None:
        self._order.append(f"{self.info.name} {part}")
        if part == self._fails:
            raise RuntimeError(f"told to fail in {part}")


def test_all_drafters_begin_before_one_fetch_and_end_after_it() -> None:
    order: list[str] = []

    class Fetched(Readback):
        def fetch(self) -> None:
            order.append(f"fetch of {self.num_added}")
            super().fetch()

    world = World(Reading("a", order), fake(), Reading("b", order))
    requests = [
        world.open(name, replace(FIXED, draft_strategy=name)) for name in ("a", "fake", "b")
    ]
    parts = [ScheduledRequest(request, 1) for request in requests]
    plan = Plan(parts, num_rows=3, spare_rows=100)
    world.speculation.draft(plan, Fetched())
    assert order == ["a begin", "b begin", "fetch of 2", "a finish", "b finish"]
    assert [len(each.draft) for each in parts] == [2, 4, 2]
    assert world.speculation.num_failures == 0
    assert plan.draft_seconds.keys() == {"a", "fake", "b"}


@pytest.mark.parametrize("part", ["begin", "finish"])
def test_who_fails_in_either_part_is_asked_one_by_one(part: str) -> None:
    order: list[str] = []
    world = World(Reading("fake", order, part), Reading("other", order))
    requests = [world.open(name) for name in "rs"]
    beside = world.open("t", replace(FIXED, draft_strategy="other"))
    drafts = [each.draft for each in world.draft(*requests, beside)]
    assert [len(draft) for draft in drafts] == [4, 4, 2]
    assert world.speculation.num_failures == 0
    (alone,) = world.draft(requests[0])
    assert alone.draft == EMPTY
    assert world.speculation.num_failures == 1


def test_what_does_not_come_from_the_device_costs_no_more_than_drafts() -> None:
    class Broken(Readback):
        def fetch(self) -> None:
            raise RuntimeError("the device is gone")

    order: list[str] = []
    world = World(Reading("fake", order), fake("other"))
    parts = [
        ScheduledRequest(world.open("r"), 1),
        ScheduledRequest(world.open("s", replace(FIXED, draft_strategy="other")), 1),
    ]
    world.speculation.draft(Plan(parts, num_rows=2, spare_rows=100), Broken())
    assert [len(each.draft) for each in parts] == [0, 4]
    assert world.speculation.num_failures == 1
