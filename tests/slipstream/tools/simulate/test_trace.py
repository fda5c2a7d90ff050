"""Traces: what is read, and what is refused by line and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.tools.replay.log import LogError
from slipstream.tools.simulate.profile import Kind
from slipstream.tools.simulate.trace import read_trace
from slipstream.tools.simulate.work import Work

KINDS = {"edit": Kind(((10, 10),)), "chat": Kind(((10, 10),))}
GOOD = {"at": 1.5, "kind": "edit", "prompt_tokens": 100, "completion_tokens": 20}


def no_tokenizer() -> Any:
    raise AssertionError("lengths and token ids need no tokenizer")


def read(folder: Path, *lines: object, kinds: dict[str, Kind] = KINDS) -> list[Work]:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return read_trace(path, kinds, no_tokenizer)


def test_lengths_become_texts_that_begin_alike_where_they_should(tmp_path: Path) -> None:
    shared = {**GOOD, "prefix_tokens": 64, "cache_salt": "a"}
    first, second, other = read(tmp_path, shared, shared, {**shared, "cache_salt": "b"})
    assert [each.at for each in (first, second, other)] == [1.5, 1.5, 1.5]
    assert len(first.prompt_token_ids) == 100
    assert len(first.completion_token_ids) == 20
    assert first.prompt_token_ids[:64] == second.prompt_token_ids[:64]
    assert first.prompt_token_ids[64] != second.prompt_token_ids[64]
    assert not {*first.prompt_token_ids[:64]} & {*other.prompt_token_ids[:64]}
    assert first.tenant == "a"


def test_a_log_to_replay_is_a_trace_where_it_has_times(tmp_path: Path) -> None:
    line = {"prompt": [1, 2, 3], "completion": [4, 5], "cache_salt": "t", "kind": "chat", "at": 0}
    (work,) = read(tmp_path, line)
    assert (work.prompt_token_ids, work.completion_token_ids) == ([1, 2, 3], [4, 5])
    assert (work.kind, work.tenant, work.at) == ("chat", "t", 0.0)


def test_the_only_kind_needs_no_name(tmp_path: Path) -> None:
    line = {name: value for name, value in GOOD.items() if name != "kind"}
    (work,) = read(tmp_path, line, kinds={"chat": KINDS["chat"]})
    assert work.kind == "chat"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "line 2: not an object"),
        ({**GOOD, "at": -1}, "line 2: at must be seconds"),
        ({**GOOD, "at": True}, "line 2: at must be seconds"),
        ({**GOOD, "at": 1.0}, "line 2: at is before the line above"),
        ({**GOOD, "kind": "novel"}, "line 2: kind must be one of the profile's: edit, chat"),
        ({**GOOD, "kind": None}, "line 2: kind"),
        ({**GOOD, "prompt_tokens": 0}, "line 2: prompt_tokens"),
        ({**GOOD, "completion_tokens": 1.5}, "line 2: completion_tokens"),
        ({**GOOD, "prefix_tokens": 100}, "line 2: prefix_tokens must be below"),
        ({**GOOD, "cache_salt": 7}, "line 2: cache_salt"),
        ({**GOOD, "tokens": 7}, "line 2: unknown field 'tokens'"),
        ({**GOOD, "prompt": [1], "completion": []}, "line 1: unknown field 'prompt_tokens'"),
    ],
)
def test_what_does_not_fit_is_refused_by_line_and_field(
    tmp_path: Path, line: object, words: str
) -> None:
    with pytest.raises(LogError, match=words):
        read(tmp_path, GOOD, line)
