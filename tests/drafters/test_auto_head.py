"""The head that ``auto`` asks besides its members: where that pays, and told of all in any case."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from drafters.auto import AutoDrafter, AutoSettings
from drafters.base import (
    NORMED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DrafterUnavailableError,
    DraftRequest,
    DraftShape,
    HiddenRows,
    Observation,
    hidden_layers_of,
)
from drafters.registry import build_drafters
from drafters.tree import EMPTY, DraftTree, chain
from worlds.fake_drafters import FakeDrafter
from worlds.simulated_target import check_tree, verify_step

RATE = 100.0
"""Tokens per second."""
VOCAB_SIZE = 100_003
CHAIN = DraftShape(1, 8)
TREE = DraftShape(2, 8)
Guess = Callable[[Sequence[int]], list[int]]


REPEATS = 0
"""The first token of texts that repeat themselves."""


def target(text: Sequence[int]) -> int:
    return len(text) % 50 if text[0] == REPEATS else len(text) * 7_919 % VOCAB_SIZE


def right(text: Sequence[int]) -> list[int]:
    coming = list(text)
    for _ in range(4):
        coming.append(target(coming))
    return coming[len(text) :]


def wrong(text: Sequence[int]) -> list[int]:
    return [VOCAB_SIZE + token_id for token_id in right(text)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Head(FakeDrafter):
    """Takes ``seconds`` for a batch, whatever its size, and notes what it is told."""

    hidden_layers = (2, NORMED)
    num_slots = 3

    def __init__(self, name: str, guess: Guess, seconds: float = 0.0, **more: Any) -> None:
        super().__init__(name, self._guessed, **more)
        needs = DrafterNeeds(hidden_rows=True, draft_slots=True, draft_model="draft")
        self.info = DrafterInfo(name, "Reads states.", needs=needs, samples=True)
        self.guess, self.seconds, self.clock = guess, seconds, Clock()
        self.begun: list[list[str]] = []
        self.calls: list[tuple[Any, ...]] = []

    def _guessed(self, ask: DraftRequest) -> DraftTree:
        return chain(self.guess(ask.token_ids)[: ask.max_nodes], 7)

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        self.begun.append([each.request_id for each in requests])
        for each in requests:
            self._maybe_fail("begin", each.request_id)
        finish = super().begin(requests, readback)
        self.clock.now += self.seconds
        return finish

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


class Guest(FakeDrafter):
    """A guest that drafts from another distribution."""

    def __init__(self, guess: Guess) -> None:
        super().__init__("guest", lambda ask: chain(guess(ask.token_ids)[: ask.depth]))


class World:
    """``auto`` with a head, and with another guest where ``guess`` is given."""

    def __init__(
        self, head: Head, *names: str, guess: Guess | None = None, vocab_size: int = 0
    ) -> None:
        self.head = head
        guests = {} if guess is None else {"guest": Guest(guess)}
        self.auto = AutoDrafter(guests, vocab_size, clock=head.clock)
        self.auto.meet({**guests, head.info.name: head, "auto": self.auto})
        self.texts = {name: [1, 2, number] for number, name in enumerate(names or ("r",))}
        self.num_emitted: dict[str, list[int]] = {name: [] for name in self.texts}
        for name, text in self.texts.items():
            self.auto.open(name, text, {}, "salt")

        self.num_granted, self.row_tokens = VOCAB_SIZE, 0.0
        """Nodes of a draft that the engine verifies, and what a row of them costs, in tokens."""

    def step(self, rate: float = RATE, shape: DraftShape = CHAIN) -> list[DraftTree]:
        asks = [DraftRequest(n, t, 8, shape, tokens_per_second=rate) for n, t in self.texts.items()]
        trees = self.auto.begin(asks, None)()
        for ask, tree in zip(asks, trees, strict=True):
            check_tree(tree, ask.max_nodes, ask.shape)
            granted = tree.subtree(range(min(len(tree), self.num_granted)))
            self._verify(ask.request_id, granted)
        return trees

    def _verify(self, name: str, tree: DraftTree) -> None:
        text = self.texts[name]
        path, emitted = verify_step(tree, text, target)
        text += emitted
        rows = [-1] * (len(tree) + 1)
        seen = Observation(name, text, tree, rows, path, emitted, row_tokens=self.row_tokens)
        self.auto.observe([seen])
        self.num_emitted[name].append(len(emitted))

    def run(self, num_steps: int, rate: float = RATE, shape: DraftShape = CHAIN) -> World:
        for _ in range(num_steps):
            self.step(rate, shape)
        return self

    @property
    def num_asked(self) -> int:
        return len(self.head.begun)


@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize("guess", [None, wrong])
def test_a_head_is_asked_where_it_pays(guess: Guess | None, shape: DraftShape) -> None:
    """It adds four tokens, and takes the time of two, more than is hoped for at first."""
    world = World(Head("head", right, seconds=2 / RATE), guess=guess).run(1500, shape=shape)
    assert world.head.begun[-50:] == [["r"]] * 50
    num_asked = world.num_asked
    world.run(20, shape=shape)
    assert world.num_asked == num_asked + 20
    assert world.num_emitted["r"][-20:] == [5] * 20


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_head_that_takes_longer_than_it_saves_is_only_tried(shape: DraftShape) -> None:
    price = 6.0
    world = World(Head("head", right, seconds=price / RATE)).run(3000, shape=shape)
    written = sum(world.num_emitted["r"])
    assert 4 < world.num_asked < 3 + 0.02 * written / price


@pytest.mark.parametrize(("num_granted", "row_tokens"), [(0, 0.0), (VOCAB_SIZE, 0.9)])
def test_a_head_whose_rows_do_not_pay_is_only_tried(num_granted: int, row_tokens: float) -> None:
    """It is always right and takes little, but the engine grants none of its nodes, or they cost nearly
    all that they bring."""
    world = World(Head("head", right, seconds=0.5 / RATE))
    world.num_granted, world.row_tokens = num_granted, row_tokens
    world.run(1000)
    assert 2 < world.num_asked < 120


def test_hidden_states_are_fetched_for_drafts_of_the_head_alone() -> None:
    world = World(Head("head", right, seconds=6 / RATE))
    fetched: list[int] = []
    world.auto.fetch_hidden = lambda: fetched.append(world.num_asked)
    world.run(300)
    assert fetched == [*range(world.num_asked)]
    assert len(fetched) < 300


def test_what_a_head_takes_is_weighed_by_auto_and_no_part_of_its_own_price() -> None:
    head = Head("head", right, seconds=0.002)
    world = World(head)
    world.step(rate=0.0)
    assert world.auto.weighed_seconds == pytest.approx(0.002)
    head.fails = "begin"
    for _ in range(8):
        world.step(rate=0.0)
    head.begun.clear()
    world.step(rate=0.0)
    assert not head.begun
    assert world.auto.weighed_seconds == 0.0


def test_cost_is_not_weighed_where_the_policy_weighs_none() -> None:
    world = World(Head("head", right, seconds=60.0)).run(50, rate=0.0)
    assert world.num_asked == 50


@pytest.mark.parametrize("rate", [RATE, 0.0])
def test_nobody_asks_a_head_where_free_drafts_are_certain(rate: float) -> None:
    world = World(Head("head", right))
    world.texts["r"][0] = REPEATS
    num_asked = world.run(60, rate).num_asked
    assert num_asked > 10, "at first nobody knows"
    assert world.run(200, rate).num_asked == num_asked


def test_a_head_that_is_wrong_is_given_up_and_noticed_when_it_is_right() -> None:
    head = Head("head", lambda text: right(text) if len(text) > 1000 else wrong(text), 0.3 / RATE)
    world = World(head)
    while len(world.texts["r"]) < 1000:
        world.step()
    assert 10 < world.num_asked < 1000 / 16 + 20
    world.run(200)
    assert world.num_emitted["r"][-20:] == [5] * 20


def test_trials_are_shared_by_all_requests() -> None:
    names = [f"r{number}" for number in range(8)]
    world = World(Head("head", wrong, seconds=0.5 / RATE), *names).run(200)
    num_asked = world.num_asked
    world.run(1600)
    assert 50 < world.num_asked - num_asked <= 0.01 * 8 * 1600 / 0.5
    assert {len(each) for each in world.head.begun[num_asked:]} == {1}


def test_requests_for_which_it_pays_are_asked_for_in_one_batch() -> None:
    """One text is drafted for free."""
    world = World(Head("head", right, seconds=2 / RATE), "a", "b", "c")
    world.texts["b"][0] = REPEATS
    world.run(200)
    assert world.head.begun[-20:] == [["a", "c"]] * 20
    assert {name: each[-1] for name, each in world.num_emitted.items()} == {"a": 5, "b": 9, "c": 5}


def test_drafts_of_head_and_guests_are_one_tree() -> None:
    head = Head("head", lambda text: right(text)[:2])
    world = World(head, guess=lambda text: wrong(text)[:1])
    text = list(world.texts["r"])
    (tree,) = world.step(rate=0.0, shape=TREE)
    roots = {t for t, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == -1}
    assert roots == {right(text)[0], wrong(text)[0]}
    world.run(60, rate=0.0, shape=TREE)
    assert world.num_emitted["r"][-40:] == [3] * 40


def test_a_head_learns_from_its_own_draft_as_far_as_the_text_goes() -> None:
    """Not from the tree that was verified, which has features of others."""
    world = World(Head("head", lambda text: [*right(text)[:2], 70, 71]))
    coming = right(world.texts["r"])[:3]
    world.step(rate=0.0)
    (seen,) = world.head.observed[-1]
    assert seen.emitted_token_ids == coming
    assert list(seen.tree.token_ids) == [*coming[:2], 70]
    assert list(seen.tree.features) == [7, 7, 7]
    assert seen.path == [0, 1, 2]
    assert seen.row_token_ids == [*coming, -1]
    auto, text = world.auto, world.texts["r"]
    text.append(target(text))
    auto.observe([Observation("r", text, EMPTY, [text[-1]], [0], text[-1:])])
    written = text[-1:]
    assert len(world.head.observed) == 1, "it was not asked, and hears of it when it is"
    world.step(rate=0.0)
    missed, _ = (seen for (seen,) in world.head.observed[1:])
    assert (len(missed.tree), list(missed.path), missed.emitted_token_ids) == (0, [0], written)


def test_all_that_the_engine_tells_reaches_the_head_asked_or_not() -> None:
    world = World(Head("head", right))
    head, auto, text = world.head, world.auto, world.texts["r"]
    assert head.opened == ["r"]
    rows = HiddenRows("r", 0, text, (), [5])
    auto.observe_hidden([rows])
    assert auto.num_usable_tokens([1, 2, 3, 4, 5], [5], "salt") == 4
    auto.settle()
    assert head.calls == [
        ("observe_hidden", rows),
        ("num_usable_tokens", [1, 2, 3, 4, 5], [5], "salt"),
        ("settle",),
    ]
    auto.close("r")
    assert head.closed == ["r"]
    assert not head.begun


def test_a_head_computes_what_others_may_find_only_where_it_has_drafted() -> None:
    world = World(Head("head", right))
    text = world.texts["r"]
    world.auto.leave_blocks("r", text, [5])
    assert world.head.calls == []
    world.step()
    world.auto.leave_blocks("r", text, [5])
    assert world.head.calls == [("leave_blocks", "r", text, [5])]


def test_a_head_that_does_not_pay_computes_nothing_for_others() -> None:
    world = World(Head("head", right, seconds=6 / RATE)).run(300)
    assert 0 < world.num_asked < 30
    world.auto.leave_blocks("r", world.texts["r"], [5])
    assert ("leave_blocks", "r", world.texts["r"], [5]) not in world.head.calls


def test_auto_asks_the_engine_for_what_its_head_needs() -> None:
    head = Head("head", right)
    auto = World(head).auto
    assert auto.info.needs == DrafterNeeds(hidden_rows=True, draft_slots=True)
    assert "head" in auto.info.cost
    assert not auto.info.samples
    assert auto.num_slots == 3
    assert hidden_layers_of([auto]) == (NORMED, 2)


def built(wanted: str | None, *names: str) -> AutoDrafter:
    heads: dict[str, Any] = {name: lambda _, name=name: Head(name, right) for name in names}
    settings = {"auto": {"head": wanted}}
    drafters = build_drafters(
        ["auto", "ngram", *names], DrafterContext(drafter_settings=settings), heads
    )
    auto = drafters["auto"]
    assert isinstance(auto, AutoDrafter)
    return auto


def test_the_operator_says_which_head() -> None:
    assert AutoSettings().head is None

    def taken(wanted: str | None, *names: str) -> Drafter | None:
        return built(wanted, *names)._head

    assert taken(None) is None
    assert taken("none", "first", "second") is None
    assert built("none", "first").info.needs == DrafterNeeds()
    for wanted, name in {None: "first", "second": "second"}.items():
        head = taken(wanted, "first", "second")
        assert head is not None
        assert head.info.name == name
    with pytest.raises(DrafterUnavailableError, match="'third' is not loaded; loaded heads: first"):
        built("third", "first")
    with pytest.raises(DrafterUnavailableError, match="'ngram' is not loaded; loaded heads: none"):
        built("ngram")


# --- heads that fail ---


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="drafters.containment")


@pytest.mark.parametrize("fails", ["open", "begin", "propose", "observe"])
def test_a_head_that_fails_for_one_request_drafts_for_the_others(fails: str) -> None:
    head = Head("head", right, fails=fails, failing={"bad"})
    world = World(head, "good", "bad", "other").run(40)
    assert world.num_emitted["good"][-10:] == world.num_emitted["other"][-10:] == [5] * 10
    if fails != "begin":  # alone it is asked otherwise
        assert world.num_emitted["bad"][-10:] == [1] * 10
        assert head.begun[-1] == ["good", "other"]
    for name in world.texts:
        world.auto.close(name)
    assert head.closed == ["good", "bad", "other"]


@pytest.mark.parametrize(
    "guess", [lambda _: [VOCAB_SIZE], lambda text: [*right(text)[:2], 1 << 40], lambda _: [3, -1]]
)
def test_a_head_that_proposes_no_token_costs_its_own_draft_alone(guess: Guess) -> None:
    world = World(Head("head", guess), guess=lambda text: right(text)[:1], vocab_size=VOCAB_SIZE)
    world.run(40)
    assert set(world.num_emitted["r"]) == {2}
    assert world.num_asked == 8


@pytest.mark.parametrize("fails", ["observe_hidden", "leave_blocks"])
def test_a_head_that_does_not_take_what_it_is_told_is_left_out_of_the_request(fails: str) -> None:
    world = World(Head("head", right, fails=fails))
    world.step()
    for _ in range(10):
        world.auto.observe_hidden([HiddenRows("r", 0, [1], (), [5])])
        world.auto.leave_blocks("r", [1], [5])
    assert [method for method, *_ in world.head.calls].count(fails) == 8
    assert world.run(5).num_asked == 1
    assert world.num_emitted["r"][1:] == [1] * 5


def test_a_head_that_does_not_know_what_is_of_use_costs_no_hit() -> None:
    auto = World(Head("head", right, fails="num_usable_tokens")).auto
    assert auto.num_usable_tokens([1, 2, 3], [5], "") == 3
    auto = World(Head("head", right, fails="settle")).auto
    auto.settle()
    assert auto.num_usable_tokens([1, 2, 3], [5], "") == 3, "4 are more than there are"


@pytest.mark.parametrize(("price", "usable"), [(2.0, 4), (6.0, 9)])
def test_nothing_is_computed_again_for_a_head_that_rests(price: float, usable: int) -> None:
    world = World(Head("head", right, seconds=price / RATE))
    assert world.auto.num_usable_tokens([*range(9)], [5, 6], "") == 4, "nobody knows yet"
    world.run(1000)
    assert world.auto.num_usable_tokens([*range(9)], [5, 6], "") == usable
