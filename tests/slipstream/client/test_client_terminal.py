"""People see this of the commands, on a pseudo-terminal, and when they stop them by Ctrl-C."""

from __future__ import annotations

import re

import pytest

from worlds.client_servers import ScriptedEngine, slipstream, wait_for
from worlds.scripted_engine import prompt_text
from worlds.terminal import UNDERLINED, rows, terminal

pytestmark = pytest.mark.slow


def test_a_terminal_shows_a_status_line_and_marks_drafts() -> None:
    engine = ScriptedEngine("hello world")
    engine.gate.clear()
    with slipstream(engine) as url, terminal("complete", "say", "--url", url) as shown:
        # The line is there before the first token is.
        shown.read_until("waiting for the first token")
        assert "underlined" not in shown.seen, "there is nothing yet that could be"
        engine.gate.set()
        assert shown.read_to_end() == 0
    assert "waiting for the server" in shown.seen
    assert "1.83 tokens/step" in shown.seen
    assert re.search(r"(-|\d[\d.]*) tokens/s", shown.seen)
    assert "gamma" in shown.seen
    assert "7 of 10 drafts accepted" in shown.seen
    assert {"el", "or"} <= set(UNDERLINED.findall(shown.seen))
    assert "32m" in shown.seen


def test_what_waits_vanishes_and_what_is_typed_meanwhile_tears_nothing() -> None:
    engine = ScriptedEngine("hello world")
    engine.gate.clear()
    with slipstream(engine) as url, terminal("complete", "say", "--url", url, "--quiet") as shown:
        shown.read_until("waiting for the first token")
        shown.type("typed ahead\n")
        engine.gate.set()
        assert shown.read_to_end() == 0
    assert rows(shown.seen) == ["hello world"]
    assert shown.seen.count("\x1b[?25l") == shown.seen.count("\x1b[?25h"), "the cursor is back"


@pytest.mark.parametrize(("flags", "variables"), [(["--no-color"], {}), ([], {"NO_COLOR": "1"})])
def test_without_colour_drafts_are_still_underlined(
    flags: list[str], variables: dict[str, str]
) -> None:
    with (
        slipstream(ScriptedEngine("hello world")) as url,
        terminal("complete", "say", "--url", url, *flags, **variables) as shown,
    ):
        assert shown.read_to_end() == 0
    assert "32m" not in shown.seen
    assert {"el", "or"} <= set(UNDERLINED.findall(shown.seen))


def test_a_models_control_characters_are_shown_not_obeyed() -> None:
    with (
        slipstream(ScriptedEngine("a\x1b[31mb\a\x9b2Jc")) as url,
        terminal("complete", "say", "--url", url, "--mark", "none", "--quiet") as shown,
    ):
        assert shown.read_to_end() == 0
    assert "a\u241b[31mb\u2407\ufffd2Jc" in shown.seen
    assert "\x1b[31m" not in shown.seen


def test_ctrl_c_ends_a_completion_and_keeps_what_came() -> None:
    engine = ScriptedEngine(script=lambda _: [97] * 400, group_sizes=(1,))
    with slipstream(engine) as url:
        with terminal("complete", "say", "--url", url, "--max-tokens", "400") as shown:
            engine.gate.clear()
            shown.read_until("waiting for the first token")
            shown.type("\x03")
            assert shown.read_to_end() == 130
        # The server is told at once.
        wait_for(lambda: not engine.open and engine.closed_early)
    assert "broken off" in shown.seen
    assert "Traceback" not in shown.seen


def test_a_conversation_survives_ctrl_c_and_errors() -> None:
    engine = ScriptedEngine("hello world")
    with slipstream(engine) as url, terminal("chat", "--url", url) as shown:
        shown.read_until("you> ")
        shown.type("/bogus\n")
        shown.read_until("error: there is no command '/bogus'")
        engine.gate.clear()
        shown.type("first\n")
        shown.read_until("waiting for the first token")
        shown.type("\x03")
        shown.read_until("broken off")
        engine.gate.set()
        shown.type("second \\\nhalf\n")
        shown.read_until("11 tokens, ended")
        shown.type("/quit\n")
        assert shown.read_to_end() == 0
    # What was stopped before it had an answer is not part of the conversation.
    assert prompt_text(engine.requests[-1]) == "user: second \nhalf\n"


def test_a_bench_shows_progress_and_ends_on_ctrl_c() -> None:
    engine = ScriptedEngine("hello world")
    engine.gate.clear()
    with slipstream(engine) as url, terminal("bench", "--url", url) as shown:
        shown.read_until("warm-up none")
        shown.type("\x03")
        assert shown.read_to_end() == 130
    assert "slipstream: interrupted" in shown.seen
    assert "Traceback" not in shown.seen
