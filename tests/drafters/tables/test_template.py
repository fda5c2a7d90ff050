"""Templates hold together, and are filled in lazily, likeliest nodes first."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftShape
from drafters.tables.recycling import LEVEL_SIZES, RANK_SHARES, level_template
from drafters.tables.stand import SHIPPED_TEMPLATE
from drafters.tables.template import (
    NO_CHILDREN,
    Children,
    DraftTemplate,
    best_first_paths,
    grow,
    load_template,
)
from drafters.tree import ROOT, DraftTree
from worlds.simulated_target import assert_spine_first

SMALL = DraftTemplate([(0,), (0, 0), (1,), (0, 1), (0, 0, 0), (1, 0), (2,)])


def token_at(path: tuple[int, ...]) -> int:
    """A token that tells its path."""
    return int("1" + "".join(map(str, path)))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(int(digit) for digit in str(token)[1:]) for token in tree.token_ids]


def expand(path: tuple[int, ...]) -> Children:
    children = [token_at((*path, rank)) for rank in range(10)]
    return Children(children, list(range(10)))


def advance(path: tuple[int, ...], token_id: int) -> tuple[int, ...]:
    longer = tuple(int(digit) for digit in str(token_id)[1:])
    assert longer[:-1] == path
    return longer


def parent_paths(tree: DraftTree) -> list[tuple[int, ...]]:
    paths = paths_of(tree)
    return [() if parent == ROOT else paths[parent] for parent in tree.parents]


@given(st.integers(1, 90), st.integers(1, 12), st.integers(1, 12))
def test_a_smaller_budget_takes_the_likeliest_of_those_that_fit(
    num: int, width: int, depth: int
) -> None:
    template = level_template(LEVEL_SIZES, RANK_SHARES)
    nodes = template.within(DraftShape(width, depth))
    tree = grow(nodes, num, (), expand, advance)
    tree.validate()
    fitting = [path for path in template.paths if len(path) <= depth and max(path) < width]
    assert sorted(paths_of(tree)) == sorted(fitting[:num])
    assert parent_paths(tree) == [path[:-1] for path in paths_of(tree)]
    assert_spine_first(tree)
    assert max(tree.features) < width


def test_a_missing_child_takes_its_branch_along_and_others_move_up() -> None:
    def without_01(path: tuple[int, ...]) -> Children:
        if path == (0,):
            return Children([token_at((0, 0))], [0])
        return NO_CHILDREN if path == (1,) else expand(path)

    tree = grow(SMALL.within(DraftShape(3, 9)), 5, (), without_01, advance)
    assert paths_of(tree) == [(0,), (0, 0), (0, 0, 0), (1,), (2,)]


def test_only_parents_of_chosen_nodes_are_expanded() -> None:
    asked = []

    def counted(path: tuple[int, ...]) -> Children:
        asked.append(path)
        return expand(path)

    grow(SMALL.within(DraftShape(3, 9)), 3, (), counted, advance)
    assert asked == [(), (0,)]


def test_draft_probs_stay_with_the_parent_they_belong_to() -> None:
    def drawn(path: tuple[int, ...]) -> Children:
        children = expand(path)
        return Children(children.token_ids, children.features, {token_at(path): 1.0})

    tree = grow(SMALL.within(DraftShape(3, 9)), 7, (), drawn, advance)
    paths = {ROOT: ()} | dict(enumerate(paths_of(tree)))
    assert {paths[parent]: probs for parent, probs in tree.draft_probs.items()} == {
        path: {token_at(path): 1.0} for path in ((), (0,), (0, 0), (1,))
    }


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "1 to 256"),
        ([(0, 0), (0,)], "before its parent"),
        ([(1,), (0,)], "left sibling"),
        ([(0,), (0,)], "repeated"),
        ([(0,), (-1,)], "rank beyond"),
        ([(index,) for index in range(17)], "rank beyond"),
    ],
)
def test_paths_that_are_no_template_are_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftTemplate(paths)


def test_a_saved_template_is_loaded_again(tmp_path: Path) -> None:
    SMALL.save(tmp_path / "t.json", 'from "texts"')
    assert load_template(tmp_path / "t.json").paths == SMALL.paths


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"paths": [0]}', '{"paths": [[]]}', '{"paths": [["0"]]}', '{"paths": [[1]]}',
     '{"paths": [[true]]}'],
)  # fmt: skip
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad\.json"):
        load_template(file)
    with pytest.raises(ValueError, match="cannot read"):
        load_template(tmp_path / "none.json")


def test_the_shipped_template_has_at_most_80_nodes_and_is_deep() -> None:
    template = load_template(SHIPPED_TEMPLATE)
    assert len(template) == len(json.loads(SHIPPED_TEMPLATE.read_text())["paths"]) == 80
    assert max(map(len, template.paths)) > 6


def test_recyclings_template_has_the_published_levels() -> None:
    paths = level_template(LEVEL_SIZES, RANK_SHARES).paths
    assert [sum(len(path) == depth for path in paths) for depth in range(1, 7)] == [*LEVEL_SIZES]


@given(st.integers(1, 60), st.integers(1, 5))
def test_best_first_paths_are_those_of_the_largest_products(num: int, depth: int) -> None:
    """Against all paths, enumerated."""
    shares = (0.6, 0.25, 0.1)

    def product(path: tuple[int, ...]) -> float:
        result = 1.0
        for rank in path:
            result *= shares[rank]
        return result

    everything: list[tuple[int, ...]] = [(rank,) for rank in range(3)]
    for path in everything:
        if len(path) < depth:
            everything += [(*path, rank) for rank in range(3)]
    got = list(islice(best_first_paths(depth, shares), num))
    assert len(set(got)) == len(got) == min(num, len(everything))
    best = sorted(map(product, everything), reverse=True)[: len(got)]
    assert list(map(product, got)) == pytest.approx(best)
