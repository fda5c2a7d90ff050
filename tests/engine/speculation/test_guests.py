"""Drafters that are asked beside the one that a request names: where that pays, and what they hear."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from drafters.base import Drafter, DrafterNeeds, DraftRequest, HiddenRows, Observation
from drafters.copying.prediction import PredictionDrafter
from drafters.tables.recycling import RecyclingDrafter
from drafters.tree import EMPTY, DraftTree, chain
from engine.request.outcome import Outcome
from engine.request.params import SpeculativeParams
from engine.schedule.request import Request, ScheduledRequest
from worlds.engine_harness import DictatedCost
from worlds.fake_drafters import FakeDrafter, TakingDrafter
from worlds.simulated_target import verify_step
from worlds.speculation_world import World

VOCAB_SIZE = 100_003
CHAIN = SpeculativeParams(
    draft_strategy="host",
    num_speculative_tokens=8,
    max_speculative_tokens=8,
    tree_strategy="linear",
)
TREE = replace(CHAIN, tree_strategy="tree", tree_width=2, tree_depth=8)
FIXED = replace(CHAIN, adaptive_depth="fixed")
"""Weighs no cost."""
Guess = Callable[[Sequence[int]], list[int]]
REPEATS = 0
"""The first token of texts that the host drafts right."""


def target(text: Sequence[int]) -> int:
    return len(text) * 7_919 % VOCAB_SIZE


def right(text: Sequence[int]) -> list[int]:
    return [(len(text) + ahead) * 7_919 % VOCAB_SIZE for ahead in range(4)]


def wrong(text: Sequence[int]) -> list[int]:
    return [(token_id + 1) % VOCAB_SIZE for token_id in right(text)]


class Host(FakeDrafter):
    """Certain of what it drafts, for texts that repeat themselves; else it drafts nothing."""

    def __init__(self, *guests: Drafter, guess: Guess | None = None) -> None:
        super().__init__("host", self._guessed)
        self.guests, self._guess = guests, guess

    def companions(self, has_prediction: bool) -> Sequence[Drafter]:
        return [each for each in self.guests if has_prediction or not each.info.takes_prediction]

    def _guessed(self, ask: DraftRequest) -> DraftTree:
        text = ask.token_ids
        if self._guess is not None:
            return chain(self._guess(text)[: ask.depth])
        if text[0] != REPEATS:
            return EMPTY
        coming = [(len(text) + ahead) * 7_919 % VOCAB_SIZE for ahead in range(ask.depth)]
        return replace(chain(coming), survivals=[1.0] * ask.depth)


class Head(FakeDrafter):
    """Notes what it is asked and told."""

    hidden_layers = (2,)
    num_slots = 3

    def __init__(self, guess: Guess = right, name: str = "head", **more: Any) -> None:
        needs = DrafterNeeds(hidden_rows=True, draft_slots=True, draft_model="draft")
        super().__init__(name, self._guessed, needs=needs, **more)
        self.guess = guess
        self.begun: list[list[str]] = []
        self.calls: list[tuple[Any, ...]] = []

    def _guessed(self, ask: DraftRequest) -> DraftTree:
        assert len(ask.block_table) * 4 >= len(ask.token_ids) + self.num_slots
        return chain(self.guess(ask.token_ids)[: ask.max_nodes], 7)

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        self.begun.append([each.request_id for each in requests])
        for each in requests:
            self._maybe_fail("begin", each.request_id)
        return super().begin(requests, readback)

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        self._note("observe_hidden", *rows)

    def num_usable_tokens(self, *args: Any) -> int:
        self._note("num_usable_tokens", *args)
        return 4

    def leave_blocks(self, *args: Any) -> None:
        self._note("leave_blocks", *args)

    def settle(self) -> None:
        self._note("settle")

    def _note(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))
        self._maybe_fail(method, "r")


def guest(guess: Guess, **more: Any) -> FakeDrafter:
    """One of another distribution."""
    return FakeDrafter("guest", lambda ask: chain(guess(ask.token_ids)[: ask.depth]), **more)


class BatchCost(DictatedCost):
    """Calls of the head take so long whatever their size; a step takes a second."""

    def __init__(self, row_seconds: float, seconds: float) -> None:
        super().__init__(row_seconds)
        self.seconds = seconds

    def draft_seconds(self, drafter: str, num_asked: int) -> float:
        return self.seconds if drafter == "head" and num_asked else 0.0


class Guests(World):
    """Requests with these ``guests``. ``seconds``: of a call of the head."""

    def __init__(
        self,
        *guests: Drafter,
        names: Sequence[str] = "r",
        wanted: SpeculativeParams = CHAIN,
        seconds: float = 0.0,
        row_seconds: float = 0.0,
        host: Host | None = None,
        prediction: Sequence[int] = (),
    ) -> None:
        self.host = host or Host(*guests)
        self.by_name = {each.info.name: each for each in guests}
        super().__init__(
            self.host,
            *guests,
            cost=BatchCost(row_seconds, seconds),
            vocab_size=VOCAB_SIZE,
            num_blocks=20_000,
        )
        self.requests = {
            name: self.open(name, wanted, 100_000, prediction=prediction) for name in names
        }
        self.num_emitted: dict[str, list[int]] = {name: [] for name in names}
        self.num_granted = VOCAB_SIZE
        """Nodes of a draft that the engine verifies."""

    @property
    def head(self) -> Head:
        head = self.by_name["head"]
        assert isinstance(head, Head)
        return head

    def repeats(self, name: str = "r") -> None:
        self.requests[name].token_ids[0] = REPEATS

    def step(self, tops: Sequence[Sequence[int]] | None = None) -> list[ScheduledRequest]:
        scheduled = self.draft(*self.requests.values())
        for each in scheduled:
            request, name = each.request, each.request.request_id
            each.draft = each.draft.subtree(range(min(len(each.draft), self.num_granted)))
            each.top_token_ids = tops
            path, emitted = verify_step(each.draft, request.token_ids, target)
            request.commit(len(path), emitted)
            self.pool.allocate(name, len(request.token_ids))
            self.pool.free_draft(name)
            said = [-1] * (len(each.draft) + 1)
            each.outcome = Outcome(tuple(said), tuple(path), tuple(emitted), len(path) - 1)
            self.num_emitted[name].append(len(emitted))
        self.speculation.observe(self.plan, scheduled)
        return scheduled

    def run(self, num_steps: int) -> Guests:
        for _ in range(num_steps):
            self.step()
        return self

    def late(self, name: str = "r") -> set[int]:
        """Returns what the last steps wrote, but for plain ones."""
        return {max(pair) for pair in zip(self.emitted(name), self.emitted(name)[1:], strict=False)}

    def emitted(self, name: str) -> list[int]:
        return self.num_emitted[name][-20:]

    @property
    def num_asked(self) -> int:
        return len(self.head.begun)


@pytest.mark.parametrize("wanted", [CHAIN, TREE])
@pytest.mark.parametrize("others", [[], [guest(wrong)]])
def test_a_head_is_asked_where_it_pays(others: list[Drafter], wanted: SpeculativeParams) -> None:
    """It adds four tokens, and takes the time of two, more than is hoped for at first."""
    world = Guests(*others, Head(), wanted=wanted, seconds=2.0).run(1500)
    num_asked = world.num_asked
    world.run(20)
    assert world.num_asked >= num_asked + 18
    assert world.late() == {5}


@pytest.mark.parametrize("wanted", [CHAIN, TREE])
def test_a_head_that_takes_longer_than_it_saves_is_only_tried(wanted: SpeculativeParams) -> None:
    world = Guests(Head(), wanted=wanted, seconds=6.0).run(3000)
    assert 4 < world.num_asked < 3 + 0.02 * sum(world.num_emitted["r"]) / 6.0


@pytest.mark.parametrize(("num_granted", "row_seconds"), [(0, 0.0), (VOCAB_SIZE, 0.9)])
def test_a_head_whose_rows_do_not_pay_is_only_tried(num_granted: int, row_seconds: float) -> None:
    """It is always right and takes little, but the engine grants none of its nodes, or they cost nearly
    all that they bring."""
    world = Guests(Head(), seconds=0.5, row_seconds=row_seconds)
    world.num_granted = num_granted
    world.run(1000)
    assert 2 < world.num_asked < 120


def test_hidden_states_are_told_for_drafts_of_the_head_alone() -> None:
    world = Guests(Head(), seconds=6.0)
    told: list[int] = []
    world.speculation._tell_hidden = lambda _: told.append(world.num_asked)  # type: ignore[method-assign, assignment, misc]
    world.run(300)
    assert told == [*range(world.num_asked)]
    assert len(told) < 300


def test_one_call_serves_those_who_name_a_drafter_and_those_beside_whose_host_it_is_asked() -> None:
    world = Guests(Head(), names="ab", wanted=FIXED)
    world.requests["c"] = world.open("c", replace(FIXED, draft_strategy="head"), 1000)
    world.num_emitted["c"] = []
    world.run(3)
    assert [sorted(each) for each in world.head.begun] == [["a", "b", "c"]] * 3
    assert world.num_emitted == {name: [5, 5, 5] for name in "abc"}
    assert [len(each) for each in world.head.observed] == [3, 3, 3]
    assert world.plan.draft_seconds.keys() == {"host", "head"}


def test_cost_is_not_weighed_where_the_policy_weighs_none() -> None:
    world = Guests(Head(), wanted=FIXED, seconds=60.0).run(50)
    assert world.num_asked == 50


@pytest.mark.parametrize("wanted", [CHAIN, FIXED])
def test_nobody_asks_a_guest_where_the_hosts_draft_is_certain(wanted: SpeculativeParams) -> None:
    world = Guests(Head(), wanted=wanted)
    world.repeats()
    assert world.run(60).num_asked == 0
    assert world.late() == {9}


def test_a_head_that_is_wrong_is_given_up_and_noticed_when_it_is_right() -> None:
    head = Head(lambda text: right(text) if len(text) > 1000 else wrong(text))
    world = Guests(head, seconds=0.3)
    while len(world.requests["r"].token_ids) < 1000:
        world.step()
    assert 10 < world.num_asked < 1000 / 16 + 20
    world.run(200)
    assert world.late() == {5}


def test_trials_are_shared_by_all_requests() -> None:
    names = [f"r{number}" for number in range(8)]
    world = Guests(Head(wrong), names=names, seconds=0.5 / 8).run(200)
    num_asked = world.num_asked
    world.run(1600)
    assert 20 < world.num_asked - num_asked <= 0.01 * 8 * 1600 / 0.5
    assert {len(each) for each in world.head.begun[num_asked:]} == {1}


def test_requests_for_which_it_pays_are_asked_for_in_one_batch() -> None:
    """One text is drafted for free."""
    world = Guests(Head(), names="abc", seconds=2.0 / 3)
    world.repeats("b")
    world.run(200)
    assert world.head.begun[-20:] == [["a", "c"]] * 20
    assert {name: world.late(name) for name in "abc"} == {"a": {5}, "b": {9}, "c": {5}}


def test_drafts_of_host_and_guests_are_one_tree() -> None:
    def other(text: Sequence[int]) -> list[int]:
        return [(token_id + 2) % VOCAB_SIZE for token_id in right(text)[:1]]

    guests = Head(lambda text: right(text)[:2]), guest(other)
    wanted = replace(TREE, adaptive_depth="fixed", tree_width=3)
    world = Guests(*guests, wanted=wanted, host=Host(*guests, guess=lambda t: wrong(t)[:1]))
    text = list(world.requests["r"].token_ids)
    (each,) = world.step()
    roots = {t for t, p in zip(each.draft.token_ids, each.draft.parents, strict=True) if p == -1}
    assert roots == {right(text)[0], wrong(text)[0], other(text)[0]}
    world.run(60)
    assert world.late() == {3}
    assert len(each.proposal.survivals) == len(each.proposal) == 4


@pytest.mark.parametrize(("row_seconds", "num_before"), [(0.1, 2), (0.4, 1), (0.9, 0)])
def test_a_guests_nodes_are_priced_beside_those_of_the_host_that_pay(
    row_seconds: float, num_before: int
) -> None:
    """The host's are believed to be right in 1 of 2 and of 4 cases."""
    told: list[Sequence[float]] = []

    class Priced(Head):
        def _guessed(self, ask: DraftRequest) -> DraftTree:
            told.append(ask.row_prices)
            return super()._guessed(ask)

    head = Priced()
    host = Host(head, guess=lambda text: right(text)[:2])
    world = Guests(head, host=host, row_seconds=row_seconds)
    world.speculation.max_num_nodes = 4
    (each,) = world.step()
    assert len(each.row_prices) == 4
    assert told == [each.row_prices[num_before:]]


