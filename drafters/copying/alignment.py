"""The copy under way: from which part of which text, where copies broke off and where they may go on.

Owned by the ``suffix`` drafter. An edit is a copy with interruptions: after the changed tokens it
goes on near where it broke off, so places there are tried first, and on little evidence, while
a place anywhere else has to show a longer match.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drafters.contexts import TOKEN_BITS, num_equal_before
from drafters.copying.suffix_index import MAX_MATCH_LENGTH, SuffixIndex, TenantHistory
from drafters.copying.weights import (
    AHEAD_TOKENS,
    BEHIND_TOKENS,
    EARLIER_TOKENS,
    FAR_AHEAD_TOKENS,
    NEAR_TOKENS,
    WEIGHTS,
    Place,
    unmatched_weight,
)

# Names of a module are found faster than an enumeration's.
_NEAR, _EARLIER, _PROMPT, _OUTPUT = Place.NEAR, Place.EARLIER, Place.PROMPT, Place.OUTPUT
TRUSTED_LENGTH = 6
SETTLED_LENGTH = 16
MAX_CANDIDATES = 16
FEW_CANDIDATES = 4
"""Enough to go on with a copy and for chains; trees need to see what is said next to it."""
_MAX_REMEMBERED = 4
_ENDS_APART = 16
_MAX_OCCURRENCES_AHEAD = 4
_MAX_AFTER_PATH = 8
_MAX_AHEAD_AFTER_PATH = 2
_MAX_ENDS_AFTER_PATH = 2
_INDEXED_BEFORE_BREAK = 8
_FOLLOWED_TOKENS = 16
"""A piece of text that begins outside of any copy is followed for so many of its last tokens: what is
copied now shows in those."""
MAX_INDEXED_TOKENS = 32_768
MAX_CORRECTIONS = 4_096


class Candidate(NamedTuple):
    """The continuation at ``text[position]``; ``match_length`` tokens before it agree."""

    text: Sequence[int]
    position: int
    match_length: int
    place: Place
    weight: float


class Corrections:
    """The mistakes of copies so far: where the original says this, the text has been saying that.

    An edit that renames something breaks a copy at every place of the name, each time in the same way.
    Per (previous token, token of the original): what came instead last time, how often a copy
    broke off there, and how often it did not after the first time.

    Memory: about 150 bytes each, the ``MAX_CORRECTIONS`` learnt last.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, previous: int, original: int, actual: int) -> None:
        """After ``previous``, the copy said ``original`` and the text ``actual``."""
        key = (previous << TOKEN_BITS) | original
        known = self._known.pop(key, None) or [actual, 0, 0]
        known[0] = actual
        known[1] += 1
        self._known[key] = known
        if len(self._known) > MAX_CORRECTIONS:
            del self._known[next(iter(self._known))]

    def confirm(self, previous: int, token_ids: Sequence[int]) -> None:
        """The copy said ``token_ids`` after ``previous``, and was right."""
        if not self._known:
            return
        for token_id in token_ids:
            known = self._known.get((previous << TOKEN_BITS) | token_id)
            if known is not None:
                known[2] += 1
            previous = token_id

    def find(self, previous: int, original: int, min_share: float) -> tuple[int, float] | None:
        """Returns what may come instead of ``original`` and how likely that is; None where it is less
        likely than ``min_share`` or nothing is known."""
        known = self._known.get((previous << TOKEN_BITS) | original)
        if known is None:
            return None
        token_id, num_broken, num_right = known
        share = num_broken / (num_broken + num_right + 1)
        return (token_id, share) if share >= min_share else None

    def any_in(self, previous: int, token_ids: Sequence[int], min_share: float) -> bool:
        """Whether ``find`` has something about a copy of ``token_ids`` after ``previous``."""
        if not self._known:
            return False
        for token_id in token_ids:
            key = (previous << TOKEN_BITS) | token_id
            if key in self._known and self.find(previous, token_id, min_share) is not None:
                return True
            previous = token_id
        return False


