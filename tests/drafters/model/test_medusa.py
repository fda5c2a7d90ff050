"""Medusa: which state the heads read, and the likeliest tree of their product."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape, HiddenRows
from drafters.model.growth import feature_of
from drafters.model.medusa import MedusaDrafter, product_tree
from drafters.model.protocol import Candidates
from drafters.tree import ROOT
from worlds.simulated_target import check_tree, node_paths


def level(*confidences: float) -> Candidates:
    return Candidates([10 + rank for rank in range(len(confidences))], confidences)


def choices(each: Candidates, width: int) -> list[tuple[int, float]]:
    return list(zip(each.token_ids, each.confidences, strict=True))[:width]


WEIGHTS = st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4)


@given(st.lists(WEIGHTS, min_size=1, max_size=4), st.integers(1, 40), st.integers(1, 4))
def test_the_tree_holds_the_heaviest_paths(
    weights: list[list[float]], max_nodes: int, width: int
) -> None:
    levels = [level(*sorted(each, reverse=True)) for each in weights]
    shape = DraftShape(width, 3)
    tree = product_tree(levels, max_nodes, shape)
    check_tree(tree, max_nodes, shape)
    depth = min(3, len(levels))
    every = {
        tuple(token for token, _ in path): math.prod(weight for _, weight in path)
        for at in range(1, depth + 1)
        for path in product(*(choices(each, width) for each in levels[:at]))
    }
    best = sorted(every.values(), reverse=True)[:max_nodes]
    assert sorted((every[path] for path in node_paths(tree)), reverse=True) == pytest.approx(best)


def test_a_chain_is_every_heads_first_choice() -> None:
    tree = product_tree([level(0.5, 0.4), level(0.9), level(0.3, 0.3)], 8, DraftShape(1, 16))
    assert tree.is_chain()
    assert list(tree.token_ids) == [10, 10, 10]
    assert list(tree.features) == [feature_of(sure, 0) for sure in (0.5, 0.9, 0.3)]


def test_drawn_candidates_keep_their_order_and_distribution() -> None:
    """Siblings were drawn one after another; which tokens came must not change the tree's shape."""
    first = Candidates([5, 3, 8], [0.4] * 3, "what 5, 3 and 8 were drawn from")
    second = Candidates([1, 0], [0.9] * 2, "what 1 and 0 were drawn from")
    tree = product_tree([first, second], 5, DraftShape(2, 4))
    others = [replace(first, token_ids=[2, 9, 4]), replace(second, token_ids=[7, 6])]
    other = product_tree(others, 5, DraftShape(2, 4))
    assert list(tree.parents) == list(other.parents)
    assert list(tree.features) == list(other.features)
    for parent, distribution in tree.draft_probs.items():
        children = [i for i, above in enumerate(tree.parents) if above == parent]
        drawn = first if parent == ROOT else second
        assert distribution == drawn.distribution
        assert [tree.token_ids[i] for i in children] == list(drawn.token_ids[: len(children)])
    assert set(tree.draft_probs) == set(tree.parents)


def test_a_published_shape_comes_out_where_the_weights_ask_for_it() -> None:
    """The choices 0, 1, 00, 01, 10, 000: as rows with their depths, ancestors and paths."""
    levels = [level(0.6, 0.3, 0.1), level(0.7, 0.3), level(0.5, 0.2)]
    tree = product_tree(levels, 6, DraftShape(10, 4))
    nodes = [tuple(token - 10 for token in path) for path in node_paths(tree)]
    assert set(nodes) == {(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)}
    assert sorted(tree.depths()) == [1, 1, 2, 2, 2, 3]
    assert nodes[:3] == [(0,), (0, 0), (0, 0, 0)], "the likeliest chain lies in place"
    leaves = [node for node in nodes if not any(other[:-1] == node for other in nodes)]
    assert sorted(leaves) == [(0, 0, 0), (0, 1), (1, 0)]


class FakeHeads:
    """Head ``i`` after the state ``s`` is surest of ``s + 2 + i``, then of the one after that."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[str]]] = []

    def read_now(self, begin: Callable[[Any], Callable[[], Any]]) -> Any:
        return begin(None)()

    def begin(
        self, hidden: Sequence[Any], asks: Sequence[DraftRequest], num: int, readback: Any
    ) -> Callable[[], list[list[Candidates]]]:
        del readback
        self.calls.append((list(hidden), [ask.request_id for ask in asks]))
        found = [
            [Candidates([state + 2 + h, state + 3 + h][:num], [0.6, 0.3]) for h in range(3)]
            for state in hidden
        ]
        return lambda: found


def counting(request_id: str, length: int, max_nodes: int = 8) -> DraftRequest:
    return DraftRequest(request_id, list(range(length)), max_nodes, DraftShape(1, 16))


def seen(request_id: str, first: int, end: int) -> HiddenRows:
    """The hidden state of position ``i`` is ``i``."""
    return HiddenRows(request_id, first, list(range(end + 1)), (list(range(first, end)),), [])


def test_heads_read_the_row_that_chose_the_anchor() -> None:
    heads = FakeHeads()
    drafter = MedusaDrafter(heads)
    drafter.open("r", list(range(5)), {}, "")
    assert len(drafter.propose([counting("r", 5)])[0]) == 0, "nothing has been seen yet"
    assert heads.calls == []
    drafter.observe_hidden([seen("r", 0, 3)])
    drafter.observe_hidden([seen("r", 3, 5)])
    # The text is 0..5 now: 5 is the anchor, the row of 4 chose it, and 6 comes next.
    (tree,) = drafter.propose([counting("r", 6)])
    assert heads.calls == [([4], ["r"])]
    assert list(tree.token_ids) == [6, 7, 8]


def test_a_text_of_one_token_has_no_row_before_its_anchor() -> None:
    heads = FakeHeads()
    drafter = MedusaDrafter(heads)
    drafter.open("r", [0], {}, "")
    assert len(drafter.propose([counting("r", 1)])[0]) == 0
    assert heads.calls == []


def test_a_state_of_another_position_drafts_nothing() -> None:
    drafter = MedusaDrafter(FakeHeads())
    drafter.open("r", list(range(5)), {}, "")
    drafter.observe_hidden([seen("r", 0, 3)])  # preempted and read again from the start
    assert len(drafter.propose([counting("r", 6)])[0]) == 0
    drafter.observe_hidden([seen("r", 2, 5)])
    assert len(drafter.propose([counting("r", 6)])[0]) == 3


def test_requests_share_one_call_and_keep_their_own_terms() -> None:
    heads = FakeHeads()
    drafter = MedusaDrafter(heads)
    for name, length in (("a", 4), ("b", 9), ("new", 3)):
        drafter.open(name, list(range(length)), {}, "")
        if name != "new":
            drafter.observe_hidden([seen(name, 0, length)])

    trees = drafter.propose(
        [counting("a", 5, max_nodes=2), counting("new", 3), counting("b", 10), counting("a", 5, 0)]
    )
    assert heads.calls == [([3, 8], ["a", "b"])]
    assert [list(tree.token_ids) for tree in trees] == [[5, 6], [], [10, 11, 12], []]
