"""The 2-D window of Lookahead decoding: ``n - 1`` levels of guesses over ``width`` columns.

Level 0, column 0 is the anchor; column c of level r stands for the text at position
``anchor + r + c``, as guessed ``n - 1 - r`` steps ago. As draft nodes, level 0 is a chain and every
column hangs under its level-0 token:

    anchor - 0,1 - 0,2 - 0,3         level 0
      |       |     |     |
     1,0     1,1   1,2   1,3         level 1
      |       |     |     |
     2,0     2,1   2,2   2,3         level 2: the target's tokens at these rows are the next level

so a row sees what the method's mask lets it see, and its depth is its position. A step gives every
column one more token: level 0 is dropped, the new tokens become the last level, and the window has
moved on by one position, whatever was accepted.

It starts with level 0 alone, ``width + n - 3`` random tokens of the prompt; each of the first
``n - 2`` steps adds a level and takes the first column off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice

from drafters.tree import ROOT, DraftTree
from drafters.trie import Trie


def num_window_nodes(width: int, n: int) -> int:
    """Most nodes that a window has at any time, its first steps included."""
    return max((width + n - 3 - level) + level * (width + n - 2 - level) for level in range(n - 1))


class LookaheadWindow:
    """``fillers`` are the tokens that level 0 starts from and that added columns are made of."""

    def __init__(self, width: int, n: int, fillers: Sequence[int]) -> None:
        """Raises ValueError for an ``n`` below 2, a ``width`` below 1 and no fillers."""
        if n < 2 or width < 1 or not fillers:
            raise ValueError("a window needs n >= 2, a column and tokens to start from")
        self.n = n
        self._fillers = cycle(fillers)
        self._levels: list[list[int]] = [[]]
        self._width = 0
        self.resize(width)

    @property
    def levels(self) -> list[list[int]]:
        """The tokens: level 0 without its column 0, then the levels above it from column 0 on."""
        return [list(level) for level in self._levels]

    @property
    def is_full(self) -> bool:
        """All ``n - 1`` levels are there, so a step completes n-grams."""
        return len(self._levels) == self.n - 1

    def resize(self, width: int) -> None:
        """Cut columns off the end or add columns of fillers there."""
        if width == self._width:
            return
        self._width = width
        num_columns = width + self.n - 1 - len(self._levels)
        for rank, level in enumerate(self._levels):
            num_wanted = num_columns - (rank == 0)
            del level[num_wanted:]
            level += islice(self._fillers, num_wanted - len(level))

    def add_to(self, trie: Trie, feature: int) -> None:
        """Hang the window under the root: level 0 with ``feature``, the others with the next."""
        column: int | None = ROOT
        uppers = self._levels[1:]
        for index, token_id in enumerate([*self._levels[0], None]):
            node = column
            for level in uppers:
                node = trie.add(node, level[index], feature + 1)
            if token_id is not None:
                column = trie.add(column, token_id, feature)

    def advance(
        self, anchor: int, tree: DraftTree, row_token_ids: Sequence[int]
    ) -> list[tuple[int, ...]]:
        """Take in a step: ``anchor`` it started from, what was verified and what the target said.

        Returns the n-grams of a full window, one per column whose rows were all verified. Where rows
        are missing (a shortage cut the tree, or nothing was granted) the window stays as it is.
        """
        nodes = {
            (parent, token_id): node
            for node, (token_id, parent) in enumerate(
                zip(tree.token_ids, tree.parents, strict=True)
            )
        }
        columns = [anchor, *self._levels[0]]
        newest: list[int] = []
        ngrams: list[tuple[int, ...]] = []
        for index, tip in enumerate(self._tips(nodes)):
            if tip is None:
                continue
            token_id = row_token_ids[tip + 1]
            newest.append(token_id)
            if self.is_full:
                above = (level[index] for level in self._levels[1:])
                ngrams.append((columns[index], *above, token_id))
        if len(newest) == len(columns):
            self._slide(newest)
        return ngrams

    def _tips(self, nodes: Mapping[tuple[int, int], int]) -> Iterator[int | None]:
        """Per column the node of its last level, None where it was not verified."""
        column: int | None = ROOT
        for index in range(len(self._levels[0]) + 1):
            if index and column is not None:
                column = nodes.get((column, self._levels[0][index - 1]))
            tip = column
            for level in self._levels[1:]:
                if tip is not None:
                    tip = nodes.get((tip, level[index]))
            yield tip

    def _slide(self, newest: list[int]) -> None:
        if self.is_full:
            self._levels = [*self._levels[1:], newest]
            del self._levels[0][0]  # the next anchor takes the place of column 0
        else:
            self._levels = [*(level[1:] for level in self._levels), newest[1:]]
