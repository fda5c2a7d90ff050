"""Where copies went wrong before, the correction is drafted in their place, or beside them."""

from __future__ import annotations

import pytest

from drafters.base import DraftShape
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


def drafts_of(original: list[int], actual: list[int], shape: DraftShape) -> set[tuple[int, ...]]:
    """Returns the drafts for a third place, after ``original`` became ``actual`` at two others."""
    between = [list(range(start, start + 30)) for start in (100, 200, 300, 400)]
    prompt = [
        *between[0],
        *original,
        *between[1],
        *original,
        *between[2],
        *original,
        *between[3],
        5,
    ]
    text = [*between[0], *actual, *between[1], *actual, *between[2]]
    return paths_after(prompt, text, shape)


@pytest.mark.parametrize("shape", [CHAIN, TREE])
@pytest.mark.parametrize(
    ("original", "actual"),
    [([1, 6, 2], [3, 6, 4]), ([1], [3, 7, 4]), ([1, 2, 3], [4])],
    ids=["both", "longer", "shorter"],
)
def test_all_tokens_of_a_name_are_changed_at_once(
    original: list[int], actual: list[int], shape: DraftShape
) -> None:
    # What comes in between differs at all three places: the changed tokens are known by themselves.
    paths = drafts_of([9, *original], [9, *actual], shape)
    assert (9, *actual, 400, 401) in {path[: len(actual) + 3] for path in paths}


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_name_is_known_after_other_tokens_too(shape: DraftShape) -> None:
    name, new = [OLD, 9], [NEW, 10, 11]
    parts = [list(range(start, start + 30)) for start in range(100, 700, 100)]
    prompt = [token_id for part in parts for token_id in (*part, *name)]
    text = [token_id for part in parts[:4] for token_id in (*part, *new)] + parts[4]
    paths = paths_after([*prompt, 5], text, shape)
    assert (*new, 600) in {path[:4] for path in paths}


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_change_that_was_begun_is_gone_through_with(shape: DraftShape) -> None:
    name, new = [OLD, 9], [NEW, 10, 11]
    parts = [list(range(start, start + 30)) for start in (100, 200, 300)]
    prompt = [token_id for part in parts for token_id in (*part, *name)]
    before = [*parts[0], *new, *parts[1]]
    for num_written in range(1, len(new) + 1):
        paths = paths_after([*prompt, 5], [*before, *new[:num_written]], shape)
        assert (*new[num_written:], 300, 301) in {
            path[: len(new) - num_written + 2] for path in paths
        }


def paths_after(prompt: list[int], text: list[int], shape: DraftShape) -> set[tuple[int, ...]]:
    """Returns the drafts after ``text`` has been written, a token at a time."""
    drafter = SuffixDrafter()
    drafter.open("r", prompt, {}, "")
    known = list(prompt)
    for token_id in text:
        ask(drafter, known, 8, shape)
        known.append(token_id)
        tell(drafter, known)
    return set(node_paths(ask(drafter, known, 8, shape)))
