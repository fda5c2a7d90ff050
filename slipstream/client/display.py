"""Shows a reply while it arrives: on a terminal with drafted tokens underlined and a status line
below; into a pipe as bare text.

The text itself is always what the server sent as text. Tokens only say which stretches of it were
drafted.
"""

from __future__ import annotations

import sys
import termios
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from slipstream.client.stream import Piece, Reply

UNTOLD = "this server does not tell which tokens were drafted"


def status_line(reply: Reply, now: float) -> str:
    """The newest gamma, and acceptance, tokens per step and tokens per second so far."""
    parts = []
    if reply.gamma is not None:
        parts.append(f"gamma {reply.gamma:.0f}")
    if reply.acceptance_rate is not None:
        parts.append(f"accepted {reply.acceptance_rate:.0%}")
    if reply.tokens_per_step is not None:
        parts.append(f"{reply.tokens_per_step:.2f} tokens/step")
    parts.append(_speed(reply, now))
    if reply.first_token_time is None:
        seconds = now - reply.started
        return f"waiting for the first token (queued, or the prompt is being read), {seconds:.0f} s"
    return "  ".join([*parts, _count(reply)])


def _unit(reply: Reply) -> str:
    return "chunk" if reply.counts_pieces else "token"


def _count(reply: Reply) -> str:
    return f"{reply.num_tokens} {_unit(reply)}{'' if reply.num_tokens == 1 else 's'}"


def _speed(reply: Reply, now: float) -> str:
    pace = reply.pace(now)
    return f"{'-' if pace is None else f'{1 / pace:.0f}'} {_unit(reply)}s/s"


def summary(reply: Reply) -> list[str]:
    """The server's account of a finished reply; of one that was broken off, what is known here."""
    lines = [_ending(reply)]
    account = reply.speculative
    if not reply.tells_drafts:
        return [*lines, UNTOLD]
    if account is None:
        return [*lines, status_line(reply, reply.last_token_time or reply.started)]
    lines.append(_speculation(account))
    histogram = account["acceptance_histogram"]
    if account["num_draft_tokens"]:
        counted = [f"{count} x {number}" for number, count in enumerate(histogram) if count]
        lines.append(f"steps x accepted drafts: {', '.join(counted)}")
    return lines


def _ending(reply: Reply) -> str:
    why = {"stop": "ended", "length": "cut at the limit of tokens", None: "broken off"}
    parts = [f"{_count(reply)}, {why.get(reply.finish_reason, reply.finish_reason)}"]
    if reply.time_to_first_token is not None and reply.last_token_time is not None:
        parts.append(f"first after {reply.time_to_first_token:.2f} s")
        parts.append(f"all after {reply.latency:.2f} s")
        if reply.pace(reply.last_token_time) is not None:
            parts.append(_speed(reply, reply.last_token_time))
    if reply.seed is not None:
        parts.append(f"seed {reply.seed}")
    return "; ".join(parts)


def _speculation(account: dict[str, Any]) -> str:
    steps = f"{account['num_steps']} steps"
    if account["tokens_per_step"] is not None:
        steps += f" of {account['tokens_per_step']:.2f} tokens"
    if not account["num_draft_tokens"]:
        return f"{account['drafter']}: {steps}, nothing drafted"
    parts = [
        f"{account['drafter']}: {steps}",
        f"{account['num_accepted_tokens']} of {account['num_draft_tokens']} drafts accepted "
        f"({account['acceptance_rate']:.1%})",
        f"mean gamma {account['mean_gamma']:.2f}",
    ]
    if account["estimated_speedup"] is not None:
        parts.append(f"estimated speed-up {account['estimated_speedup']:.2f}x")
    return ", ".join(parts)


Mark = Literal["auto", "brackets", "none"]
DRAFTED_STYLE = "underline green"
LEGEND = "underlined: drafted, and confirmed by the model"
_OPEN, _CLOSE = "⟦", "⟧"
_REFRESH_PER_SECOND = 10
# A model may write anything: control characters are shown, not obeyed. Tabs and line breaks stay.
_CONTROL_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROL_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(128, 160), 65533)


