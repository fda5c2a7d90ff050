"""Trees laid over each other, and what is taken of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafters.tree import DraftTree, chain
from engine.speculation.overlay import Overlay
from worlds.simulated_target import node_paths


def test_a_node_that_two_trees_hold_is_one_and_worth_the_more_of_both() -> None:
    overlay = Overlay()
    overlay.lay(chain([1, 2, 3]), [0.5, 0.25, 0.1875])
    overlay.lay(chain([1, 2, 4]), [0.75, 0.375, 0.375])
    tree = overlay.draft(8, 2, 8)
    assert (tree.token_ids, tree.parents) == ([1, 2, 4, 3], [-1, 0, 1, 1])
    assert tree.survivals == [0.75, 0.375, 0.375, 0.1875]


def test_the_chain_is_the_path_of_most_expected_tokens() -> None:
    overlay = Overlay()
    overlay.lay(chain([1]), [0.6])
    overlay.lay(chain([2, 3, 4]), [0.5, 0.5, 0.5])
    assert list(overlay.draft(3, 1, 3).token_ids) == [2, 3, 4]
    assert list(overlay.draft(1, 1, 1).token_ids) == [1]
    nothing = (overlay.draft(0, 1, 0), Overlay().draft(4, 1, 4), Overlay().draft(4, 2, 4))
    assert not any(map(len, nothing))


@st.composite
def weighed_trees(draw: st.DrawFn) -> tuple[DraftTree, list[float]]:
    token_ids, parents, survivals = [], [], []
    taken = set()
    for node in range(draw(st.integers(0, 8))):
        parent = draw(st.integers(-1, node - 1)) if token_ids else -1
        parent = min(parent, len(token_ids) - 1)
        token_id = draw(st.integers(0, 3))
        if (parent, token_id) in taken:
            continue
        taken.add((parent, token_id))
        above = 1.0 if parent < 0 else survivals[parent]
        token_ids.append(token_id)
        parents.append(parent)
        survivals.append(above * draw(st.floats(0.1, 1.0)))
    return DraftTree(token_ids, parents, [0] * len(token_ids)), survivals


@given(st.lists(weighed_trees(), max_size=4), st.integers(1, 12), st.integers(1, 3))
def test_what_is_taken_is_what_definition_says(
    weighed: list[tuple[DraftTree, list[float]]], num_nodes: int, width: int
) -> None:
    worth: dict[tuple[int, ...], float] = {}
    overlay = Overlay()
    for tree, survivals in weighed:
        overlay.lay(tree, survivals)
        for path, survival in zip(node_paths(tree), survivals, strict=True):
            worth[path] = max(worth.get(path, 0.0), survival)
    tree = overlay.draft(num_nodes, width, 6)
    tree.validate()
    assert len(tree) <= num_nodes
    assert all(list(tree.parents).count(parent) <= width for parent in range(-1, len(tree)))
    taken = node_paths(tree)
    assert set(taken) <= set(worth)
    if width == 1:
        return
    if width == 3:
        fitting = [path for path in worth if len(path) <= 6 and _narrow(path, worth)]
        best = sorted((worth[path] for path in fitting), reverse=True)[:num_nodes]
        # Where no node has more than three children, the sum is the largest there is.
        if len(fitting) == len(worth):
            assert abs(sum(worth[path] for path in taken) - sum(best)) < 1e-9
    single = overlay.draft(4, 1, 4)
    assert single.is_chain()
    most = max(
        (sum(worth[path[: d + 1]] for d in range(len(path))) for path in worth if len(path) <= 4),
        default=0.0,
    )
    got = node_paths(single)
    assert abs(sum(worth[path] for path in got) - most) < 1e-9


def _narrow(path: tuple[int, ...], worth: dict[tuple[int, ...], float]) -> bool:
    """Whether no node on the way has more than three children."""
    return all(sum(other[:-1] == path[:d] for other in worth) <= 3 for d in range(len(path)))
