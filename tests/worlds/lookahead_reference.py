"""Lookahead decoding, naively: rows and mask as Fu et al. (2024) define them, over a scripted target."""

from __future__ import annotations

from collections.abc import Sequence

from worlds.simulated_target import Target


class ReferenceLookahead:
    """The window as a plain list of rows, the pool as a plain list of n-grams in order of insertion.

    ``rows[0]`` has ``width + n - 3`` tokens to begin with.
    """

    def __init__(self, row0: Sequence[int], width: int, n: int, num_guesses: int) -> None:
        self.rows = [list(row0)]
        self.width = width
        self.n = n
        self.num_guesses = num_guesses
        self.ngrams: list[tuple[int, ...]] = []

    def insert(self, ngram: Sequence[int]) -> None:
        ngram = tuple(ngram)
        if ngram in self.ngrams:
            self.ngrams.remove(ngram)
        self.ngrams.append(ngram)
        of_key = [held for held in self.ngrams if held[0] == ngram[0]]
        if len(of_key) > self.num_guesses:
            self.ngrams.remove(of_key[0])

    def guesses(self, anchor: int) -> list[tuple[int, ...]]:
        return [ngram[1:] for ngram in self.ngrams if ngram[0] == anchor]

    def seen_by(self, row: int, column: int) -> list[int]:
        """The window's tokens that entry (row, column) sees after the anchor, itself included."""
        return self.rows[0][:column] + [self.rows[r][column] for r in range(1, row + 1)]

    def entries(self) -> list[tuple[int, int]]:
        """All (row, column); (0, 0) is the anchor."""
        columns = len(self.rows[0]) + 1
        return [(r, c) for r in range(len(self.rows)) for c in range(columns)]

    def paths(self, anchor: int) -> set[tuple[int, ...]]:
        """Returns the paths that rows of the forward see after the anchor: the draft tree as a set."""
        window = {tuple(self.seen_by(row, column)) for row, column in self.entries()}
        guesses = {guess[:length] for guess in self.guesses(anchor) for length in range(1, self.n)}
        return (window | guesses) - {()}

    def step(self, text: list[int], target: Target) -> list[int]:
        """Decode once; returns what it emitted."""
        anchor, last = text[-1], len(self.rows) - 1
        outputs = [
            target(text + self.seen_by(last, column)) for column in range(len(self.rows[0]) + 1)
        ]
        emitted = self._verify(text, anchor, target)
        if len(self.rows) < self.n - 1:
            self.rows = [row[1:] for row in self.rows] + [outputs[1:]]
        else:
            level0 = [anchor, *self.rows[0]]
            for column, new in enumerate(outputs):
                above = [row[column] for row in self.rows[1:]]
                self.insert([level0[column], *above, new])
            rows = [*self.rows[1:], outputs]
            self.rows = [rows[0][1:], *rows[1:]]
        for end in range(len(text) + 1, len(text) + len(emitted) + 1):
            ngram = (text + emitted)[max(0, end - self.n) : end]
            if len(ngram) == self.n:
                self.insert(ngram)
        return emitted

    def _verify(self, text: list[int], anchor: int, target: Target) -> list[int]:
        """The longest prefix that any row's path shares with the target, and one token more."""
        paths = self.paths(anchor)
        emitted = [target(text)]
        while tuple(emitted) in paths:
            emitted.append(target(text + emitted))
        return emitted
