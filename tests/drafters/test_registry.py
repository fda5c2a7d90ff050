"""The registry, and what every drafter in it promises."""

from __future__ import annotations

import pytest

from drafters.base import Drafter, DraftRequest, DraftShape, Observation, ReferenceDrafter
from drafters.registry import build_drafters, drafter_names
from drafters.tree import EMPTY

TEXT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
FREE = tuple(build_drafters())
"""Drafters that need no model."""
COPIERS = ("ngram", "nasd_one_level", "nasd", "prediction")


def test_builds_every_drafter_under_its_own_name():
    drafters = build_drafters()
    assert set(drafters) <= set(drafter_names())  # those that need a model have none here
    assert {"none", "ngram", "nasd_one_level", "nasd", "prediction"} <= set(drafters)
    for name, drafter in drafters.items():
        assert isinstance(drafter, Drafter)
        assert drafter.info.name == name
        assert drafter.info.description
        assert all(option.description for option in drafter.info.options)


def test_builds_only_what_is_asked_for_and_fresh_each_time():
    first, second = build_drafters(["ngram"]), build_drafters(["ngram"])
    assert list(first) == ["ngram"]
    assert first["ngram"] is not second["ngram"]


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'sufix'.*none, ngram"):
        build_drafters(["sufix"])


@pytest.mark.parametrize("name", FREE)
def test_defaults_are_valid_and_unknown_options_are_refused_by_name(name):
    info = build_drafters([name])[name].info
    assert info.resolve({}) == info.defaults()
    with pytest.raises(ValueError, match="bogus"):
        info.resolve({"bogus": 1})


@pytest.mark.parametrize("name", FREE)
def test_a_request_lives_from_open_to_close(name):
    drafter = build_drafters([name])[name]
    drafter.open("r", TEXT, {}, "tenant")
    if isinstance(drafter, ReferenceDrafter):
        drafter.refer("r", [3, 4, 1, 2])
    (tree,) = drafter.propose([DraftRequest("r", TEXT, 4, DraftShape())])
    tree.validate()
    assert len(tree) <= 4
    if name in COPIERS:
        assert list(tree.token_ids) == [3, 4, 1, 2]
    num_top = drafter.num_top_tokens("r")
    assert num_top >= 0
    tops, probs = ([[3] * min(num_top, 1)], [[1.0] * min(num_top, 1)])
    drafter.observe([Observation("r", [*TEXT, 3], EMPTY, [3], [0], [3], tops, probs)])
    drafter.close("r")
    drafter.close("r")


@pytest.mark.parametrize("name", FREE)
def test_no_room_means_no_draft(name):
    drafter = build_drafters([name])[name]
    drafter.open("r", TEXT, {}, "")
    for max_nodes, depth in ((0, 4), (4, 0)):
        for width in (1, 2):
            request = DraftRequest("r", TEXT, max_nodes, DraftShape(width, depth))
            assert len(drafter.propose([request])[0]) == 0


@pytest.mark.parametrize("name", sorted(set(FREE) - {"none"}))
def test_opening_twice_is_refused(name):
    drafter = build_drafters([name])[name]
    drafter.open("r", TEXT, {}, "")
    with pytest.raises(ValueError, match="already open"):
        drafter.open("r", TEXT, {}, "")


@pytest.mark.parametrize("name", FREE)
def test_the_live_text_is_neither_kept_nor_changed(name):
    drafter = build_drafters([name])[name]
    token_ids = list(TEXT)
    drafter.open("r", token_ids, {}, "")
    request = DraftRequest("r", list(TEXT), 6, DraftShape())
    (before,) = drafter.propose([request])
    assert token_ids == TEXT
    token_ids.clear()
    (after,) = drafter.propose([request])
    assert list(before.token_ids) == list(after.token_ids)