def test_two_half_right_guests_make_a_tree_that_is_always_right() -> None:
    def odd(text: Sequence[int]) -> list[int]:
        return right(text)[:1] if len(text) % 2 else wrong(text)[:1]

    def even(text: Sequence[int]) -> list[int]:
        return wrong(text)[:1] if len(text) % 2 else right(text)[:1]

    guests = Head(odd), guest(even)
    world = Guests(*guests, wanted=replace(TREE, adaptive_depth="fixed")).run(40)
    assert world.num_emitted["r"] == [2] * 40


def test_a_head_learns_from_its_own_draft_as_far_as_the_text_goes() -> None:
    """Not from the tree that was verified, which has features of others."""
    world = Guests(Head(lambda text: [*right(text)[:2], 70, 71]), wanted=FIXED)
    text = world.requests["r"].token_ids
    coming = right(text)[:3]
    world.step()
    (seen,) = world.head.observed[-1]
    assert seen.emitted_token_ids == tuple(coming)
    assert list(seen.tree.token_ids) == [*coming[:2], 70]
    assert list(seen.tree.features) == [7, 7, 7]
    assert seen.path == [0, 1, 2]
    assert seen.row_token_ids == [*coming, -1]
    world.speculation.max_num_nodes = 0
    world.step()
    written = text[-1:]
    assert len(world.head.observed) == 1, "it was not asked, and hears of it when it is"
    world.speculation.max_num_nodes = 64
    world.step()
    missed, _ = (seen for (seen,) in world.head.observed[1:])
    assert (len(missed.tree), list(missed.path), missed.emitted_token_ids) == (0, [0], written)