class Alignment:
    """One request's text, its index, and what is being copied.

    Text that is being copied from a place already indexed is not indexed again, but for the last
    tokens before the copy breaks off: its contexts lead to the original. So a step costs next to
    nothing while a long copy lasts.

    Memory: 8 bytes per token of text, and the index over at most ``MAX_INDEXED_TOKENS`` tokens;
    beyond that it starts again from the last half of them.
    """

    def __init__(self, prompt_token_ids: Sequence[int], history: TenantHistory | None) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_lost_tokens = 0
        """Tokens since a trusted copy broke off; 0 while there is one."""
        self.source: list[int] | None = None
        self.position = 0
        self.length = 0
        """``token_ids`` ends with the ``length`` tokens before ``source[position]``."""
        self.corrections = Corrections()
        self._num_prompt_tokens = len(self.token_ids)
        self._history = history
        self._index = SuffixIndex()
        self._first_indexed = 0
        self._trusted = False
        self._ends: list[tuple[list[int], int]] = []

    @property
    def has_copied(self) -> bool:
        """Whether there ever was a copy long enough to be trusted."""
        return bool(self._ends)

    @property
    def is_settled(self) -> bool:
        """Whether a copy is under way that is too long for anything else to be likelier."""
        return (
            self.source is not None
            and self.length >= SETTLED_LENGTH
            and self.position < len(self.source)
        )

    def read(self, token_ids: Sequence[int], num_tokens: int) -> int:
        """Indexes up to ``num_tokens`` more tokens of ``token_ids``, before anything of it is followed;
        how many it was."""
        text, index = self.token_ids, self._index
        text += token_ids[len(text) :]
        self._bound(len(text))
        start = index.num_indexed
        if start < len(text):
            index.extend(text, start, min(len(text), start + num_tokens))
        return index.num_indexed - start

    def extend(self, token_ids: Sequence[int]) -> None:
        """Follows what ``token_ids`` has beyond what is known."""
        text = self.token_ids
        position = len(text)
        if self._index.num_indexed < self._num_prompt_tokens:
            self.read(text, position)
        text.extend(token_ids[position:])
        end = len(text)
        if self.source is None and end - position > _FOLLOWED_TOKENS:
            # Nobody asks any more about what comes before.
            self.num_lost_tokens += end - _FOLLOWED_TOKENS - position
            position = end - _FOLLOWED_TOKENS
            self._bound(position)
            if position > self._index.num_indexed:
                self._index.extend(text, self._index.num_indexed, position)
        while position < end:
            if self.source is None and position > 0:
                self._take(self._candidates(position, FEW_CANDIDATES))
            position += self._follow(position, end)
        if not self.is_settled:
            self._index_up_to(end)

    def candidates(self, limit: int = MAX_CANDIDATES) -> list[Candidate]:
        """Returns places to copy from, ``limit`` of each index and those near to where copies broke off;
        takes the likeliest as its own where no trusted copy is under way."""
        if not self.token_ids:
            return []
        found = self._candidates(len(self.token_ids), limit)
        if not self._trusted:
            self._take(found)
        return found

    def current(self) -> Candidate:
        """The copy under way; there has to be one."""
        assert self.source is not None
        length = min(self.length, MAX_MATCH_LENGTH)
        weight = WEIGHTS[Place.CURRENT][length]
        return Candidate(self.source, self.position, length, Place.CURRENT, weight)

    def candidates_after(self, path: Sequence[int]) -> list[Candidate]:
        """Returns places in the text that may go on if ``path`` comes next, a few of the best."""
        text = self.token_ids
        ending = text[-MAX_MATCH_LENGTH:] + list(path)
        end = len(ending)
        places = dict.fromkeys(self._index.find(ending, end, _MAX_AFTER_PATH))
        for source, broke_off in self._ends[:_MAX_ENDS_AFTER_PATH]:
            if source is text:
                limit = min(len(text) - 1, broke_off + FAR_AHEAD_TOKENS)
                ahead = _after(text, path[-1], broke_off, limit, _MAX_AHEAD_AFTER_PATH)
                places.update(dict.fromkeys(ahead))
        found = []
        for position in places:
            length = num_equal_before(text, position, ending, end, MAX_MATCH_LENGTH)
            if length and position < len(text):
                place = self._place(text, position)
                found.append(Candidate(text, position, length, place, WEIGHTS[place][length]))
        return found

    def _follow(self, position: int, end: int) -> int:
        """Walks the copy along ``token_ids[position:end]``; how many tokens were dealt with."""
        source, start, text = self.source, self.position, self.token_ids
        num_tokens = end - position
        num_same = 0
        if source is not None:
            if source[start : start + num_tokens] == text[position:end]:
                num_same = num_tokens
            else:
                limit = min(num_tokens, len(source) - start)
                while num_same < limit and source[start + num_same] == text[position + num_same]:
                    num_same += 1
            if self._trusted and num_same:
                self.corrections.confirm(text[position - 1], text[position : position + num_same])
            self.position += num_same
            self.length += num_same
            self._remember()
        if num_same == num_tokens:
            self.num_lost_tokens = 0 if self._trusted else self.num_lost_tokens + num_same
            return num_same
        was_trusted = self._trusted
        end = position + num_same
        if source is not None and was_trusted and self.position < len(source):
            self.corrections.learn(text[end - 1], source[self.position], text[end])
        self.source, self.length, self._trusted = None, 0, False
        self.num_lost_tokens = 1 if was_trusted else self.num_lost_tokens + num_same + 1
        self._index_up_to(end + 1)
        return num_same + 1

    def _remember(self) -> None:
        """Keeps the end of a trusted copy, and of the last few before it that lie elsewhere."""
        if self.source is None or self.length < TRUSTED_LENGTH:
            return
        source, position = self.source, self.position
        if not self._trusted:
            self._trusted = True
            self._ends = [
                (text, end)
                for text, end in self._ends
                if text is not source or abs(end - position) > _ENDS_APART
            ][: _MAX_REMEMBERED - 1]
            self._ends.insert(0, (source, position))
        self._ends[0] = (source, position)

    def _take(self, found: Sequence[Candidate]) -> None:
        best = max(found, key=lambda candidate: candidate.weight, default=None)
        if best is None or best.match_length == 0:
            return
        self.source = best.text  # type: ignore[assignment]
        self.position = best.position
        self.length = best.match_length
        self._remember()
        if self._trusted:
            self.num_lost_tokens = 0

    def _candidates(self, end: int, limit: int) -> list[Candidate]:
        text = self.token_ids
        found: list[Candidate] = []
        if self.source is not None and self._trusted and self.position < len(self.source):
            found.append(self.current())
        own = dict.fromkeys(self._index.find(text, end, limit))
        elsewhere = self._around_ends(end, own)
        if found and found[0].text is text:
            own.pop(self.position, None)
        self._add(found, text, [position for position in own if position < end], end)
        if self._history is not None:
            elsewhere += self._history.find(text, end, limit)
        known = {(id(each.text), each.position) for each in found} if elsewhere else set()
        for other, position in elsewhere:
            place = (id(other), position)
            if place not in known:
                known.add(place)
                self._add(found, other, (position,), end)
        return found

    def _around_ends(self, end: int, own: dict[int, None]) -> list[tuple[list[int], int]]:
        """Returns places near where copies broke off: into ``own`` those in the text itself."""
        elsewhere: list[tuple[list[int], int]] = []
        last_token_id = self.token_ids[end - 1]
        for rank, (source, broke_off) in enumerate(self._ends):
            is_own = source is self.token_ids
            limit = min(end - 1 if is_own else len(source) - 1, broke_off + FAR_AHEAD_TOKENS)
            places = _after(source, last_token_id, broke_off, limit, _MAX_OCCURRENCES_AHEAD)
            num_unmatched = NEAR_TOKENS + 1 if rank == 0 else 1
            places += range(broke_off, min(broke_off + num_unmatched, limit + 1))
            if is_own:
                own.update(dict.fromkeys(places))
            else:
                elsewhere += [(source, position) for position in places]
        return elsewhere

    def _add(
        self, found: list[Candidate], text: list[int], positions: Iterable[int], end: int
    ) -> None:
        """Adds those places of a text to ``found`` that may be worth anything."""
        own, last = self.token_ids, self.token_ids[end - 1]
        place_of, make = self._place, tuple.__new__
        for position in positions:
            place = place_of(text, position)
            if position > 0 and text[position - 1] == last:
                length = num_equal_before(text, position, own, end, MAX_MATCH_LENGTH)
                weight = WEIGHTS[place][length]
            elif place is _NEAR or place is _EARLIER:
                length, weight = 0, unmatched_weight(self.num_lost_tokens)
            else:
                continue
            found.append(make(Candidate, (text, position, length, place, weight)))

    def _place(self, text: list[int], position: int) -> Place:
        ends = self._ends
        ahead = FAR_AHEAD_TOKENS + 1
        if ends and ends[0][0] is text:
            ahead = position - ends[0][1]
            if 0 <= ahead <= AHEAD_TOKENS:
                return _NEAR if ahead <= NEAR_TOKENS else Place.AHEAD
        for source, end in ends[1:]:
            if source is text and 0 <= position - end <= EARLIER_TOKENS:
                return _EARLIER
        if -BEHIND_TOKENS <= ahead <= FAR_AHEAD_TOKENS:
            return Place.BEHIND if ahead < 0 else Place.FAR_AHEAD
        if text is not self.token_ids:
            return Place.HISTORY
        return _PROMPT if position < self._num_prompt_tokens else _OUTPUT

    def _index_up_to(self, end: int) -> None:
        """Indexes the text's tokens before ``end``, but for the inner part of a long copy."""
        self._bound(end)
        start = self._index.num_indexed
        if start >= self._num_prompt_tokens and end - start > 2 * _INDEXED_BEFORE_BREAK:
            start = end - _INDEXED_BEFORE_BREAK
        if end > start:
            self._index.extend(self.token_ids, start, end)

    def _bound(self, end: int) -> None:
        """Starts again where the text before ``end`` is more than may be indexed."""
        if end - self._first_indexed > MAX_INDEXED_TOKENS:
            self._index.clear()
            self._index.num_indexed = self._first_indexed = end - MAX_INDEXED_TOKENS // 2


def _after(token_ids: list[int], token_id: int, start: int, end: int, max_places: int) -> list[int]:
    """Returns the first places in ``start + 1 .. end`` that follow a ``token_id``."""
    places: list[int] = []
    while len(places) < max_places and start < end:
        try:
            start = token_ids.index(token_id, start, end) + 1
        except ValueError:
            break
        places.append(start)
    return places
