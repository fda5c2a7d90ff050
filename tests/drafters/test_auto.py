"""One tree of copies and of the target's top tokens, and who is asked besides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from drafters.auto import AutoDrafter, AutoSettings
from drafters.base import Drafter, DrafterContext, DrafterNeeds, DrafterUnavailableError, DraftShape
from drafters.copying.ngram import NgramDrafter
from drafters.registry import build_drafters
from drafters.tree import EMPTY
from worlds.fake_drafters import FakeDrafter
from worlds.simulated_target import ask, decode, node_paths, tell

TREE = DraftShape(width=3, depth=4)


def target(text: Sequence[int]) -> int:
    """Never the same twice."""
    return len(text) * 7_919 % 100_003


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


def nearly_said(text: Sequence[int]) -> dict[int, float]:
    """The token that comes, and beside it the one that comes after it, as third."""
    coming = target(text)
    return {coming: 0.5, 200_000: 0.3, target([*text, coming]): 0.2}


def test_tokens_that_the_target_nearly_said_are_drafted_and_accepted() -> None:
    run = decode(AutoDrafter(), [1, 2], target, 60, shape=TREE, tops=nearly_said)
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


# --- who is asked besides ---


def test_companions_are_plugins_that_need_no_model_one_head_and_the_prediction() -> None:
    plugins = {
        "guess": DrafterNeeds(top_probs=True),
        "window": DrafterNeeds(all_or_nothing=True),
        "head": DrafterNeeds(hidden_rows=True, draft_slots=True, draft_model="draft"),
        "model": DrafterNeeds(draft_slots=True),
    }
    names = [*plugins, "auto", "ngram", "prediction"]
    built = build_drafters(names, plugins={name: maker(name, plugins[name]) for name in plugins})
    guess, head, prediction = built["guess"], built["head"], built["prediction"]
    assert list(built["auto"].companions(False)) == [guess, head]
    assert list(built["auto"].companions(True)) == [guess, head, prediction]
    (alone,) = build_drafters(["auto"])["auto"].companions(True)
    assert alone.info.takes_prediction


def test_the_operator_says_which_head() -> None:
    assert AutoSettings().head is None
    assert head_of(None) == ""
    assert head_of("none", "first", "second") == ""
    assert head_of(None, "first", "second") == "first"
    assert head_of("second", "first", "second") == "second"
    with pytest.raises(DrafterUnavailableError, match="'third' is not loaded; loaded heads: first"):
        head_of("third", "first")
    with pytest.raises(DrafterUnavailableError, match="'ngram' is not loaded; loaded heads: none"):
        head_of("ngram")


def head_of(wanted: str | None, *names: str) -> str:
    """The head of an auto that says so, beside these; "" where it has none."""
    needs = DrafterNeeds(hidden_rows=True)
    context = DrafterContext(drafter_settings={"auto": {"head": wanted}})
    heads = {name: maker(name, needs) for name in names}
    auto = build_drafters(["auto", "ngram", *names], context, heads)["auto"]
    assert not auto.info.needs.hidden_rows
    found = [each.info.name for each in auto.companions(False)]
    assert all(f"a draft of {name}." in auto.info.cost for name in found)
    return "".join(found)


def maker(name: str, needs: DrafterNeeds) -> Callable[[DrafterContext], Drafter]:
    return lambda _: FakeDrafter(name, needs=needs)