class Marker:
    """Cuts a reply's text into drafted and other stretches.

    A token can be named before all of its text is sent (a stop string may yet begin in it), so
    tokens wait here for their characters. Those of thoughts and calls wait in vain, until text comes
    that is not theirs.
    """

    def __init__(self) -> None:
        self._spans: deque[tuple[str, bool]] = deque()

    def add(self, piece: Piece) -> Iterator[tuple[str, bool]]:
        """The piece's text as (stretch, drafted) pairs, by turns."""
        for drafted, found in groupby(self._by_token(piece), itemgetter(1)):
            yield "".join(text for text, _ in found), drafted

    def _by_token(self, piece: Piece) -> Iterator[tuple[str, bool]]:
        self._spans.extend((token.text, token.drafted) for token in piece.tokens)
        waiting = "".join(text for text, _ in self._spans) if piece.text else ""
        if not waiting.startswith(piece.text) and (before := waiting.rfind(piece.text)) > 0:
            for _ in self._taken(waiting[:before]):
                pass
        yield from self._taken(piece.text)

    def _taken(self, text: str) -> Iterator[tuple[str, bool]]:
        """So much text off what waits."""
        while text:
            own, drafted = self._spans.popleft() if self._spans else (text, False)
            if len(own) > len(text):
                self._spans.appendleft((own[len(text) :], drafted))
            if own:
                yield text[: len(own)], drafted
            text = text[len(own) :]


class Screen(Protocol):
    """Where replies are shown."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """While the block runs, the client waits for that."""

    def start(self, reply: Reply) -> None:
        """A reply begins; nothing has come of it."""

    def show(self, piece: Piece) -> None:
        """The next piece has come; the reply holds it already."""

    def stop(self) -> None:
        """It has ended, by whatever end; what came of it stays readable."""

    def account(self, reply: Reply) -> None:
        """The lines that follow a reply."""

    def note(self, text: str) -> None:
        """A word of the client's own."""


class PlainScreen:
    """Text to ``out`` as it comes, everything else to ``err``."""

    def __init__(self, mark: Mark, quiet: bool, out: TextIO, err: TextIO) -> None:
        self._brackets = mark == "brackets"
        self._quiet = quiet
        self._out = out
        self._err = err
        self._marker = Marker()
        self._drafted = False
        self._at_line_start = True

    def waiting(self, what: str) -> AbstractContextManager[object]:
        del what
        return nullcontext()

    def start(self, reply: Reply) -> None:
        del reply
        self._marker = Marker()

    def show(self, piece: Piece) -> None:
        for text, drafted in self._marker.add(piece):
            self._switch(drafted)
            self._write(text)
        self._out.flush()

    def stop(self) -> None:
        self._switch(False)
        if not self._at_line_start:
            self._write("\n")
        self._out.flush()

    def account(self, reply: Reply) -> None:
        if not self._quiet:
            self._err.write("".join(f"# {line}\n" for line in summary(reply)))
            self._err.flush()

    def note(self, text: str) -> None:
        self._err.write(f"# {text.translate(_CONTROL_PICTURES)}\n")
        self._err.flush()

    def _switch(self, drafted: bool) -> None:
        if self._brackets and drafted != self._drafted:
            self._out.write(_OPEN if drafted else _CLOSE)
        self._drafted = drafted

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._at_line_start = text.endswith("\n")


