"""The comparison on edits: which files it takes, and that its contenders are what they say."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bench import replay_edits
from bench.replay_edits import ARCTIC, ARCTIC_LIMITS, changed_files, compare, edit_lines, main
from slipstream.tools.replay.cost import StepCost
from slipstream.tools.replay.log import LogLine
from slipstream.tools.replay.replay import ReplayCase, replay


class Letters:
    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) for letter in text]


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path]:
    lines = [f"value_{index} = {index * index}\n" for index in range(150)]
    text, changed = "".join(lines), "".join([*lines[:60], "new = True\n", *lines[61:]])
    for name, old, new in (
        ("a/edited.py", text, changed),
        ("a/same.py", text, text),
        ("a/rewritten.py", text, "".join(f"other_{index}()\n" for index in range(200))),
        ("a/short.py", "x = 1\n", "x = 2\n"),
        ("b/edited.py", text, changed),
        ("a/gone.py", text, None),
    ):
        for release, content in (("before", old), ("after", new)):
            if content is not None:
                path = tmp_path / release / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content)
    return tmp_path / "before", tmp_path / "after"


def test_edits_are_files_that_changed_and_were_not_rewritten(releases: tuple[Path, Path]) -> None:
    found = [path for path, _, _ in changed_files(*releases)]
    assert found == ["a/edited.py", "b/edited.py"]
    (line,) = edit_lines(*releases, Letters(), max_files=1)
    assert "new = True" in "".join(map(chr, line.completion_token_ids))
    assert "new = True" not in "".join(map(chr, line.prompt_token_ids))


def test_without_arctic_ours_are_compared_and_draft_from_finished_edits_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "arctic_inference", None)
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    results = compare([LogLine(1, [1, 2, 3, 1, 2, 3], [1, 2, 3] * 4)], [5])
    assert [(result.case.drafter, result.case.shape) for result in results] == [
        (name, shape) for name in ("ngram", "suffix") for shape in ("chain", "tree")
    ]
    assert all(result.tokens_per_step == 6.0 for result in results)
    assert "left out" in capsys.readouterr().out
    # Twice the same request, nothing of whose output stands in its prompt.
    lines = [LogLine(number, [1, 2, 3], list(range(100, 160))) for number in (1, 2)]
    alone, kept = (
        {each.case.drafter: each.num_steps for each in compare(lines, [8], keep_finished=keep)}
        for keep in (False, True)
    )
    assert kept["suffix"] < alone["suffix"] == 120
    assert kept["ngram"] == alone["ngram"]  # has no memory of other requests


@pytest.mark.parametrize("keep_finished", [False, True])
@pytest.mark.parametrize("name", ARCTIC_LIMITS)
def test_arctic_is_called_as_a_drafter(
    monkeypatch: pytest.MonkeyPatch, name: str, keep_finished: bool
) -> None:
    class Cache:
        """Drafts the next two numbers, as its counterpart would be asked to."""

        max_tree_depth = 4

        def __init__(self, max_cached_requests: int) -> None:
            assert max_cached_requests == (-1 if keep_finished else 0)

        def start_request(self, request_id: str, token_ids: Any) -> None:
            calls.append(("start", request_id))
            self.text = list(token_ids)

        def speculate(self, request_id: str, context: Any, **more: Any) -> SimpleNamespace:
            assert (request_id, list(context)) == ("line 1", self.text[-4:])
            most = more.pop("max_spec_tokens")
            assert not more.pop("use_tree_spec")
            assert bool(more) is (name != ARCTIC)
            token_ids = [int(context[-1]) + 1, int(context[-1]) + 2][:most]
            return SimpleNamespace(token_ids=token_ids, parents=[-1, 0][:most])

        def add_active_response(self, request_id: str, token_ids: Any) -> None:
            assert request_id == "line 1"
            self.text += list(token_ids)

        def stop_request(self, request_id: str) -> None:
            calls.append(("stop", request_id))

    calls: list[tuple[str, str]] = []
    module = ModuleType("arctic_inference.suffix_decoding")
    module.SuffixDecodingCache = Cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "arctic_inference", ModuleType("arctic_inference"))
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)
    line = LogLine(1, [10, 11, 12], list(range(13, 22)))
    build = partial(replay_edits.build, keep_finished=keep_finished)
    result = replay(ReplayCase(name, 1, 2), [line], StepCost(), build=build)
    assert (result.num_steps, result.num_tokens, result.num_accepted_tokens) == (3, 9, 6)
    assert calls == [("start", "line 1"), ("stop", "line 1")]


def test_the_command_writes_a_log_that_can_be_replayed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    releases: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(replay_edits, "load_tokenizer", lambda _: Letters())
    before, after = map(str, releases)
    log = tmp_path / "edits.jsonl"
    common = ["--model", "m", "--budgets", "8"]
    assert main([*common, "--before", before, "--after", after, "--write", str(log)]) == 0
    assert "2 edits" in capsys.readouterr().out
    assert set(json.loads(log.read_text().splitlines()[0])) == {"prompt", "completion"}
    assert main([*common, "--log", str(log)]) == 0
    assert "2 edits" in capsys.readouterr().out
    for arguments in ([], ["--before", "x"], ["--log", "x", "--before", "a"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "either --log" in capsys.readouterr().err
