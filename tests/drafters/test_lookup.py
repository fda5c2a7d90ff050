"""Promises that every drafter keeps which looks texts up, whatever it finds in them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.base import DraftRequest, DraftShape
from drafters.registry import build_drafters
from drafters.tree import DraftTree, chain_length
from worlds.lanes import examples
from worlds.simulated_target import ask, decode, propose_once, tell

SHAPED = ("ngram", "nasd_one_level", "nasd", "suffix", "recycling", "stand", "jacobi")
LOOKUP = (*SHAPED, "lookahead")
"""The last one's window is as wide as its options say."""
COUNTING = ("ngram", "nasd_one_level", "nasd")
"""Those whose drafts follow from the text alone, and whose trees begin with their chain."""
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


def fresh(name: str) -> Any:
    return build_drafters([name])[name]


def spine(tree: DraftTree) -> list[int]:
    return list(tree.token_ids[: chain_length(tree.parents)])


@settings(max_examples=examples(60))
@given(TEXTS, st.integers(0, 24), st.integers(1, 4), st.integers(1, 12))
def test_any_text_is_drafted_for_within_what_was_asked(
    text: list[int], max_nodes: int, width: int, depth: int
) -> None:
    """``propose_once`` checks the tree."""
    for name in SHAPED:
        tree = propose_once(fresh(name), text, max_nodes, DraftShape(width, depth))
        if name in COUNTING:
            best = propose_once(fresh(name), text, max_nodes, DraftShape(1, depth))
            assert spine(tree) == list(best.token_ids)[: len(spine(tree))]
            assert (len(tree) == 0) == (len(best) == 0)


@settings(max_examples=examples(60))
@given(TEXTS, st.lists(TEXTS, max_size=4), st.integers(1, 3))
def test_a_text_that_came_in_pieces_is_drafted_for_as_one_that_came_at_once(
    prompt: list[int], runs: list[list[int]], width: int
) -> None:
    shape = DraftShape(width, 8)
    for name in COUNTING:
        drafter, text = fresh(name), list(prompt)
        drafter.open("grown", text, {}, "")
        for run in runs:
            text.extend(run)
            tell(drafter, text, len(run), request_id="grown")
            grown = ask(drafter, text, 12, shape, request_id="grown")
            assert grown == propose_once(fresh(name), text, 12, shape)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
@pytest.mark.parametrize("name", [*COUNTING, "suffix"])
def test_a_periodic_text_is_drafted_as_deep_as_is_asked(name: str, period: int) -> None:
    """A copy that stops at the end of the text would give at most ``period + 1`` tokens a step."""
    prompt = [i % period for i in range(4 * period + 4)]
    run = decode(fresh(name), prompt, lambda text: len(text) % period, 70, max_nodes=6)
    assert set(run.num_emitted) == {7}


@pytest.mark.parametrize("name", LOOKUP)
def test_requests_are_apart_and_a_closed_one_is_forgotten(name: str) -> None:
    drafter, alone = fresh(name), fresh(name)
    taught, new = [1, 2, 3, 1, 2], [1, 2]
    shape = DraftShape(1, 64)
    ask = DraftRequest("new", new, 64, shape)
    alone.open("new", new, {}, "")
    (expected,) = alone.propose([ask])
    drafter.open("taught", taught, {}, "theirs")
    drafter.open("new", new, {}, "")
    (of_taught,) = drafter.propose([DraftRequest("taught", taught, 64, shape)])
    assert drafter.propose([ask]) == [expected] != [of_taught]
    for each in ("taught", "new"):
        drafter.close(each)
        with pytest.raises(KeyError):
            drafter.propose([DraftRequest(each, new, 64, shape)])
        with pytest.raises(KeyError):
            drafter.num_top_tokens(each)
    drafter.open("new", new, {}, "")
    assert drafter.propose([ask]) == [expected]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ngram", {"ngram_min": 5, "ngram_max": 4}, "ngram_min must not exceed ngram_max"),
        ("nasd", {"n": 3, "min_context": 3}, "min_context must not exceed n - 1"),
        ("stand", {"min_ctx": 5}, "min_ctx must not exceed max_ctx"),
        ("recycling", {"k": 9}, "k must be at most 8"),
        ("suffix", {"use_history": 3}, "use_history must be bool"),
        ("lookahead", {"ngram": 9}, "ngram must be at most 8"),
        ("jacobi", {"first_guess": "random"}, "first_guess must be one of: text, last"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(
    name: str, options: dict[str, int | str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fresh(name).info.resolve(options)
