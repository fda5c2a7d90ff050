"""Takes the reasoning off the front of a text that comes in pieces.

White space at the seams is nobody's: templates put it there, and take it away from what they are sent.
"""

from __future__ import annotations

from regex import compile, escape

from server.formats.format import ReasoningFormat, Splitter


class ReasoningSplitter(Splitter):
    """Splits the text of one choice. ``is_open``: it begins inside the reasoning."""

    def __init__(self, form: ReasoningFormat, is_open: bool) -> None:
        super().__init__(self._begin)
        self._opening = compile(rf"\s{{0,64}}{escape(form.begin)}")
        self._end = compile(escape(form.end))
        self._is_open = is_open
        self._space = ""
        self._wrote_reasoning = False

    def _begin(self, final: bool) -> bool:
        found = self._opening.match(self._buffer, partial=not final)
        if found and found.partial:
            return False
        self._state = self._after
        if found or self._is_open:
            self._starts.append(0)
            self._take(found.end() if found else 0)
            self._state = self._inside
        return True

    def _inside(self, final: bool) -> bool:
        text, found = self._until(self._end, final)
        self._write(text)
        if found is None:
            return False
        self._ends.append(self._at)
        self._state = self._seam
        return True

    def _seam(self, final: bool) -> bool:  # noqa: ARG002
        self._buffer = self._buffer.lstrip()
        self._state = self._after if self._buffer else self._seam
        return bool(self._buffer)

    def _after(self, final: bool) -> bool:  # noqa: ARG002
        self._settled.append(("", self._take(len(self._buffer))))
        return False

    def _write(self, text: str) -> None:
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        if not self._wrote_reasoning:
            body = body.lstrip()
        if body:
            self._wrote_reasoning = True
            self._settled.append((body, ""))
