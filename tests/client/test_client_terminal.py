"""What a person sees: the commands on a pseudo-terminal, and stopped by Ctrl-C."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest

from worlds.client_servers import WAIT_SECONDS, ScriptedEngine, slipstream, wait_for

pytestmark = pytest.mark.slow

UNDERLINED = re.compile(r"\x1b\[(?:[0-9;]*;)?4(?:;[0-9;]*)?m([^\x1b]*)")


def _take_the_terminal() -> None:
    """Make it the session's, so that typed control characters are signals; and let them be heard, which
    a test run in the background of a script would not."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A command whose three streams are one terminal."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._mine, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        cleared = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
        environment = {key: value for key, value in os.environ.items() if key not in cleared}
        environment |= {"TERM": "xterm-256color", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "server.cli", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_the_terminal,
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            assert self._read(), f"ended without {text!r}: {self.seen!r}"

    def read_to_end(self) -> int:
        """The exit status."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self._read():
            assert time.monotonic() < deadline, f"no end after {self.seen!r}"
        return self.process.wait(WAIT_SECONDS)

    def _read(self) -> bool:
        if not select.select([self._mine], [], [], WAIT_SECONDS)[0]:
            pytest.fail(f"silence after {self.seen!r}")
        data = b""
        # Linux tells the end of a terminal as an error.
        with contextlib.suppress(OSError):
            data = os.read(self._mine, 65536)
        self.seen += data.decode(errors="replace")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._mine)


@contextlib.contextmanager
def terminal(*arguments: str, **variables: str) -> Iterator[Terminal]:
    found = Terminal(*arguments, **variables)
    try:
        yield found
    finally:
        found.close()


def test_a_terminal_shows_a_status_line_and_marks_drafts() -> None:
    engine = ScriptedEngine("hello world")
    engine.gate.clear()
    with slipstream(engine) as url, terminal("complete", "say", "--url", url) as shown:
        # The line is there before the first token is.
        shown.read_until("waiting for the first token")
        engine.gate.set()
        assert shown.read_to_end() == 0
    assert "1.83 tokens/step" in shown.seen
    assert "tokens/s" in shown.seen
    assert "gamma" in shown.seen
    assert "7 of 10 drafts accepted" in shown.seen
    assert {"el", "or"} <= set(UNDERLINED.findall(shown.seen))
    assert "32m" in shown.seen


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
    last = bytes(t for t in engine.requests[-1].prompt_token_ids if t < 256)
    # What was stopped before it had an answer is not part of the conversation.
    assert last == b"user: second \nhalf\n"


def test_a_bench_shows_progress_and_ends_on_ctrl_c() -> None:
    engine = ScriptedEngine("hello world")
    engine.gate.clear()
    with slipstream(engine) as url, terminal("bench", "--url", url) as shown:
        shown.read_until("warm-up none")
        shown.type("\x03")
        assert shown.read_to_end() == 130
    assert "slipstream: interrupted" in shown.seen
    assert "Traceback" not in shown.seen
