"""A draft tree and its attention mask, from a ``DraftTree``."""

from __future__ import annotations

from docs.pictures.svg import Drawing
from drafters.tree import ROOT, DraftTree

WORDS = ["path", ")", ";", "name", ")", "file"]
TREE = DraftTree(list(range(6)), [-1, 0, 1, -1, 3, -1], [0] * 6)
PLACES = {-1: (60, 150), 0: (160, 70), 1: (245, 70), 2: (330, 70), 3: (160, 150), 4: (245, 150)}
PLACES[5] = (160, 230)


def attends(tree: DraftTree) -> list[list[bool]]:
    """Row 0 is the anchor, row i + 1 node i: itself, its ancestors and the anchor."""
    mask = []
    for row in range(len(tree) + 1):
        seen = {0, row}
        node = row - 1
        while node != ROOT:
            seen.add(node + 1)
            node = tree.parents[node]
        mask.append([column in seen for column in range(len(tree) + 1)])
    return mask


def draw() -> str:
    picture = Drawing(760, 330, "A draft tree and which rows attend to which")
    picture.text(20, 30, "the tree", bold=True)
    for node, parent in enumerate(TREE.parents):
        (x, y), (px, py) = PLACES[node], PLACES[parent]
        picture.line([(px + 34, py), (x - 34, y)])
    for node, (x, y) in PLACES.items():
        fill = "plain" if node == ROOT else "draft"
        picture.box(x - 34, y - 18, 68, 36, fill, "(" if node == ROOT else WORDS[node], mono=True)
    depths = TREE.depths()
    for depth in range(max(depths) + 1):
        x = 60 if depth == 0 else 160 + (depth - 1) * 85
        picture.text(x, 290, f"pos {depth}" if depth else "anchor", "faint", "middle", size=12)
    left, top, cell = 480, 74, 30
    picture.text(left - 70, 30, "who attends to whom", bold=True)
    names = ["(", *WORDS]
    for row, seen in enumerate(attends(TREE)):
        y = top + row * cell
        picture.text(left - 44, y + 20, names[row], "text", "end", mono=True)
        picture.box(left - 38, y, cell + 4, cell - 3, "good")
        for column, visible in enumerate(seen):
            fill = "good" if visible else "plain"
            picture.box(left + column * cell, y, cell - 3, cell - 3, fill)
    picture.text(left - 20, top - 8, "past", "faint", "middle", size=12)
    for column, name in enumerate(names):
        x = left + column * cell + 13
        picture.text(x, top - 8, name, "faint", "middle", mono=True, size=11)
    picture.text(
        left - 70, 306, "Siblings share a position and do not see each other.", "faint", size=12
    )
    return picture.render()