def test_a_guest_that_does_not_pay_hears_all_in_the_end() -> None:
    world = Guests(Head(wrong), seconds=60.0).run(500)
    assert world.num_asked < 20
    request = world.requests["r"]
    assert world.speculation.close(request) == 0
    heard = [each for (seen,) in world.head.observed for each in seen.emitted_token_ids]
    assert heard == request.token_ids[3:]
    assert world.head.closed == ["r"]


def test_what_a_head_and_a_guest_want_to_see_is_what_the_engine_keeps() -> None:
    guests = Head(num_top=3), guest(right, num_top=5)
    guests[1].info = replace(guests[1].info, needs=DrafterNeeds(top_probs=True))
    world = Guests(*guests, wanted=FIXED)
    (each,) = world.step()
    assert (each.hidden_layers, each.num_top_tokens, each.wants_top_probs) == ((2,), 5, True)
    world.repeats()
    (each,) = world.step()
    assert (each.hidden_layers, each.num_top_tokens, each.wants_top_probs) == ((2,), 0, False)


def test_a_guest_learns_from_top_tokens_of_the_steps_for_which_it_was_asked() -> None:
    """Before it has drafted anything, too: else it never would."""
    recycling = RecyclingDrafter.build(None)  # type: ignore[arg-type]
    world = Guests(recycling, wanted=FIXED)
    text, table = world.requests["r"].token_ids, recycling._states["r"]
    world.step([[target(text), 9]])
    assert table.successors(3) == (text[-1], 9)


