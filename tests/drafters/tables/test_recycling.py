"""Recycling drafts the target's own candidates, from the newest row about each token."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftShape, Observation
from drafters.tables.recycling import LEVEL_SIZES, RANK_SHARES, RecyclingDrafter, level_template
from drafters.tree import EMPTY, ROOT, DraftTree
from worlds.simulated_target import ask, node_paths


def observed(
    drafter: RecyclingDrafter,
    text: list[int],
    tree: DraftTree,
    path: list[int],
    tops: list[list[int]],
) -> None:
    """One step; the emitted tokens are the firsts of the path's rows."""
    emitted = [tops[row][0] for row in path]
    text += emitted
    row_tokens = [top[0] for top in tops]
    drafter.observe([Observation("r", text, tree, row_tokens, path, emitted, tops)])


def opened(prompt: list[int], **options: int) -> RecyclingDrafter:
    drafter = RecyclingDrafter()
    drafter.open("r", prompt, options, "")
    return drafter


def test_every_verified_row_is_recycled_accepted_or_not() -> None:
    drafter, text = opened([1]), [1]
    tree = DraftTree([2, 5], [ROOT, ROOT], [0, 0])  # 2 is accepted, 5 is not
    observed(drafter, text, tree, [0, 1], [[2, 5], [3, 4], [6, 7]])
    assert text == [1, 2, 3]
    assert list(ask(drafter, [9, 1]).token_ids) == [2, 3]
    assert list(ask(drafter, [5]).token_ids) == [6]
    tree = ask(drafter, [1], 8, DraftShape(2, 2))
    assert list(tree.token_ids[:2]) == [2, 3]
    found = {(tree.parents[i], tree.token_ids[i]) for i in range(len(tree))}
    five = list(tree.token_ids).index(5)
    assert found == {(-1, 2), (-1, 5), (0, 3), (0, 4), (five, 6), (five, 7)}


def test_the_texts_own_row_stands_against_one_from_another_branch() -> None:
    drafter, text = opened([1]), [1]
    tree = DraftTree([2, 3, 2], [ROOT, ROOT, 1], [0, 0, 0])  # 1 2 is text; 1 3 2 is not
    observed(drafter, text, tree, [0, 1], [[2], [4], [5], [6]])
    assert list(ask(drafter, [2], 1).token_ids) == [4]


def test_the_prompts_pairs_stand_in_newest_first_until_the_target_speaks() -> None:
    drafter = opened([1, 2, 1, 3, 1, 2, 8, 1])
    assert list(ask(drafter, [1], 2, DraftShape(2, 1)).token_ids) == [2, 3]
    text = [1, 2, 1, 3, 1, 2, 8, 1]
    observed(drafter, text, EMPTY, [0], [[7, 6]])
    assert list(ask(drafter, [1], 4, DraftShape(4, 1)).token_ids) == [7, 6]


def test_k_bounds_the_successors() -> None:
    drafter = opened([1, 2, 1, 3, 1, 4, 1], k=2)
    assert drafter.num_top_tokens("r") == 2
    assert len(ask(drafter, [1], 8, DraftShape(8, 1))) == 2
    observed(drafter, [1], EMPTY, [0], [[7, 6, 5]])
    assert list(ask(drafter, [1], 8, DraftShape(8, 1)).token_ids) == [7, 6]


def test_features_are_rank_and_depth() -> None:
    drafter = opened([1])
    for token in range(1, 30):
        observed(drafter, [token], EMPTY, [0], [[token + rank for rank in range(1, 9)]])
    tree = ask(drafter, [1], 60, DraftShape(8, 8))
    by_feature: dict[int, set[tuple[int, int]]] = {}
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        above, last = ((), 1) if parent == ROOT else (paths[parent], tree.token_ids[parent])
        paths.append((*above, token - last - 1))
    for feature, path in zip(tree.features, paths, strict=True):
        by_feature.setdefault(feature, set()).add((path[-1], len(path)))
    assert all(len(kinds) == 1 for kinds in by_feature.values())
    assert len(by_feature) > 10


@given(st.integers(0, 1000), st.integers(1, 80), st.integers(1, 8), st.integers(1, 6))
def test_trees_equal_a_matrix_read_naively(seed: int, num: int, width: int, depth: int) -> None:
    rng, drafter = random.Random(seed), opened([0])
    matrix = {}
    for _ in range(40):
        token, row = rng.randrange(20), rng.sample(range(20), rng.randrange(1, 9))
        matrix[token] = row
        observed(drafter, [token], EMPTY, [0], [row])
    expected: dict[tuple[int, ...], tuple[int, ...]] = {(): (3,)}
    for path in level_template(LEVEL_SIZES, RANK_SHARES).paths:
        above = expected.get(path[:-1])
        row = matrix.get(above[-1], []) if above else []
        if max(path) < width and len(path) <= depth and path[-1] < len(row):
            if len(expected) > num:
                break
            assert above is not None
            expected[path] = (*above, row[path[-1]])
    tree = ask(drafter, [3], num, DraftShape(width, depth))
    found = [(3, *path) for path in node_paths(tree)]
    del expected[()]
    assert sorted(found) == sorted(expected.values())
