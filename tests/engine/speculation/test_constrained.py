"""Proposals under a grammar."""

from __future__ import annotations

import pytest
import torch
from llguidance import LLMatcher

from drafters.tree import EMPTY, FORCED, DraftTree, chain
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.constraint import GrammarConstraint
from engine.speculation.constrained import constrained, num_forced
from worlds.grammar_world import letter_tokenizer

LETTERS = " abcdefg"
COMPILER = GrammarCompiler(letter_tokenizer(LETTERS[1:]), len(LETTERS), (0,))


def ids(text: str) -> list[int]:
    return [LETTERS.index(each) for each in text]


def grammar(pattern: str) -> GrammarConstraint:
    return COMPILER.constraint(LLMatcher.grammar_from_regex(pattern))


def shown(tree: DraftTree) -> list[tuple[str, bool]]:
    """Every node's path as text, and whether it is forced."""
    paths: list[str] = []
    for token_id, parent in zip(tree.token_ids, tree.parents, strict=True):
        paths.append((paths[parent] if parent >= 0 else "") + LETTERS[token_id])
    return [(path, feature == FORCED) for path, feature in zip(paths, tree.features, strict=True)]


def shape(tree: DraftTree, pattern: str, nodes: int = 16, depth: int = 16) -> DraftTree:
    return constrained(tree, grammar(pattern), nodes, depth, "match")


def test_what_is_forced_comes_first_and_what_is_forbidden_goes() -> None:
    found = shape(chain(ids("abcde"), 7), "ab[cd]f+")
    assert shown(found) == [("a", True), ("ab", True), ("abc", False), ("abcf", True)]
    assert list(found.features) == [FORCED, FORCED, 7, FORCED]
    assert num_forced(found, range(len(found))) == 3
    assert num_forced(found, [1, 2]) == 1
    # A drafter that goes elsewhere, or proposes nothing, leaves what is forced.
    assert shown(shape(chain(ids("bcd")), "ab[cd]")) == [("a", True), ("ab", True)]
    assert shown(shape(EMPTY, "abc[de]")) == [("a", True), ("ab", True), ("abc", True)]
    assert shape(EMPTY, "[ab]c") == EMPTY


def test_branches_are_kept_each_with_its_own_continuation() -> None:
    tree = DraftTree(ids("abce"), [-1, -1, -1, 0], [1, 2, 3, 4])
    found = shape(tree, "(ae|bf|d)g[ab]")
    assert shown(found) == [
        *(("a", False), ("ae", False), ("aeg", True)),
        *(("b", False), ("bf", True), ("bfg", True)),
    ]
    found.validate()


def test_what_a_drafter_says_of_its_nodes_stays() -> None:
    """A forced token is as likely as what it follows."""
    tree = DraftTree(ids("abce"), [-1, -1, -1, 0], [0] * 4, survivals=[0.5, 0.25, 0.125, 0.375])
    found = shape(tree, "(ae|bf|d)g[ab]")
    assert [path for path, _ in shown(found)] == ["a", "ae", "aeg", "b", "bf", "bfg"]
    assert found.survivals == [0.5, 0.375, 0.375, 0.25, 0.25, 0.25]
    assert shape(chain(ids("a")), "(ae|bf|d)g[ab]").survivals == ()
    likeliest = DraftTree(ids("ba"), [-1, -1], [0] * 2, survivals=[0.25, 0.5])
    assert shown(shape(likeliest, "[ab]c", nodes=2)) == [("a", False), ("ac", True)]


@pytest.mark.parametrize(("nodes", "depth"), [(1, 16), (3, 16), (16, 1), (16, 3)])
def test_bounds_hold(nodes: int, depth: int) -> None:
    found = shape(chain(ids("abcd")), "abc[d]efg", nodes, depth)
    assert len(found) <= nodes
    assert max(found.depths(), default=0) <= depth
    assert len(found) == min(nodes, depth, 7)


def test_distributions_are_those_of_the_allowed_tokens() -> None:
    probs = {1: 0.2, 2: 0.3, 3: 0.5}
    tree = DraftTree(ids("ab"), range(-1, 1), [0, 0], {-1: probs, 0: torch.full((8,), 0.125)})
    found = constrained(tree, grammar("[ab][bcd]"), 8, 8, "rejection")
    assert shown(found) == [("a", False), ("ab", False)]
    assert found.draft_probs[-1] == {1: pytest.approx(0.4), 2: pytest.approx(0.6)}
    expected = torch.tensor([0, 0, 1, 1, 1, 0, 0, 0]) / 3
    torch.testing.assert_close(found.draft_probs[0], expected)


def test_no_distribution_stays_where_nothing_was_left_to_chance() -> None:
    tree = DraftTree(ids("ab"), range(-1, 1), [0, 0], {-1: {1: 1.0}, 0: {2: 0.5, 3: 0.5}})
    found = constrained(tree, grammar("a[c-e]"), 8, 8, "block")
    assert shown(found) == [("a", True)]
    assert found.draft_probs == {}


def test_a_sampled_tree_keeps_its_shape_or_gives_way_to_what_is_forced() -> None:
    """Policies grant by the shape, which must not tell of tokens."""
    tree = DraftTree(ids("agb"), [-1, -1, 0], [0, 0, 0], {-1: {1: 0.5, 7: 0.5}})
    assert constrained(tree, grammar("[ab]b"), 8, 8, "rejection") is tree
    assert shown(constrained(tree, grammar("ga"), 8, 8, "rejection")) == [("g", True), ("ga", True)]
