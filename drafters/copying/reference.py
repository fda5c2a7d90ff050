"""Where in a reference text does another text stand that mostly repeats it? Kept up token by token.

The reference is what a client predicts the output to be (OpenAI's Predicted Outputs). In step with
it, the next token is the reference's next one. After a token that differs, the text may have
replaced, inserted or left out something: what its last tokens say of the place is held against
how far from the break one would expect to be, and where they say nothing yet, replacement and
insertion remain as guesses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_LONGEST_MATCH = 8
_NEARBY = 16
"""How far from where it is expected a single equal token is believed, in tokens."""
_MOST_PER_SIDE = 4
_SOLID_RUN = 4
"""Equal tokens in a row after which a place is taken for certain and the break forgotten."""


class Place(NamedTuple):
    """``position``: of the reference's token that should come next. ``run``: how many equal tokens
    lead there."""

    position: int
    run: int


class ReferenceAligner:
    """Follows a growing text along a reference. Memory: the reference and one index entry per token."""

    def __init__(self, reference_token_ids: Sequence[int]) -> None:
        self.token_ids = list(reference_token_ids)
        self._ends: dict[tuple[int, int], list[int]] = {}
        for end in range(1, len(self.token_ids)):
            self._ends.setdefault((self.token_ids[end - 1], self.token_ids[end]), []).append(end)
        self._place = Place(0, 0)
        self._break: tuple[int, int] | None = None
        """Where the texts parted: position in the reference, tokens of the text by then."""
        self._tail: list[int] = []
        self._num_seen = 0

    def append(self, token_id: int) -> None:
        """The text's next token. Takes constant time where it is in step."""
        self._tail = [*self._tail[1 - _LONGEST_MATCH :], token_id]
        self._num_seen += 1
        position, run = self._place
        if position < len(self.token_ids) and self.token_ids[position] == token_id:
            self._place = Place(position + 1, run + 1)
            if run + 1 >= _SOLID_RUN:
                self._break = None
            return
        if self._break is None:
            self._break = (position, self._num_seen - 1)
        self._place = next(self._guesses())

    def places(self, count: int) -> list[Place]:
        """Up to ``count`` places where the text may stand, likeliest first, with different next
        tokens; none at the end of the reference."""
        found: dict[int, Place] = {}
        guesses = self._guesses() if self._break is not None else iter(())
        for place in (self._place, *guesses) if count > 1 else (self._place,):
            if place.position < len(self.token_ids):
                found.setdefault(self.token_ids[place.position], place)
                if len(found) == count:
                    break
        return list(found.values())

    def _guesses(self) -> Iterator[Place]:
        """Places after a break: longest match first, then the nearest; always at least one."""
        assert self._break is not None
        parted, at = self._break
        expected = parted + self._num_seen - at
        matches = [*self._matches(expected)]
        matches.sort(key=lambda place: (-min(place.run, 4), abs(place.position - expected)))
        yield from matches
        yield Place(expected, 0)  # something of the same length was replaced
        yield Place(parted, 0)  # something was inserted

    def _matches(self, expected: int) -> Iterator[Place]:
        """Places that the text's last tokens lead to."""
        last = self._tail[-1]
        low, high = max(0, expected - 1 - _NEARBY), expected + _NEARBY
        for end in range(low, min(high, len(self.token_ids))):
            if self.token_ids[end] == last:
                yield Place(end + 1, self._run_to(end))
        if len(self._tail) > 1:
            ends = self._ends.get((self._tail[-2], last), [])
            middle = bisect_left(ends, expected - 1)
            for end in ends[max(0, middle - _MOST_PER_SIDE) : middle + _MOST_PER_SIDE]:
                if not low <= end < high:
                    yield Place(end + 1, self._run_to(end))

    def _run_to(self, end: int) -> int:
        """How many tokens up to the reference's ``end`` equal the text's last ones."""
        length = 0
        while length < min(len(self._tail), end + 1):
            if self.token_ids[end - length] != self._tail[-1 - length]:
                break
            length += 1
        return length
