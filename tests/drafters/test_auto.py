"""One tree of copies, of the target's top tokens and of what guests draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from drafters.auto import AutoDrafter
from drafters.base import (
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DraftRequest,
    DraftShape,
    NewRequest,
    Observation,
    RequestState,
)
from drafters.copying.ngram import NgramDrafter
from drafters.registry import build_drafters
from drafters.tree import EMPTY, DraftTree, chain
from worlds.fake_drafters import TakingDrafter
from worlds.simulated_target import ask, decode, node_paths, tell

Guess = Callable[[Sequence[int]], list[int]]
TREE = DraftShape(width=3, depth=4)


class Guesser(Drafter):
    """A drafter of another distribution, which drafts what a function of the text says and fails where
    the function does."""

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
    num_top_tokens = 30

    def __init__(self, owner: Guesser) -> None:
        self._owner = owner

    def observe(self, observation: Observation) -> None:
        self._owner.heard += observation.emitted_token_ids

    def propose(self, request: DraftRequest) -> DraftTree:
        self._owner.num_asked += 1
        return chain(self._owner.guess(request.token_ids)[: request.max_nodes])


def target(text: Sequence[int]) -> int:
    """Never the same twice."""
    return len(text) * 7_919 % 100_003


def right(text: Sequence[int]) -> list[int]:
    return [(len(text) + ahead) * 7_919 % 100_003 for ahead in range(8)]


def wrong(text: Sequence[int]) -> list[int]:
    return [200_000 + token_id for token_id in right(text)]


def auto_with(**guesses: Guess) -> tuple[AutoDrafter, dict[str, Guesser]]:
    guests = {name: Guesser(name, guess) for name, guess in guesses.items()}
    return AutoDrafter(guests), guests


# --- its own draft ---


def test_nothing_known_means_no_draft() -> None:
    auto = AutoDrafter()
    auto.open("r", [1], {}, "")
    assert ask(auto, [1]) == EMPTY


@pytest.mark.parametrize("shape", [DraftShape(), DraftShape(3, 8)])
def test_repetition_is_copied_to_the_full_depth(shape: DraftShape) -> None:
    period = [*range(30)]

    def repeats(text: Sequence[int]) -> int:
        return period[len(text) % 30]

    alone = decode(NgramDrafter(), period * 2, repeats, 200)
    run = decode(AutoDrafter(), period * 2, repeats, 200, shape=shape)
    assert len(run.num_emitted) <= len(alone.num_emitted) + 2
    assert all(len(tree.survivals) == len(tree) > 0 for tree in run.trees)


def nearly_said(text: Sequence[int]) -> list[int]:
    """The token that comes, and beside it the one that comes after it, as third."""
    coming = target(text)
    return [coming, 200_000, target([*text, coming])]


def test_tokens_that_the_target_nearly_said_are_drafted_and_accepted() -> None:
    run = decode(AutoDrafter(), [1, 2], target, 60, shape=TREE, top_tokens=nearly_said)
    assert run.num_emitted[0] == 1
    assert run.num_emitted.count(2) > 0.9 * len(run.num_emitted)
    without = decode(AutoDrafter(), [1, 2], target, 60, shape=TREE)
    assert set(without.num_emitted) == {1}


def test_top_tokens_are_recycled_after_the_same_token_under_the_same_salt_alone() -> None:
    auto = AutoDrafter()
    text = [5, 1]
    auto.open("r", text, {}, "mine")
    text.append(2)
    tell(auto, text, 1, [[2, 6, 4]], [[0.6, 0.3, 0.1]])
    for name, salt in {"same": "mine", "other": "yours"}.items():
        auto.open(name, [9, 1], {}, salt)
    tree = ask(auto, [9, 1], 3, TREE, request_id="same")
    assert {path[0] for path in node_paths(tree)} >= {2, 6}
    assert ask(auto, [9, 1], 3, TREE, request_id="other") == EMPTY


def test_its_estimates_follow_what_the_text_says() -> None:
    """A copy of the text is never right any more, and estimates fall."""
    text = [*range(40)] * 2
    auto = AutoDrafter()
    auto.open("r", text, {}, "")
    first = ask(auto, text, 1).survivals[0]
    for step in range(60):
        ask(auto, text, 1)
        text += [1_000 + step, *range(5, 15)]
        tell(auto, text, 11)
    assert max(ask(auto, text, 1).survivals, default=0.0) < first / 2


def test_a_chain_and_a_tree_keep_within_their_shape() -> None:
    auto = AutoDrafter()
    text = [1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2, 6, 1, 2]
    auto.open("r", text, {}, "")
    assert ask(auto, text, 8, DraftShape(1, 3)).is_chain()
    tree = ask(auto, text, 64, DraftShape(2, 3))
    assert max(tree.depths()) == 3
    assert not tree.is_chain()


# --- guests ---


def test_a_guest_that_is_right_is_drafted_and_one_that_is_wrong_does_no_harm() -> None:
    auto, _ = auto_with(bad=wrong, good=right)
    run = decode(auto, [1, 2, 3], target, 300, max_nodes=8)
    assert run.num_emitted[-10:] == [9] * 10
    assert run.trees[-1].survivals[-1] > 0.5


def test_two_half_right_guests_make_a_tree_that_is_always_right() -> None:
    def odd(text: Sequence[int]) -> list[int]:
        return right(text)[:1] if len(text) % 2 else wrong(text)[:1]

    def even(text: Sequence[int]) -> list[int]:
        return wrong(text)[:1] if len(text) % 2 else right(text)[:1]

    auto, _ = auto_with(odd=odd, even=even)
    run = decode(auto, [1, 2, 3], target, 40, max_nodes=2, shape=DraftShape(2, 4))
    assert run.num_emitted == [2] * 20


def test_a_prediction_is_drafted_from_the_first_step_on() -> None:
    auto = AutoDrafter()
    auto.open("p", [1, 2, 3], {}, "")
    auto.predict("p", [7, 8, 9, 10])
    tree = ask(auto, [1, 2, 3], 3, request_id="p", tokens_per_second=100.0)
    assert list(tree.token_ids) == [7, 8, 9]
    auto.close("p")
    auto.open("p", [1, 2, 3], {}, "")


def fails(text: Sequence[int]) -> list[int]:
    raise RuntimeError(f"no after {len(text)}")


@pytest.mark.parametrize("guess", [fails, lambda _: [100_003], lambda _: [1 << 40], lambda _: [-1]])
def test_a_failing_guest_is_left_out_and_the_others_go_on(guess: Guess) -> None:
    guests = {"broken": Guesser("broken", guess), "good": Guesser("good", right)}
    run = decode(AutoDrafter(guests, vocab_size=100_003), [1], target, 900)
    assert guests["broken"].num_asked == 8
    assert run.num_emitted[-10:] == [9] * 10


def test_guests_are_opened_told_and_closed_with_the_request() -> None:
    auto, guests = auto_with(good=right)
    run = decode(auto, [1], target, 30)
    assert guests["good"].heard == run.token_ids[1:]
    assert auto.num_top_tokens("r") == guests["good"].num_top_tokens("r") == 30
    with pytest.raises(ValueError, match="already open"):
        auto.open("r", [1], {}, "")
    auto.close("r")
    auto.close("r")
    with pytest.raises(KeyError):
        guests["good"].num_top_tokens("r")
    with pytest.raises(KeyError):
        auto.propose([DraftRequest("r", [1], 4, DraftShape())])


def test_a_guest_that_does_not_pay_is_seldom_asked_and_hears_all_in_the_end() -> None:
    auto, guests = auto_with(bad=wrong)
    run = decode(auto, [1], target, 2_000, tokens_per_second=1e9)
    assert guests["bad"].num_asked < 20
    auto.close("r")
    assert guests["bad"].heard == run.token_ids[1:]


def test_guests_that_cost_a_forward_are_refused() -> None:
    for needs in (DrafterNeeds(hidden_rows=True), DrafterNeeds(draft_slots=True)):
        with pytest.raises(ValueError, match="no model"):
            AutoDrafter({"dear": Guesser("dear", right, needs)})


def test_drafters_of_other_distributions_become_guests() -> None:
    guesser = Guesser("guesser", right)
    window = Guesser("window", right, DrafterNeeds(all_or_nothing=True))
    built = build_drafters(
        ["auto", "ngram", "guesser", "window"],
        plugins={"guesser": lambda _: guesser, "window": lambda _: window},  # type: ignore[dict-item]
    )
    auto = built["auto"]
    assert isinstance(auto, AutoDrafter)
    assert auto._guests == {"guesser": guesser}
    run = decode(auto, [1], target, 300, max_nodes=8)
    assert run.num_emitted[-10:] == [9] * 10


def test_a_guest_that_proposes_no_token_costs_its_own_draft_alone() -> None:
    auto = AutoDrafter.build(DrafterContext(vocab_size=50))
    auto.meet({"outside": Guesser("outside", lambda _: [50])})
    auto.open("r", [1, 2, 3, 1, 2], {}, "")
    tree = ask(auto, [1, 2, 3, 1, 2], 4, DraftShape(width=2))
    assert 3 in tree.token_ids
    assert max(tree.token_ids) < 50


def test_a_guest_is_not_told_again_of_what_it_has_read_with_the_prompt() -> None:
    guest = TakingDrafter()
    drafter = AutoDrafter({"taking": guest})
    text = [1, 2, 3] * 100
    drafter.open("r", text, {}, "")
    assert drafter.read_prompt("r", 0) == 0
    assert drafter.read_prompt("r", 400) == 400
    text.append(4)
    tell(drafter, text)
    assert drafter.read_prompt("r", 400) < 400
    text.append(5)
    tell(drafter, text)
    drafter.close("r")
    assert guest.made["r"].taken == text


def test_a_guest_learns_from_top_tokens_of_the_steps_for_which_it_was_asked() -> None:
    """Before it has drafted anything, too: else it never would."""
    guest = build_drafters(["recycling"])["recycling"]
    auto = AutoDrafter({"recycling": guest})
    text = [1]
    auto.open("r", text, {}, "")
    table = guest._states["r"]
    for token_id, tops in ((2, [2, 9]), (1, [1, 8])):
        ask(auto, text)
        text.append(token_id)
        tell(auto, text, tops=[tops])
        assert table.successors(text[-2]) == tuple(tops)
    tree = ask(auto, text).subtree([0])
    assert list(tree.token_ids) == [2]
    text += [2, 5]
    tops = [[2, 7], [5, 6]]
    auto.observe([Observation("r", text, tree, [2, 5], [0, 1], [2, 5], tops)])
    assert (table.successors(1), table.successors(2)) == ((2, 7), (5, 6))