class TerminalScreen:
    """Finished lines scroll by; the line being written and the status stay below them."""

    def __init__(self, mark: Mark, quiet: bool, console: Console) -> None:
        self._mark = mark
        self._quiet = quiet
        self._console = console
        self._marker = Marker()
        self._line = Text()
        self._reply: Reply | None = None
        self._shown = ExitStack()

    def waiting(self, what: str) -> AbstractContextManager[object]:
        since = time.perf_counter()
        return self._live(lambda: _bar(f"waiting for {what}, {time.perf_counter() - since:.0f} s"))

    def start(self, reply: Reply) -> None:
        self._marker, self._line, self._reply = Marker(), Text(), reply
        self._shown.enter_context(_typing_unseen())
        self._shown.enter_context(self._live(self._below))

    def _live(self, show: Callable[[], Group | Text]) -> Live:
        """Shows a live region below the text, redrawn until the end and then removed."""
        return Live(
            console=self._console,
            get_renderable=show,
            refresh_per_second=_REFRESH_PER_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def show(self, piece: Piece) -> None:
        for text, drafted in self._marker.add(piece):
            self._append(text.translate(_CONTROL_PICTURES), drafted)
        *finished, self._line = self._line.split("\n", allow_blank=True)
        width = self._console.width
        if self._line.cell_len > width:
            *rows, self._line = self._line.wrap(self._console, width)
            finished += rows
        for line in finished:
            self._console.print(line)

    def stop(self) -> None:
        self._shown.close()
        if self._line:
            self._console.print(self._line)
            self._line = Text()

    def account(self, reply: Reply) -> None:
        if self._quiet:
            return
        if self._mark == "auto" and reply.num_accepted_tokens:
            meaning = LEGEND.partition(": ")[2]
            legend = Text.assemble(("drafted", DRAFTED_STYLE), (f": {meaning}", "dim"))
            self._console.print(legend)
        for line in summary(reply):
            self._console.print(Text(line, "dim"))

    def note(self, text: str) -> None:
        self._console.print(Text(text.translate(_CONTROL_PICTURES), "dim"))

    def _append(self, text: str, drafted: bool) -> None:
        if drafted and self._mark == "brackets":
            text = f"{_OPEN}{text}{_CLOSE}"
        self._line.append(text, DRAFTED_STYLE if drafted and self._mark == "auto" else "")

    def _below(self) -> Group:
        assert self._reply is not None, "there is nothing below before a reply begins"
        status = status_line(self._reply, time.perf_counter())
        if self._reply.first_token_time is not None:
            if not self._reply.tells_drafts:
                status += f"   ({UNTOLD})"
            elif self._mark == "auto":
                status += f"   ({LEGEND})"
        return Group(self._line, _bar(status)) if self._line else Group(_bar(status))


def _bar(status: str) -> Text:
    return Text(status, "reverse dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def _typing_unseen() -> Iterator[None]:
    """Has the terminal not show what is typed while the block runs, which would tear what is drawn; who
    reads next gets it. Control characters are signals as ever."""
    if not sys.stdin.isatty():
        yield
        return
    handle = sys.stdin.fileno()
    before = termios.tcgetattr(handle)
    unseen = [*before]
    unseen[3] &= ~termios.ECHO
    termios.tcsetattr(handle, termios.TCSANOW, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(handle, termios.TCSANOW, before)


class SilentScreen:
    """Shows no replies: for those who want them as JSON."""

    def waiting(self, what: str) -> AbstractContextManager[object]:
        del what
        return nullcontext()

    def start(self, reply: Reply) -> None: ...

    def stop(self) -> None: ...

    def show(self, piece: Piece) -> None: ...

    def account(self, reply: Reply) -> None: ...

    def note(self, text: str) -> None:
        sys.stderr.write(f"# {text.translate(_CONTROL_PICTURES)}\n")


def choose_screen(arguments: Namespace) -> Screen:
    """A terminal gets colours and a status line, a file or a pipe the bare text. Rich honours NO_COLOR
    and TERM; without colour, drafted tokens are still underlined."""
    mark: Mark = arguments.mark
    if arguments.json:
        return SilentScreen()
    # None leaves the decision to NO_COLOR.
    no_color = True if arguments.no_color else None
    console = Console(highlight=False, markup=False, emoji=False, no_color=no_color)
    if sys.stdout.isatty() and not console.is_dumb_terminal:
        return TerminalScreen(mark, arguments.quiet, console)
    return PlainScreen(mark, arguments.quiet, sys.stdout, sys.stderr)


@contextmanager
def showing(screen: Screen, reply: Reply) -> Iterator[None]:
    """Brackets one reply."""
    screen.start(reply)
    try:
        yield
    finally:
        screen.stop()
