"""Profiles go to a file and back; what is wrong in one is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from engine.config import EngineConfig
from slipstream.tools.simulate.profile import (
    Costs,
    Kind,
    Profile,
    ProfileError,
    read_profile,
    write_profile,
)

PROFILE = Profile(
    Costs(((1, 0, 0.01, 1), (8, 512, 0.02, 4)), 0.001, 0.0002, 0.003, 0.0004, 1.1, 1.2),
    {"edit": Kind(((100, 20), (80, 10)), 2.0, 32, 0.7, (0.8, 0.9)), "chat": Kind(((10, 10),))},
    EngineConfig(num_blocks=99, max_num_seqs=7, shed_speculation="never", shed_queue=3),
)


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("schema",), 2, "schema must be 1"),
        (("costs", "steps"), [], "costs.steps is empty"),
        (("costs", "steps"), [[1, 0, 0.0, 1]], "costs.steps[0]"),
        (("costs", "steps"), [[1, 0, 0.1]], "costs.steps[0] must be 4 numbers"),
        (("costs", "steps"), None, "costs.steps must be a list"),
        (("costs", "overhead"), -1.0, "costs.overhead"),
        (("costs", "with_drafts"), 0.0, "costs.with_drafts"),
        (("costs", "extra"), 1, "costs has no field 'extra'"),
        (("engine", "num_blocks"), 0, "num_blocks"),
        (("engine", "num_threads"), 1, "engine has no field 'num_threads'"),
        (("kinds",), {}, "kinds is empty"),
        (("kinds",), [], "kinds must be an object"),
        (("kinds", "chat", "lengths"), [], "kinds.chat: lengths is empty"),
        (("kinds", "chat", "lengths"), [[10, 0]], "kinds.chat: lengths[0]"),
        (("kinds", "chat", "prefix"), 10, "kinds.chat: lengths[0]"),
        (("kinds", "chat", "share"), 0, "kinds.chat: share"),
        (("kinds", "chat", "offered"), 1.5, "kinds.chat: offered"),
        (("kinds", "chat", "acceptance"), [2.0], "kinds.chat: acceptance"),
        (("kinds", "chat", "acceptance"), ["x"], "kinds.chat"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(
    tmp_path: Path, place: tuple[str, ...], value: object, words: str
) -> None:
    path = tmp_path / "wrong.json"
    write_profile(PROFILE, path)
    found = json.loads(path.read_text(encoding="utf-8"))
    inside = found
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ProfileError, match=re.escape(words)) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ProfileError, match="profile.json"):
        read_profile(path)
