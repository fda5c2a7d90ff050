"""``slipstream warm``: what a log's lines are sent as, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafters.base import DrafterInfo
from worlds.client_servers import OtherServer, ScriptedEngine, listening, slipstream
from worlds.commands import Run
from worlds.scripted_engine import ASSISTANT, USER, engine_info, prompt_text

pytestmark = pytest.mark.slow


@pytest.fixture
def engine() -> ScriptedEngine:
    drafters = {name: DrafterInfo(name, "", False) for name in ("none", "ngram", "suffix")}
    return ScriptedEngine("x" * 40, info=engine_info(drafters=drafters))


@pytest.fixture
def url(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with slipstream(engine) as found:
        monkeypatch.setenv("SLIPSTREAM_URL", found)
        yield found


def log(folder: Path, *lines: Any) -> str:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(line) + "\n\n" for line in lines), encoding="utf-8")
    return str(path)


@pytest.mark.usefixtures("url")
def test_lines_become_prompts_with_their_completions(
    engine: ScriptedEngine, tmp_path: Path, run: Run
) -> None:
    path = log(
        tmp_path,
        {"prompt": "ab", "completion": "cd", "cache_salt": "s"},
        {"prompt": [1, 2], "completion": [3]},
        {"messages": [{"role": "user", "content": "q"}], "completion": "a"},
    )
    assert run("warm", path, "--concurrency", "1").out == "taught 3 of 3 requests\n"
    text, ids, chat = engine.requests
    assert prompt_text(text) == "abcd"
    assert (text.cache_salt, ids.cache_salt) == ("s", "")
    assert ids.prompt_token_ids == (1, 2, 3)
    # The turn is not closed, and none is begun behind it.
    assert (USER in chat.prompt_token_ids, ASSISTANT in chat.prompt_token_ids) == (True, False)
    assert bytes(chat.prompt_token_ids[-1:]) == b"a"
    assert {each.sampling.max_tokens for each in engine.requests} == {1}
    assert {each.speculative.draft_strategy for each in engine.requests} == {"suffix"}


@pytest.mark.usefixtures("url")
def test_the_newest_lines_are_taught_in_order(
    engine: ScriptedEngine, tmp_path: Path, run: Run
) -> None:
    path = log(tmp_path, *({"prompt": [number], "completion": [9]} for number in range(20)))
    said = run("warm", path, "--last", "5", "--drafter", "ngram")
    assert said.out == "taught 5 of 5 requests\n"
    assert sorted(each.prompt_token_ids[0] for each in engine.requests) == [15, 16, 17, 18, 19]
    assert engine.requests[0].speculative.draft_strategy == "ngram"


@pytest.mark.usefixtures("url")
def test_what_is_refused_is_told_and_the_rest_taught(tmp_path: Path, run: Run) -> None:
    lines = ({"prompt": text, "completion": "b"} for text in ("a", "x" * 600))
    out, err = run("warm", log(tmp_path, *lines), status=1)
    assert out == "taught 1 of 2 requests\n"
    assert "1 not taken: line 3: " in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a"}, "line 1: prompt and completion must both be texts"),
        ({"prompt": "a", "completion": [1]}, "line 1: prompt and completion must both be texts"),
        ({"prompt": "a", "completion": ""}, "line 1: prompt and completion must both be texts"),
        ({"completion": "a"}, "line 1: give either prompt or messages"),
        ({"messages": "x", "completion": "a"}, "line 1: messages must be a list"),
        ({"prompt": "a", "completion": "b", "user": "u"}, "line 1: unknown field 'user'"),
        ({"prompt": "a", "completion": "b", "cache_salt": 1}, "line 1: cache_salt"),
        ([1], "line 1: not an object"),
    ],
)
@pytest.mark.usefixtures("url")
def test_a_line_that_is_none_ends_it_before_anything_is_sent(
    engine: ScriptedEngine, tmp_path: Path, run: Run, line: Any, message: str
) -> None:
    assert message in run("warm", log(tmp_path, line), status=2).err
    assert engine.requests == []


def test_files_and_servers_that_are_none(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("warm", tmp_path / "none", status=2)
    assert "has no lines" in run("warm", log(tmp_path), status=2).err
    with listening(OtherServer().app) as found:
        monkeypatch.setenv("SLIPSTREAM_URL", found)
        said = run("warm", log(tmp_path, {"prompt": "a", "completion": "b"}), status=2)
    assert "not Slipstream" in said.err
