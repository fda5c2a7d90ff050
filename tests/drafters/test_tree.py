"""The draft tree: depths, subtrees, and what ``validate`` refuses."""

from __future__ import annotations

import pytest

from drafters.tree import EMPTY, ROOT, DraftTree, chain

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
    ],
)
def test_broken_shapes_are_refused(tree, complaint):
    with pytest.raises(ValueError, match=complaint):
        tree.validate()


def test_a_chain_takes_one_feature_for_all_or_one_each():
    assert list(chain([1, 2], 3).features) == [3, 3]
    assert list(chain([1, 2], [3, 4]).features) == [3, 4]
