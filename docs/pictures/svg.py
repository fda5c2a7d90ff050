"""A drawing of boxes, lines and words as SVG: a card of its own, light or dark as the reader's system.

Colours are CSS classes, so that one file serves both. Lengths are pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_COLOURS = {
    "card": ("#ffffff", "#1c2027"),
    "line": ("#c3c9d2", "#4a525e"),
    "text": ("#22272e", "#e4e8ee"),
    "faint": ("#687280", "#98a2b0"),
    "plain": ("#eef1f5", "#2c323b"),
    "draft": ("#ffe6b8", "#6b4c12"),
    "good": ("#c9efd2", "#1d5a31"),
    "bad": ("#fbd3d3", "#6e2424"),
    "own": ("#cfe1ff", "#1f4a86"),
    "curve1": ("#1f6feb", "#6aa9ff"),
    "curve2": ("#b3600a", "#f0a04b"),
    "curve3": ("#1a7f4b", "#57c98a"),
}


class Drawing:
    """Shapes in the order drawn. ``title`` is what a screen reader says."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        text: str = "",
        mono: bool = False,
    ) -> None:
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="5" '
            f'class="f-{fill} edge"/>'
        )
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text, "text", "middle", mono)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str = "text",
        anchor: str = "start",
        mono: bool = False,
        size: int = 14,
        bold: bool = False,
    ) -> None:
        kind = f"f-{fill}" + (" mono" if mono else "") + (" bold" if bold else "")
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" font-size="{size}" '
            f'class="{kind}" xml:space="preserve">{escape(text)}</text>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], stroke: str = "line", width: float = 1.5
    ) -> None:
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" class="s-{stroke}" stroke-width="{width}"/>'
        )

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{radius}" class="f-{fill}"/>')

    def render(self) -> str:
        width, height = self._size
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(self._title)}</title>",
            f"<style>{_style()}</style>",
            f'<rect width="{width}" height="{height}" rx="10" class="f-card"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _style() -> str:
    light, dark = (
        "".join(
            f".f-{name}{{fill:{pair[side]}}}.s-{name}{{stroke:{pair[side]}}}"
            for name, pair in _COLOURS.items()
        )
        + f".edge{{stroke:{_COLOURS['line'][side]}}}"
        for side in (0, 1)
    )
    fonts = "text{font-family:sans-serif}.mono{font-family:monospace}.bold{font-weight:bold}"
    return f"{fonts}{light}@media (prefers-color-scheme:dark){{{dark}}}"


def _n(value: float) -> str:
    """A coordinate without digits that nobody sees."""
    return f"{value:.1f}".removesuffix(".0")
