"""The options of speculation: one table, from which all others derive."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from drafters.base import DraftShape
from drafters.options import SpeculativeParams, TreeStrategy, about, check_ranges


def test_every_option_has_words_and_a_default_within_its_range() -> None:
    default = SpeculativeParams()
    for each in fields(SpeculativeParams):
        assert about(each.name)["description"].endswith("."), each.name
        check_ranges(SpeculativeParams, {each.name: getattr(default, each.name)})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must not be negative"),
        ({"tree_width": 0}, "tree_width must be at least 1"),
        ({"target_acceptance_rate": 0}, "target_acceptance_rate must be above 0"),
        ({"target_acceptance_rate": 1.0}, "target_acceptance_rate must be below 1"),
        ({"verification": "typical"}, "must be one of: match, rejection, block"),
    ],
)
def test_what_is_out_of_range_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ranges(SpeculativeParams, given)


@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("none", DraftShape(1, 7)), ("linear", DraftShape(1, 7)), ("tree", DraftShape(3, 4))],
)
def test_a_drafts_shape_is_a_chain_of_the_most_drafts_or_the_tree(
    strategy: TreeStrategy, shape: DraftShape
) -> None:
    params = SpeculativeParams(
        tree_strategy=strategy, tree_width=3, tree_depth=4, max_speculative_tokens=7
    )
    assert params.shape == shape
