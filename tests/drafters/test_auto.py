"""Choosing among drafters by what the text says of their proposals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from drafters.auto import AutoDrafter
from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DrafterUnavailableError,
    DraftRequest,
    DraftShape,
    NewRequest,
    Observation,
    RequestState,
)
from drafters.copying.ngram import NgramDrafter
from drafters.copying.prediction import PredictionDrafter
from drafters.registry import build_drafters
from drafters.tree import EMPTY, DraftTree, chain
from worlds.simulated_target import ask, decode, node_paths, tell

Guess = Callable[[Sequence[int]], list[int]]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Guesser(Drafter):
    """Drafts what a function of the text says; fails where the function does."""

    clock: Clock | None = None
    seconds = 0.0
    """What it takes to propose, on this clock."""

    def __init__(self, name: str, guess: Guess, needs: DrafterNeeds | None = None) -> None:
        super().__init__()
        self.heard: list[int] = []
        self.info = DrafterInfo(name, "guesses", drafts_trees=False, needs=needs or DrafterNeeds())
        self.guess = guess
        self.num_asked = 0

    def start(self, request: NewRequest) -> RequestState:
        del request
        return _Guesses(self)


class _Guesses(RequestState):
    num_top_tokens = 3

    def __init__(self, owner: Guesser) -> None:
        self._owner = owner

    def observe(self, observation: Observation) -> None:
        self._owner.heard += observation.emitted_token_ids

    def propose(self, request: DraftRequest) -> DraftTree:
        self._owner.num_asked += 1
        if self._owner.clock is not None:
            self._owner.clock.now += self._owner.seconds
        return chain(self._owner.guess(request.token_ids)[: request.max_nodes])


def cannot_work(context: DrafterContext) -> Drafter:  # noqa: ARG001
    raise DrafterUnavailableError("needs what is not here")


def target(text: Sequence[int]) -> int:
    return len(text) % 50


def right(text: Sequence[int]) -> list[int]:
    return [(len(text) + ahead) % 50 for ahead in range(8)]


def wrong(text: Sequence[int]) -> list[int]:
    return [60 + token_id for token_id in right(text)]


def test_the_member_that_is_right_is_soon_the_one_that_drafts() -> None:
    for members in ([("good", right), ("bad", wrong)], [("bad", wrong), ("good", right)]):
        auto = AutoDrafter({name: Guesser(name, guess) for name, guess in members})
        run = decode(auto, [1, 2, 3], target, 120, max_nodes=8)
        assert run.num_emitted[4:] == [9] * len(run.num_emitted[4:])


def test_two_half_right_members_make_a_tree_that_is_always_right() -> None:
    def odd(text: Sequence[int]) -> list[int]:
        return right(text)[:1] if len(text) % 2 else wrong(text)[:1]

    def even(text: Sequence[int]) -> list[int]:
        return wrong(text)[:1] if len(text) % 2 else right(text)[:1]

    auto = AutoDrafter({"odd": Guesser("odd", odd), "even": Guesser("even", even)})
    shape = DraftShape(width=2, depth=4)
    run = decode(auto, [1, 2, 3], target, 40, max_nodes=2, shape=shape)
    assert run.num_emitted == [2] * 20


def test_it_keeps_up_with_its_best_member_on_repetition_and_on_a_prediction() -> None:
    period = [*range(30)]

    def repeats(text: Sequence[int]) -> int:
        return period[len(text) % 30]

    alone = decode(NgramDrafter(), period * 2, repeats, 200)
    auto = AutoDrafter(build_drafters(["prediction", "ngram", "nasd"]))
    assert len(decode(auto, period * 2, repeats, 200).num_emitted) <= len(alone.num_emitted) + 2

    auto = AutoDrafter({"prediction": PredictionDrafter(), "ngram": NgramDrafter()})
    auto.open("p", [1, 2, 3], {}, "")
    auto.predict("p", [7, 8, 9, 10])
    assert list(ask(auto, [1, 2, 3], 3, request_id="p").token_ids) == [7, 8, 9]


def fails(text: Sequence[int]) -> list[int]:
    raise RuntimeError(f"no after {len(text)}")


@pytest.mark.parametrize(
    "guess", [fails, lambda _: [50], lambda text: [*right(text)[:2], 1 << 40], lambda _: [3, -1]]
)
def test_a_failing_member_is_left_out_and_the_others_go_on(guess: Guess) -> None:
    broken = Guesser("broken", guess)
    members = {"broken": broken, "good": Guesser("good", right)}
    run = decode(AutoDrafter(members, vocab_size=50), [1], target, 900)
    assert broken.num_asked == 4
    assert run.num_emitted[4:] == [9] * len(run.num_emitted[4:])


def test_members_are_opened_asked_and_closed_with_the_request() -> None:
    member = Guesser("good", right)
    auto = AutoDrafter({"good": member})
    auto.open("r", [1], {}, "")
    assert member.num_top_tokens("r") == 3
    assert auto.num_top_tokens("r") == 3
    with pytest.raises(ValueError, match="already open"):
        auto.open("r", [1], {}, "")
    auto.close("r")
    auto.close("r")
    with pytest.raises(KeyError):
        member.num_top_tokens("r")
    with pytest.raises(KeyError):
        auto.propose([DraftRequest("r", [1], 4, DraftShape())])


def test_members_that_cost_a_forward_are_refused() -> None:
    for needs in (DrafterNeeds(hidden_rows=True), DrafterNeeds(draft_slots=True)):
        with pytest.raises(ValueError, match="no model"):
            AutoDrafter({"dear": Guesser("dear", right, needs)})
    with pytest.raises(ValueError, match="at least one"):
        AutoDrafter({})
    assert AutoDrafter(
        {"a": Guesser("a", right, DrafterNeeds(top_probs=True))}
    ).info.needs.top_probs


def test_nothing_known_means_no_draft() -> None:
    auto = AutoDrafter({"silent": Guesser("silent", lambda _: [])})
    auto.open("r", [1], {}, "")
    assert ask(auto, [1]) == EMPTY


def test_a_chain_asks_no_further_than_the_member_that_is_certain() -> None:
    good, late = Guesser("good", right), Guesser("late", right)
    auto = AutoDrafter({"good": good, "late": late})
    num_steps = len(decode(auto, [1], target, 900, max_nodes=8).num_emitted)
    assert good.num_asked == num_steps
    assert late.num_asked < num_steps / 4
    late = Guesser("late", right)
    auto = AutoDrafter({"good": Guesser("good", right), "late": late})
    shape = DraftShape(width=2, depth=8)
    num_steps = len(decode(auto, [1], target, 90, max_nodes=8, shape=shape).num_emitted)
    assert late.num_asked == num_steps


def test_a_member_whose_time_comes_is_noticed() -> None:
    """The first member is right at first, the second one later."""
    early = Guesser("early", lambda text: right(text) if len(text) < 600 else [])
    late = Guesser("late", lambda text: right(text) if len(text) >= 600 else wrong(text))
    run = decode(AutoDrafter({"early": early, "late": late}), [1], target, 1_500, max_nodes=8)
    assert run.num_emitted[-50:] == [9] * 50
    assert late.num_asked < len(run.num_emitted)


RATE = 100.0
"""Tokens per second of a batch in which cost is weighed."""


def timed_auto(**members: tuple[Guess, float]) -> tuple[AutoDrafter, dict[str, Guesser]]:
    """Members with what they take to propose, in tokens of the batch."""
    clock = Clock()
    guessers = {}
    for name, (guess, price) in members.items():
        each = guessers[name] = Guesser(name, guess)
        each.clock, each.seconds = clock, price / RATE
    return AutoDrafter(guessers, clock=clock), guessers


@pytest.mark.parametrize("shape", [DraftShape(1, 8), DraftShape(2, 8)])
def test_who_does_not_earn_its_time_sleeps_and_is_seldom_tried(shape: DraftShape) -> None:
    """In trees as well; where cost is not weighed a tree asks everybody in every step."""

    def half(text: Sequence[int]) -> list[int]:
        return right(text)[:4]

    auto, members = timed_auto(half=(half, 0.02), idle=(lambda _: [], 0.02), late=(half, 0.02))
    told = {"shape": shape, "tokens_per_second": RATE}
    run = decode(auto, [1], target, 4_000, max_nodes=8, **told)  # type: ignore[arg-type]
    num_steps = len(run.num_emitted)
    assert run.num_emitted[20:] == [5] * (num_steps - 20)
    num_tried = members["idle"].num_asked + members["late"].num_asked
    assert num_tried > 10
    assert num_tried * 0.02 < 0.004 * len(run.token_ids)
    before = num_tried
    auto.open("second", [1], {}, "")  # it starts from what is known
    for _ in range(50):
        ask(auto, [1], 8, shape, request_id="second", tokens_per_second=RATE)
    assert members["idle"].num_asked + members["late"].num_asked == before


def test_a_sleeper_is_found_when_it_has_become_the_best() -> None:
    auto, members = timed_auto(
        early=(lambda text: right(text) if len(text) < 2_000 else [], 0.02),
        late=(lambda text: right(text) if len(text) >= 2_000 else wrong(text), 0.02),
    )
    run = decode(auto, [1], target, 9_000, max_nodes=8, tokens_per_second=RATE)
    assert run.num_emitted[-50:] == [9] * 50
    assert members["late"].num_asked < len(run.num_emitted)


def test_who_slept_hears_all_it_missed_when_it_is_tried_and_at_the_end() -> None:
    auto, members = timed_auto(good=(right, 0.01), bad=(wrong, 0.01))
    run = decode(auto, [1], target, 2_000, max_nodes=8, tokens_per_second=RATE)
    slept = list(members["bad"].heard)
    assert slept == run.token_ids[1 : 1 + len(slept)]
    assert members["good"].heard == run.token_ids[1:]
    assert members["bad"].num_asked * 0.01 < 0.004 * len(run.token_ids)
    auto.close("r")
    assert members["bad"].heard == run.token_ids[1:]


def test_who_sleeps_wants_to_see_no_top_tokens() -> None:
    auto, members = timed_auto(good=(right, 0.01), bad=(wrong, 0.01))
    members["bad"].start = lambda _: _wanting(members["bad"], 9)  # type: ignore[method-assign]
    auto.open("r", [1], {}, "")
    assert auto.num_top_tokens("r") == 9
    auto.close("r")
    decode(auto, [1], target, 2_000, max_nodes=8, tokens_per_second=RATE)
    assert auto.num_top_tokens("r") == 3


def _wanting(owner: Guesser, num_top_tokens: int) -> RequestState:
    state = _Guesses(owner)
    state.num_top_tokens = num_top_tokens
    return state


def test_what_a_client_foresees_is_asked_for_from_the_first_step_on() -> None:
    """Though nothing is known of the member that copies it."""
    auto = AutoDrafter(build_drafters(["ngram", "suffix", "prediction"]))
    decode(auto, [5, 6], target, 900, tokens_per_second=RATE, request_id="before")
    auto.open("r", [1, 2, 3], {}, "")
    auto.predict("r", [7, 8, 9, 10])
    tree = ask(auto, [1, 2, 3], 3, request_id="r", tokens_per_second=RATE)
    assert list(tree.token_ids) == [7, 8, 9]


def weights(auto: AutoDrafter) -> dict[str, float]:
    return {each.drafter.info.name: each.weight for each in auto._states["r"].members}


def test_weights_follow_what_each_member_would_have_had_accepted() -> None:
    """All propose for a tree, whoever is drafted from."""

    def nearly(text: Sequence[int]) -> list[int]:
        return right(text)[:7]

    guesses = {"wrong": wrong, "nearly": nearly, "right": right}
    auto = AutoDrafter({name: Guesser(name, guess) for name, guess in guesses.items()})
    decode(auto, [1], target, 200, max_nodes=16, shape=DraftShape(width=2, depth=8))
    found = weights(auto)
    assert found["wrong"] < 0.1 < found["nearly"] < 0.5 < found["right"] == 1.0
    equal = AutoDrafter({name: Guesser(name, right) for name in guesses})
    decode(equal, [1], target, 200, max_nodes=16, shape=DraftShape(width=2, depth=8))
    assert {weights(equal)[name] for name in guesses} == {1.0}


def test_who_proposes_nothing_keeps_its_weight() -> None:
    seldom = Guesser("seldom", lambda text: right(text) if len(text) % 50 == 0 else [])
    usual = Guesser("usual", lambda text: right(text)[:1])
    auto = AutoDrafter({"seldom": seldom, "usual": usual})
    decode(auto, [1], target, 300, max_nodes=8, shape=DraftShape(width=2, depth=8))
    assert weights(auto)["seldom"] == 1.0


def unforeseen(text: Sequence[int]) -> int:
    """Never the same twice."""
    return len(text) * 7_919 % 100_003


def nearly_said(text: Sequence[int]) -> list[int]:
    """The token that comes, and beside it the one that comes after it, as third."""
    coming = unforeseen(text)
    return [coming, 200_000, unforeseen([*text, coming])]


def test_tokens_that_the_target_nearly_said_are_drafted_and_accepted() -> None:
    shape = DraftShape(width=3, depth=4)
    silent = {"silent": Guesser("silent", lambda _: [])}
    run = decode(AutoDrafter(silent), [1, 2], unforeseen, 60, shape=shape, top_tokens=nearly_said)
    assert run.num_emitted[0] == 1
    assert run.num_emitted[1:] == [2] * len(run.num_emitted[1:])
    without = decode(AutoDrafter(silent), [1, 2], unforeseen, 60, shape=shape)
    assert set(without.num_emitted) == {1}
    # In a chain there is room for the likeliest of them alone, which is never right here.
    run = decode(AutoDrafter(silent), [1, 2], unforeseen, 60, top_tokens=nearly_said)
    assert run.num_accepted == 0


def test_what_was_nearly_said_goes_on_as_it_did_before() -> None:
    auto = AutoDrafter({"silent": Guesser("silent", lambda _: [])})
    text = [5, 6, 7, 8, 9, 1]
    auto.open("r", text, {}, "")
    text.append(2)
    tell(auto, text, 1, [[2, 6, 4]])
    tree = ask(auto, text, 4, DraftShape(width=2, depth=3))
    assert [list(path) for path in node_paths(tree)] == [[6], [6, 7], [6, 7, 8], [4]]


def test_members_are_those_of_the_registry_that_need_no_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def further(name: str, needs: DrafterNeeds = DrafterNeeds(), part_of: str = "") -> None:  # noqa: B008
        body = {"info": DrafterInfo(name, "Guesses.", needs=needs), "part_of": part_of}
        monkeypatch.setitem(REGISTERED, name, type(name, (Drafter,), body))

    further("further")
    further("window", DrafterNeeds(all_or_nothing=True))
    further("less", part_of="further")
    further("absent")
    monkeypatch.setattr(REGISTERED["absent"], "build", cannot_work)
    auto = AutoDrafter.build(DrafterContext())
    plain = {"ngram", "prediction", "suffix", "nasd", "stand", "recycling"}
    assert set(auto._members) == plain | {"further"}
    assert auto.info.takes_prediction
    assert auto.info.needs == DrafterNeeds(top_probs=True)


def test_drafters_of_other_distributions_become_members() -> None:
    guesser = Guesser("guesser", right)
    window = Guesser("window", right, DrafterNeeds(all_or_nothing=True))
    built = build_drafters(
        ["auto", "guesser", "window"],
        plugins={"guesser": lambda _: guesser, "window": lambda _: window},  # type: ignore[dict-item]
    )
    auto = built["auto"]
    assert isinstance(auto, AutoDrafter)
    assert auto._members["guesser"] is guesser
    assert "window" not in auto._members
    run = decode(auto, [1], target, 300, max_nodes=8)
    assert run.num_emitted[-20:] == [9] * 20


def test_a_member_from_outside_that_proposes_no_token_costs_its_own_draft_alone() -> None:
    auto = AutoDrafter.build(DrafterContext(vocab_size=50))
    auto.meet({"outside": Guesser("outside", lambda _: [50])})
    auto.open("r", [1, 2, 3, 1, 2], {}, "")
    tree = ask(auto, [1, 2, 3, 1, 2], 4, DraftShape(width=2))
    assert 3 in tree.token_ids
    assert max(tree.token_ids) < 50
