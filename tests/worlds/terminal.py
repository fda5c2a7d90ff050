"""The command on a pseudo-terminal, as a person sees it."""

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

from worlds.client_servers import WAIT_SECONDS

UNDERLINED = re.compile(r"\x1b\[(?:[0-9;]*;)?4(?:;[0-9;]*)?m([^\x1b]*)")


def _take_the_terminal() -> None:
    """Make it the session's, so that typed control characters are signals; and let them be heard, which
    a test run in the background of a script would not."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


_WITHOUT_A_PLACE = re.compile(r"\x1b\[\?25[lh]|\x1b\[[0-9;]*m")


def rows(seen: str) -> list[str]:
    """Returns the rows that a terminal shows in the end of what was sent to it, for the few controls that
    are sent: up a row, erase a row, colours, the cursor."""
    shown, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d+A|\x1b\[2K|[^\x1b]", _WITHOUT_A_PLACE.sub("", seen)):
        if part.endswith("A") and len(part) > 1:
            row -= int(part[2:-1])
        elif part == "\x1b[2K":
            shown[row] = ""
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            shown += [""] * (row + 1 - len(shown))
        else:
            shown[row] = shown[row].ljust(column)[:column] + part + shown[row][column + 1 :]
            column += 1
    return [each.rstrip() for each in shown if each.strip()]


class Terminal:
    """A command whose three streams are one terminal."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self._mine, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        cleared = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
        environment = {key: value for key, value in os.environ.items() if key not in cleared}
        environment |= {"TERM": "xterm-256color", **variables}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.cli", *arguments],
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