def test_a_prediction_is_drafted_from_the_first_step_on() -> None:
    world = Guests(PredictionDrafter(), prediction=right([1, 2, 3]))
    world.step()
    assert world.num_emitted["r"] == [5]
    world = Guests(PredictionDrafter())
    assert world.requests["r"].drafting.guests == []


class Slow(FakeDrafter):
    """Takes all the time that there is for prompts, in two steps."""

    num_left = 2

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        del request_id
        self.num_left -= num_tokens > 0
        return num_tokens if self.num_left >= 0 else 0


def test_a_guest_is_not_told_again_of_what_it_has_read_with_the_prompt() -> None:
    taking = TakingDrafter()
    world = Guests(Slow("slow"), taking, wanted=FIXED)
    world.repeats()
    request = world.run(1).requests["r"]
    assert taking.made["r"].taken == []
    world.run(4)
    world.speculation.close(request)
    assert taking.made["r"].taken == request.token_ids


# --- rows in blocks that are left ---


def test_a_head_computes_what_others_may_find_only_where_it_has_drafted() -> None:
    world = Guests(Head())
    request = world.requests["r"]
    world.speculation.leave_blocks(request)
    assert world.head.calls == []
    world.step()
    world.speculation.leave_blocks(request)
    world.speculation.settle()
    table = world.pool.block_table("r")
    assert world.head.calls == [("leave_blocks", "r", request.token_ids, table), ("settle",)]


