"""The draft tree: depths, subtrees, and what ``validate`` refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.tree import EMPTY, ROOT, Branch, DraftTree, TreeBuilder, best_first, chain
from worlds.simulated_target import assert_spine_first, node_paths

TREE = DraftTree([5, 6, 7, 5, 8], [ROOT, 0, ROOT, 2, 0], [0, 1, 2, 3, 4])


def test_depth_counts_from_the_root():
    assert TREE.depths() == [1, 2, 1, 2, 2]
    assert chain([4, 4, 4]).depths() == [1, 2, 3]
    assert EMPTY.depths() == []


def test_a_chain_is_told_from_a_tree():
    assert chain([1, 2]).is_chain()
    assert EMPTY.is_chain()
    assert not TREE.is_chain()


def test_a_subtree_is_renumbered():
    kept = TREE.subtree([0, 2, 3])
    kept.validate()
    assert kept == DraftTree([5, 7, 5], [ROOT, ROOT, 1], [0, 2, 3])
    survivals = [0.5, 0.2, 0.4, 0.3, 0.1]
    said = DraftTree(TREE.token_ids, TREE.parents, TREE.features, survivals=survivals)
    assert said.subtree([0, 2, 3]).survivals == [0.5, 0.4, 0.3]
    line = DraftTree([1, 2], [ROOT, 0], [0, 0], survivals=[0.5, 0.25])
    assert line.subtree([0]).survivals == [0.5]
    assert TREE.subtree(range(5)) is TREE
    assert len(TREE.subtree([])) == 0


def test_a_valid_tree_may_repeat_a_token_under_different_parents():
    TREE.validate()


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        (DraftTree([1, 2], [ROOT], [0, 0]), "length"),
        (DraftTree([1], [0], [0]), "does not come before"),
        (DraftTree([1], [-2], [0]), "does not come before"),
        (DraftTree([1, 1], [ROOT, ROOT], [0, 0]), "repeats"),
        (DraftTree([1, 2], [ROOT, 0], [0, 0], survivals=[0.5]), "survivals differ in length"),
        (DraftTree([1, 2], [ROOT, 0], [0, 0], survivals=[0.5, 0.6]), "0.6 below one of 0.5"),
        (DraftTree([1], [ROOT], [0], survivals=[1.1]), "1.1 below one of 1"),
        (DraftTree([1], [ROOT], [0], survivals=[float("nan")]), "nan below one of 1"),
        (DraftTree([1], [ROOT], [0], survivals=[1]), "a survival of 1"),
        (DraftTree([1], [0], [0], survivals=[0.5]), "does not come before"),
    ],
)
def test_broken_shapes_are_refused(tree, complaint):
    with pytest.raises(ValueError, match=complaint):
        tree.validate()


def test_a_chain_takes_one_feature_for_all_or_one_each():
    assert list(chain([1, 2], 3).features) == [3, 3]
    assert list(chain([1, 2], [3, 4]).features) == [3, 4]


def test_paths_follow_the_tree_and_tell_what_trees_share() -> None:
    tree = DraftTree([5, 6, 5, 7, 8], [-1, 0, 1, -1, 3], [0] * 5)
    assert tree.paths() == [(), (5,), (5, 6), (5, 6, 5), (7,), (7, 8)]
    assert EMPTY.paths() == [()]
    assert {*chain([5, 6], 0).paths()} <= {*tree.paths()}


def test_following_a_text_takes_the_child_that_carries_it() -> None:
    tree = DraftTree([1, 2, 1, 3, 4], [ROOT, ROOT, 1, 2, 2], [0] * 5)
    assert tree.follow([2, 1, 4, 9]) == [1, 2, 4]
    assert tree.follow([2, 1]) == [1, 2]
    assert tree.follow([1, 3]) == [0]
    assert tree.follow([3]) == tree.follow([]) == EMPTY.follow([1]) == []


@st.composite
def builders(draw: st.DrawFn) -> TreeBuilder:
    builder = TreeBuilder()
    for index in range(draw(st.integers(0, 20))):
        parent = draw(st.integers(ROOT, len(builder) - 1))
        above = 1.0 if parent == ROOT else builder.weights[parent]
        weight = above * draw(st.sampled_from([0.25, 0.5, 1.0]))
        builder.add(parent, draw(st.integers(0, 4)), index, weight)
    return builder


@given(builders(), st.integers(0, 12), st.integers(1, 3), st.integers(1, 4))
def test_the_best_nodes_are_those_of_most_weight_that_fit(
    builder: TreeBuilder, nodes: int, width: int, depth: int
) -> None:
    every = builder.take(range(len(builder)))
    weights = dict(zip(node_paths(every), builder.weights, strict=True))
    tree = builder.best(nodes)
    tree.validate()
    taken = node_paths(tree)
    assert len(taken) == min(nodes, len(builder))
    left_out = max((weight for path, weight in weights.items() if path not in taken), default=0.0)
    assert all(weights[path] >= left_out for path in taken)
    narrow = builder.best(nodes, width, depth)
    narrow.validate()
    assert max(narrow.depths(), default=0) <= depth
    assert all(list(narrow.parents).count(parent) <= width for parent in narrow.parents)
    assert_spine_first(narrow)


def test_paths_that_begin_alike_share_nodes_and_keep_the_larger_weight() -> None:
    builder = TreeBuilder()
    first = builder.add(ROOT, 7, feature=3, weight=0.5)
    below = builder.add(first, 8, weight=0.25)
    assert builder.add(ROOT, 7, feature=4, weight=0.75) == first
    builder.draft_probs[first] = {8: 1.0}
    other = builder.add(ROOT, 9, weight=0.6)
    assert (builder.weights, builder.features[first]) == ([0.75, 0.25, 0.6], 3)
    tree = builder.best(2)
    assert (tree.token_ids, tree.parents) == ([7, 9], [ROOT, ROOT])
    assert tree.draft_probs == {0: {8: 1.0}}
    assert (below, other) == (1, 2)


def test_best_first_expands_what_it_takes_and_nothing_else() -> None:
    expanded: list[tuple[int, ...]] = []

    def expand(node: int, branch: Branch) -> list[Branch]:
        path = (*branch.state, branch.token_id)
        expanded.append(path)
        return [Branch(branch.weight * share, node, t, 0, path) for t, share in SHARES]

    tree = best_first([Branch(share, ROOT, t, 0, ()) for t, share in SHARES], expand, 5)
    assert node_paths(tree) == [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1), (2,)]
    assert expanded == [(1,), (1, 1), (1, 1, 1), (2,)]  # not the last one taken
    assert (
        len(best_first([], expand, 5)) == len(best_first([Branch(1, -1, 1, 0, ())], expand, 0)) == 0
    )


SHARES = ((1, 0.7), (2, 0.3))
