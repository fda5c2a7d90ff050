"""A type's tiny model is asked what it is, and the page says what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.census import TYPES, Finding, census, look_at, page

# Layers that share keys and values, chunks and experts multiplied at once, gates by softplus, keywords
# that are dropped.
SERVED = "gemma4_text llama4_text laguna stablelm"
TURNS = 24
ALL = [
    pytest.param(kinds, id=f"from {kinds[0]}") for kinds in (TYPES[n::TURNS] for n in range(TURNS))
]


@pytest.mark.parametrize("kind", SERVED.split())
def test_types_that_once_were_not_are_served_exactly(kind: str) -> None:
    assert look_at(kind) == Finding(kind, True, exact=True, greedy=True, sampled=True)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ALL)
def test_drafts_change_no_text_of_any_type_that_is_served(kinds: tuple[str, ...]) -> None:
    findings = list(census(kinds))
    assert [each.kind for each in findings] == list(kinds)
    assert not [each for each in findings if False in (each.greedy, each.sampled)]
    assert not [each for each in findings if each.is_served and "breaks" in each.reason]


def test_the_page_counts_and_says_why() -> None:
    served = Finding("a", True, exact=True, greedy=True, sampled=True)
    others = [replace(served, kind="b", exact=False, reason="x|y"), Finding("c", reason="no <b>")]
    text = page([served, *others])
    assert "Served: 2. Of these `exact`, by the checks at start: 1." in text
    assert "| `a` | yes | yes | yes |  |\n| `b` | no | yes | yes | x\\|y |" in text
    assert "## Not served\n\n| types | reason |\n| --- | --- |\n| `c` | no &lt;b> |\n" in text


def test_types_alike_share_a_row() -> None:
    served = Finding("a", True, exact=True, greedy=True, sampled=True)
    why = "LM: in chunks, its logits differ by {} of their spread"
    others = [
        Finding("c", reason=f"C{why.format(0.2)}"),
        Finding("d", reason=f"D{why.format(0.3)}"),
    ]
    text = page([served, replace(served, kind="b"), *others])
    assert "| `a`, `b` | yes | yes | yes |  |\n" in text
    row = "in chunks, its logits differ by the given share of their spread"
    assert f"| `c` (0.2), `d` (0.3) | {row} |\n" in text
