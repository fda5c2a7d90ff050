"""Rows that read states: fed once the state is known that chose the anchor, and again after a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafters.base import NORMED, DraftRequest, DraftShape, HiddenRows
from drafters.model.heads import Eagle3Drafter
from drafters.model.protocol import Candidates, DraftRows
from drafters.tree import DraftTree
from worlds.model_world import Forwards
from worlds.simulated_target import check_tree

BLOCK_SIZE = 4


class FakeFeatures(Forwards):
    """Is sure that counting goes on, thinks of the number after that too, and notes what it is fed."""

    owns_rows = True
    hidden_layers = (NORMED,)
    block_size = BLOCK_SIZE
    max_len = 64
    max_catch_up_rows = 64

    def __init__(self) -> None:
        self.fed: list[tuple[str, int, list[int]]] = []
        self.taken: list[tuple[str, int, Any]] = []
        self.forgotten: list[str] = []

    def take_hidden(self, rows: Sequence[HiddenRows]) -> None:
        for each in rows:
            (states,) = each.hidden
            self.taken.append((each.request_id, each.first_position, states))

    def known(self, request_id: str) -> range:
        return range(max((r + len(h) for n, r, h in self.taken if n == request_id), default=0))

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        for each in rows:
            first = each.base + each.num_stored
            self.fed.append((each.ask.request_id, first, list(each.token_ids)))
        return [
            [
                Candidates([token + 1, token + 2][: each.num_candidates], [0.9, 0.05])
                for token in each.token_ids[len(each.token_ids) - each.num_scored :]
            ]
            for each in rows
        ]


def ask(request_id: str, text: Sequence[int], width: int = 1, max_nodes: int = 3) -> DraftRequest:
    shape = DraftShape(width, 3)
    return DraftRequest(request_id, text, max_nodes, shape, block_table=table_of(request_id))


def table_of(request_id: str) -> range:
    first_block = 100 * (ord(request_id) - ord("a"))
    return range(first_block, first_block + 16)


def seen(request_id: str, text: Sequence[int], first: int, end: int) -> HiddenRows:
    states = [f"state {i}" for i in range(first, end)]
    return HiddenRows(request_id, first, text, (states,), table_of(request_id))


def propose(drafter: Eagle3Drafter, each: DraftRequest) -> DraftTree:
    (tree,) = drafter.propose([each])
    check_tree(tree, each.max_nodes, each.shape)
    return tree


def test_nothing_is_drafted_until_the_anchors_choice_was_seen() -> None:
    features = FakeFeatures()
    drafter = Eagle3Drafter(features)
    text = [10, 11, 12]
    drafter.open("a", text, {}, "")
    assert len(propose(drafter, ask("a", text))) == 0
    drafter.observe_hidden([seen("a", text, 0, 2)])
    assert len(propose(drafter, ask("a", text))) == 3, "the rest of the text is the anchor"
    text.append(13)
    assert len(propose(drafter, ask("a", text))) == 0, "the state of 12 is not known"
    assert [entry[:2] for entry in features.taken] == [("a", 0)]


def test_rows_of_accepted_drafts_are_fed_again() -> None:
    """The features that they read in the draft were expected, not known."""
    features = FakeFeatures()
    drafter = Eagle3Drafter(features)
    text = [10, 11, 12]
    drafter.open("a", text, {}, "")
    drafter.observe_hidden([seen("a", text, 0, 3)])
    text.append(13)
    tree = propose(drafter, ask("a", text))
    assert list(tree.token_ids) == [14, 15, 16]
    assert features.fed == [("a", 0, [10, 11, 12, 13]), ("a", 4, [14]), ("a", 5, [15])]
    # Two were accepted, the target added another token.
    features.fed.clear()
    text += [14, 15, 40]
    drafter.observe_hidden([seen("a", text, 3, 6)])
    tree = propose(drafter, ask("a", text))
    assert features.fed[0] == ("a", 4, [14, 15, 40])
    assert list(tree.token_ids) == [41, 42, 43]


def test_a_tree_grows_from_what_is_likely() -> None:
    drafter = Eagle3Drafter(FakeFeatures())
    text = [10, 11, 12]
    drafter.open("a", text, {"min_confidence": 0.0}, "")
    drafter.observe_hidden([seen("a", text, 0, 3)])
    text.append(13)
    tree = propose(drafter, ask("a", text, width=2, max_nodes=5))
    assert list(tree.token_ids[:3]) == [14, 15, 16]
    assert list(tree.parents[:3]) == [-1, 0, 1]
    assert sorted(tree.depths()) == [1, 1, 2, 2, 3]


def test_requests_share_a_forward_but_not_their_turns() -> None:
    features = FakeFeatures()
    drafter = Eagle3Drafter(features)
    texts = {"a": [10, 11], "b": [30, 31, 32, 33], "c": [50]}
    for name, text in texts.items():
        drafter.open(name, text, {}, "")
        if name != "c":
            drafter.observe_hidden([seen(name, text, 0, len(text))])
            text.append(text[-1] + 1)
    trees = drafter.propose([ask(name, text) for name, text in texts.items()])
    assert [list(tree.token_ids) for tree in trees] == [[13, 14, 15], [35, 36, 37], []]
    drafter.close("a")
    drafter.close("a")
    assert features.forgotten == ["a"]
