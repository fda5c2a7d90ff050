"""Takes the reasoning off the front of a text that comes in pieces.

White space at the seams is nobody's: templates put it there, and take it away from what they are sent.
"""

from __future__ import annotations

from regex import compile, escape

from server.formats.reasoning.format import ReasoningFormat


class ReasoningSplitter:
    """Splits the text of one choice. ``is_open``: it begins inside the reasoning."""

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        self._opening = compile(rf"\s{{0,64}}{escape(form.begin)}")
        self._end = compile(escape(form.end))
        self._is_open = is_open
        self._state = self._begin
        self._buffer = ""
        self._space = ""
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._wrote_reasoning = False
        self.num_chars = 0
        """Characters up to the end of the reasoning, its markers included; 0 where there is none."""

    def is_reasoning(self, at: int) -> bool:
        """Whether the character there is, markers included."""
        return at < self.num_chars

    def feed(self, text: str) -> list[tuple[str, str]]:
        """(reasoning, content) that the text settles."""
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[tuple[str, str]]:
        """What was held back, at the end of the choice."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[tuple[str, str]]:
        while self._state(final):
            pass
        settled = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return [settled]

    # Each state returns whether the next one has something to do.

    def _begin(self, final: bool) -> bool:
        found = self._opening.match(self._buffer, partial=not final)
        if found and found.partial:
            return False
        if found:
            self._drop(found.end())
        is_reasoning = found is not None or self._is_open
        self._state = self._inside if is_reasoning else self._after
        return True

    def _inside(self, final: bool) -> bool:
        found = self._end.search(self._buffer, partial=not final)
        start = found.start() if found else len(self._buffer)
        self._write(self._buffer[:start])
        self._drop(start)
        if not found or found.partial:
            return False
        self._drop(found.end() - found.start())
        self._state = self._seam
        return True

    def _seam(self, final: bool) -> bool:  # noqa: ARG002
        self._buffer = self._buffer.lstrip()
        self._state = self._after if self._buffer else self._seam
        return bool(self._buffer)

    def _after(self, final: bool) -> bool:  # noqa: ARG002
        self._content.append(self._buffer)
        self._buffer = ""
        return False

    def _write(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not self._wrote_reasoning:
            body = body.lstrip()
        if body:
            self._wrote_reasoning = True
            self._reasoning.append(body)

    def _drop(self, num_chars: int) -> None:
        self._buffer = self._buffer[num_chars:]
        self.num_chars += num_chars
