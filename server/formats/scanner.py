"""What all parsers of a choice's text have in common: the text comes in pieces, and waits until it is
settled what it is."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

Settled = TypeVar("Settled")


class State(Protocol):
    """Takes what it can from the front of the scanner's text, and names the next state where it is done.
    Returns whether that has something to do. ``final``: nothing follows the text."""

    def __call__(self, final: bool) -> bool: ...


class Scanner(Generic[Settled]):
    """Goes from state to state over a text. What is settled is what the states add to ``_settled``."""

    def __init__(self, first: State) -> None:
        self._state = first
        self._buffer = ""
        self._settled: list[Settled] = []

    def feed(self, text: str) -> list[Settled]:
        """Returns what the text settles."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[Settled]:
        """Returns what was held back, at the end of the choice."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Settled]:
        while self._state(final):
            pass
        settled, self._settled = self._settled, []
        return settled

    def _take(self, num_chars: int) -> str:
        """Removes the first characters from the text and returns them."""
        taken, self._buffer = self._buffer[:num_chars], self._buffer[num_chars:]
        return taken