def test_a_head_that_does_not_pay_computes_nothing_for_others() -> None:
    world = Guests(Head(), seconds=6.0).run(1500)
    assert 0 < world.num_asked < 30
    world.speculation.leave_blocks(world.requests["r"])
    assert world.head.calls == []


@pytest.mark.parametrize(("seconds", "usable"), [(2.0, 4), (6.0, 9)])
def test_nothing_is_computed_again_for_a_head_that_rests(seconds: float, usable: int) -> None:
    world = Guests(Head(), seconds=seconds)
    assert usable_tokens(world) == 4, "nobody knows yet"
    assert world.head.calls == [("num_usable_tokens", [*range(9)], [5, 6, 7], "")]
    world.run(1000)
    assert usable_tokens(world) == usable


def usable_tokens(world: Guests) -> int:
    """Returns the usable part of a prefix of 9 tokens, for a new request."""
    params = replace(world.requests["r"].params, prompt_token_ids=tuple(range(9)))
    new = Request(params, world.requests["r"].sampling)
    return world.speculation.num_usable_tokens(new, [5, 6, 7])


def test_a_head_that_does_not_know_what_is_of_use_costs_no_hit() -> None:
    assert usable_tokens(Guests(Head(fails="num_usable_tokens"))) == 9


# --- guests that fail ---


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, logger="drafters.containment"):
        yield


@pytest.mark.parametrize("fails", ["open", "begin", "propose"])
def test_a_head_that_fails_for_one_request_drafts_for_the_others(fails: str) -> None:
    head = Head(fails=fails, failing={"bad"})
    world = Guests(head, names=["good", "bad", "other"], wanted=FIXED).run(40)
    assert world.late("good") == world.late("other") == {5}
    if fails != "begin":  # alone it is asked otherwise
        assert world.late("bad") == {1}
        assert head.begun[-1] == ["good", "other"]
    assert world.speculation.num_failures == 0, "those of guests are their own"
    for each in world.requests.values():
        assert world.speculation.close(each) == 0
    assert head.closed == ["good", "bad", "other"]


@pytest.mark.parametrize(
    "guess", [lambda _: [VOCAB_SIZE], lambda text: [*right(text)[:2], 1 << 40], lambda _: [3, -1]]
)
def test_a_guest_that_proposes_no_token_costs_its_own_draft_alone(guess: Guess) -> None:
    bad = guest(guess)
    world = Guests(Head(lambda text: right(text)[:1]), bad, wanted=FIXED).run(40)
    assert set(world.num_emitted["r"]) == {2}
    assert len(bad.asks) == 8


@pytest.mark.parametrize("fails", ["observe", "num_top_tokens", "leave_blocks"])
def test_a_head_that_does_not_take_what_it_is_told_is_left_out_of_the_request(fails: str) -> None:
    world = Guests(Head(fails=fails), wanted=FIXED)
    for _ in range(12):
        world.step()
        world.speculation.leave_blocks(world.requests["r"])
    assert world.num_asked == 8
    assert world.num_emitted["r"] == [5] * 8 + [1] * 4


@pytest.mark.parametrize("companions", [lambda _: 1 / 0, lambda _: 1, lambda _: ["head"]])
def test_a_host_whose_companions_are_none_drafts_alone(companions: Any) -> None:
    host = Host()
    host.companions = companions  # type: ignore[method-assign]
    world = Guests(host=host)
    world.repeats()
    assert world.run(30).late() == {9}
    assert usable_tokens(world) == 9


def test_what_guests_hear_of_is_of_their_request() -> None:
    head = Head()
    world = Guests(head, names="ab", wanted=FIXED)
    world.requests["b"].token_ids.append(4)
    world.run(2)
    texts = {name: each.token_ids for name, each in world.requests.items()}
    seen: list[Observation] = [each for group in head.observed for each in group]
    assert all(each.token_ids is texts[each.request_id] for each in seen)
