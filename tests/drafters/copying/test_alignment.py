"""Where copies went wrong before, the correction is drafted in their place, or beside them."""

from __future__ import annotations

import pytest

from drafters.base import DraftShape
from drafters.copying.suffix import SuffixDrafter
from worlds.simulated_target import decode, draft_after, node_paths

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
    text = code(NEW)[:40]  # up to the second name, one change behind it
    drafts = paths_after([*code(OLD), 5], text, TREE, max_nodes=24)
    assert {(6, OLD), (6, NEW)} <= {(text[-1], *path)[-2:] for path in drafts}


def parts(*starts: int) -> list[list[int]]:
    """Returns parts between names: tokens that occur once."""
    return [list(range(start, start + 30)) for start in starts]


def joined(between: list[list[int]], name: list[int]) -> list[int]:
    """The parts, each with the name behind it."""
    return [token_id for part in between for token_id in (*part, *name)]


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
    *between, last = parts(100, 200, 300, 400)
    prompt = [*joined(between, [9, *original]), *last, 5]
    text = joined(between[:2], [9, *actual]) + between[2]
    paths = paths_after(prompt, text, shape)
    assert (9, *actual, 400, 401) in {path[: len(actual) + 3] for path in paths}


@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_name_is_known_after_other_tokens_too(shape: DraftShape) -> None:
    name, new, between = [OLD, 9], [NEW, 10, 11], parts(*range(100, 700, 100))
    text = joined(between[:4], new) + between[4]
    paths = paths_after([*joined(between, name), 5], text, shape)
    assert (*new, 600) in {path[:4] for path in paths}


@pytest.mark.parametrize("num_written", [1, 2, 3])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_a_change_that_was_begun_is_gone_through_with(shape: DraftShape, num_written: int) -> None:
    name, new, between = [OLD, 9], [NEW, 10, 11], parts(100, 200, 300)
    text = [*between[0], *new, *between[1], *new[:num_written]]
    rest = (*new[num_written:], 300, 301)
    paths = paths_after([*joined(between, name), 5], text, shape)
    assert rest in {path[: len(rest)] for path in paths}


def paths_after(
    prompt: list[int], text: list[int], shape: DraftShape, max_nodes: int = 8
) -> set[tuple[int, ...]]:
    return set(node_paths(draft_after(SuffixDrafter(), prompt, text, max_nodes, shape)))
