"""The options of speculation: one table, from which all others derive."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from drafters.base import DraftShape
from engine.params import SpeculativeParams
from slipstream.options import INSIDE, SpeculativeOptions, about, check_ranges


def test_every_option_has_words_and_a_default_within_its_range() -> None:
    default = SpeculativeOptions()
    for each in fields(SpeculativeOptions):
        assert about(each.name)["description"].endswith("."), each.name
        check_ranges(SpeculativeOptions, {each.name: getattr(default, each.name)})


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
        check_ranges(SpeculativeOptions, given)


def test_every_option_inside_has_its_place_in_the_engines_parameters() -> None:
    given = SpeculativeOptions(
        draft_strategy="nasd",
        num_speculative_tokens=3,
        adaptive_depth="target_rate",
        min_speculative_tokens=1,
        max_speculative_tokens=7,
        target_acceptance_rate=0.5,
        verification="block",
        options={"n": 3},
    )
    params = SpeculativeParams.from_options(given)
    assert {public: getattr(params, name) for public, name in INSIDE.items()} == {
        public: getattr(given, public) for public in INSIDE
    }
    assert params.shape == DraftShape(1, 7)
    tree = replace(given, tree_strategy="tree", tree_width=3, tree_depth=4)
    assert SpeculativeParams.from_options(tree).shape == DraftShape(3, 4)
