"""What a copy got wrong before is drafted instead, or beside it."""

from __future__ import annotations

import pytest

from drafters.base import DraftShape
from drafters.copying import alignment as suffix_corrections
from drafters.copying.alignment import Corrections
from drafters.copying.suffix import SuffixDrafter
from worlds.simulated_target import ask, decode, node_paths, tell

CHAIN, TREE = DraftShape(1, 64), DraftShape(4, 64)
OLD, NEW = 7, 8


def code(name: int) -> list[int]:
    """A name, always after token 6, among tokens that occur once."""
    text: list[int] = []
    for part in range(6):
        text += [*range(100 + 20 * part, 119 + 20 * part), 6, name]
    return text


def test_shares_follow_what_happened() -> None:
    corrections = Corrections()
    assert corrections.find(6, OLD, 0.0) is None
    corrections.learn(6, OLD, NEW)
    assert corrections.find(6, OLD, 0.0) == (NEW, 1 / 2)
    corrections.learn(6, OLD, NEW)
    assert corrections.find(6, OLD, 0.0) == (NEW, 2 / 3)
    corrections.confirm(6, [OLD, 6, OLD, 9])
    assert corrections.find(6, OLD, 0.0) == (NEW, 2 / 5)
    assert corrections.find(6, OLD, 0.41) is None
    assert corrections.find(5, OLD, 0.0) is None
    corrections.learn(6, OLD, 9)
    assert corrections.find(6, OLD, 0.0) == (9, 3 / 6)


def test_what_was_learnt_is_found_in_a_run() -> None:
    corrections = Corrections()
    assert not corrections.any_in(6, [OLD], 0.0)
    corrections.learn(6, OLD, NEW)
    assert corrections.any_in(6, [OLD, 1], 0.5)
    assert corrections.any_in(5, [6, OLD], 0.5)
    assert not corrections.any_in(5, [6, OLD], 0.6)
    assert not corrections.any_in(5, [OLD, 6], 0.5)


def test_the_oldest_corrections_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_corrections, "MAX_CORRECTIONS", 2)
    corrections = Corrections()
    for original in (1, 2, 1, 3):
        corrections.learn(6, original, NEW)
    assert len(corrections) == 2
    assert corrections.find(6, 2, 0.0) is None
    assert corrections.find(6, 1, 0.0) == (NEW, 2 / 3)


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_name_is_changed_by_hand_only_a_few_times(shape: DraftShape) -> None:
    prompt, output = [*code(OLD), 5], code(NEW)

    def target(token_ids: list[int]) -> int:
        done = len(token_ids) - len(prompt)
        return output[done] if done < len(output) else 1_000 + done

    run = decode(SuffixDrafter(), prompt, target, len(output), max_nodes=24, shape=shape)
    text = run.token_ids[len(prompt) :]
    drafted: list[bool] = []
    for num_emitted in run.num_emitted:
        drafted += [True] * (num_emitted - 1) + [False]
    names = [drafted[at] for at, token_id in enumerate(text[: len(output)]) if token_id == NEW]
    assert len(names) == 6
    # The first change comes out of nowhere; when it has happened twice it is expected.
    assert not names[0]
    assert all(names[2:])


def test_a_tree_has_the_original_and_the_correction() -> None:
    prompt = [*code(OLD), 5]
    text = [*prompt, *code(NEW)[:40]]  # up to the second name, one change behind it
    drafter = SuffixDrafter()
    drafter.open("r", prompt, {}, "")
    known = list(prompt)
    for token_id in text[len(prompt) :]:
        ask(drafter, known, 8, TREE)
        known.append(token_id)
        tell(drafter, known)
    paths = {(known[-1], *path)[-2:] for path in node_paths(ask(drafter, known, 24, TREE))}
    assert {(6, OLD), (6, NEW)} <= paths
