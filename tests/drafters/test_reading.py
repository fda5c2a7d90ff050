"""Prompts read in slices: what is known at the end is the same, and nothing is drafted before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from drafters.base import Drafter, DraftRequest, DraftShape
from drafters.registry import build_drafters
from drafters.tree import EMPTY, DraftTree
from worlds.simulated_target import ask, tell

READERS = ("ngram", "nasd", "nasd_one_level", "suffix", "stand", "recycling", "lookahead")
PROMPT = [random.Random(7).choice(range(40)) for _ in range(700)]


def drafts(drafter: Drafter, token_ids: Sequence[int]) -> list[DraftTree]:
    """A chain and a tree, before and after a step that emitted two tokens."""
    text = list(token_ids)
    found = []
    for _ in range(2):
        for width in (1, 3):
            found += drafter.propose([DraftRequest("r", text, 60, DraftShape(width, 16))])
        text += PROMPT[3:5]
        tell(drafter, text, 2)
    return found


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("num_tokens", [1, 97, 350, 699])
def test_slices_add_up_to_the_whole_prompt(name: str, num_tokens: int) -> None:
    whole, sliced = (build_drafters([name])[name] for _ in range(2))
    for drafter in (whole, sliced):
        drafter.open("r", PROMPT, {}, "")
    num_read = sliced.read_prompt("r", 0)
    while (more := sliced.read_prompt("r", num_tokens)) == num_tokens:
        num_read += more
        assert sliced.propose([DraftRequest("r", PROMPT, 8, DraftShape())]) == [EMPTY]
        assert sliced.num_top_tokens("r") == 0
    assert num_read + more == len(PROMPT)
    assert sliced.read_prompt("r", num_tokens) == 0
    found = drafts(sliced, PROMPT)
    assert found == drafts(whole, PROMPT)
    assert any(tree.token_ids for tree in found)


@pytest.mark.parametrize("name", READERS)
def test_tokens_emitted_meanwhile_are_read_like_the_prompt(name: str) -> None:
    drafter, later = (build_drafters([name])[name] for _ in range(2))
    text = PROMPT[:600]
    drafter.open("r", text, {}, "")
    assert drafter.read_prompt("r", 500) == 500
    text += PROMPT[600:]
    tell(drafter, text, 100)
    assert drafter.read_prompt("r", 500) == 200
    later.open("r", list(PROMPT), {}, "")
    if name != "suffix":  # which tells what stands in the prompt from what was written
        assert drafts(drafter, PROMPT)[:1] == drafts(later, PROMPT)[:1]


def test_auto_drafts_once_its_core_has_read_all() -> None:
    drafter = build_drafters(["auto"])["auto"]
    period = [1, 2, 3, 4, 5] * 40
    drafter.open("r", period, {}, "")
    num_read = drafter.read_prompt("r", 0)
    while (more := drafter.read_prompt("r", 75)) == 75:
        num_read += more
        assert not ask(drafter, period).token_ids
    assert num_read + more == len(period)
    assert ask(drafter, period).token_ids


def test_a_request_may_end_half_read() -> None:
    drafter = build_drafters(["stand"])["stand"]
    for _ in range(2):
        drafter.open("r", PROMPT, {}, "")
        assert drafter.read_prompt("r", 10) == 10
        drafter.close("r")
    assert drafter.read_prompt("r", 10) == 0
