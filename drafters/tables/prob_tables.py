"""Tables of what the target thought would follow a context: merged distributions per n-gram (STAND).

An entry holds how often the target was seen at its context, and the mean of what it said, cut to the
likeliest tokens. Contexts are packed windows (``drafters.contexts``); those of different lengths
never have the same key. Keys of a text that is shorter than a context do not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from drafters.contexts import Level, windows
from drafters.tables.sharing import Generations

NUM_TOKENS_KEPT = 10
MAX_WAITING = 1_024


class Entry(NamedTuple):
    """``num_visits`` distributions merged; tokens likeliest first."""

    num_visits: int
    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


def merged(entry: Entry, rows: Sequence[Entry]) -> Entry:
    """Returns the mean of all distributions, those merged in ``entry`` and one in each of ``rows``."""
    count, known, means = entry
    mass = {token_id: count * prob for token_id, prob in zip(known, means, strict=True)}
    for _, token_ids, probs in rows:
        for token_id, prob in zip(token_ids, probs, strict=True):
            mass[token_id] = mass.get(token_id, 0.0) + prob
    count += len(rows)
    return _entry(count, {token_id: sum_ / count for token_id, sum_ in mass.items()})


def _entry(num_visits: int, mass: Mapping[int, float]) -> Entry:
    best = sorted(mass.items(), key=itemgetter(1), reverse=True)[:NUM_TOKENS_KEPT]
    return Entry(num_visits, tuple([each[0] for each in best]), tuple([each[1] for each in best]))


class _Merging:
    """A context's entry, and what has to be merged into it before it is read."""

    __slots__ = ("_entry", "waiting")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self.waiting: list[Entry] = []

    def entry(self) -> Entry:
        if self.waiting:
            self._entry = merged(self._entry, self.waiting)
            self.waiting = []
        return self._entry


class ProbTable:
    """Entries by context, at most ``max_contexts``; the least recently written are dropped.

    Among the contexts that end at a token, the new ones and the longest known one learn the target's
    distribution. Shorter ones do not: they are read where no longer one is known, so they should count
    what came after contexts that were new (as in Kneser-Ney smoothing and in PPM's update exclusion).

    A distribution waits to be merged until its context is read, since most of them never are; at most
    ``MAX_WAITING`` wait in total.

    Memory: about 950 bytes per context once its ten tokens are in no other entry, and 600 per
    distribution that waits.
    """

    __slots__ = ("_waiting", "entries")

    def __init__(self, max_contexts: int) -> None:
        # Most contexts are met once: they hold what they were given, which all lengths share.
        self.entries: Generations[Entry | _Merging] = Generations(max_contexts)
        self._waiting: deque[_Merging] = deque()

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: int) -> Entry | None:
        found = self.entries.get(key)
        return found.entry() if isinstance(found, _Merging) else found

    def learn(
        self,
        window: int,
        context_levels: Sequence[Level],
        token_ids: Sequence[int],
        probs: Sequence[float],
    ) -> None:
        """Takes in one distribution of the target after ``window``: likeliest tokens first."""
        if not token_ids:
            return
        entries = self.entries
        row = Entry(1, tuple(token_ids[:NUM_TOKENS_KEPT]), tuple(probs[:NUM_TOKENS_KEPT]))
        for _, mask, smallest in context_levels:
            key = window & mask
            if key < smallest:
                continue
            known = entries.get(key)
            if known is None:
                entries.put(key, row)
                continue
            if not isinstance(known, _Merging):
                known = _Merging(known)
            entries.put(key, known)
            known.waiting.append(row)
            self._waiting.append(known)
            if len(self._waiting) > MAX_WAITING:
                self._waiting.popleft().entry()
            return


class TextTable:
    """Counts of what followed each context in a text that the target was not asked about.

    At most ``max_contexts`` contexts and ``_MAX_SUCCESSORS`` tokens each, the first seen dropped first.
    Most contexts are seen once: their token stands for itself, without a dictionary.
    """

    __slots__ = ("entries",)
    _MAX_SUCCESSORS = 32

    def __init__(self, max_contexts: int) -> None:
        self.entries: Generations[int | dict[int, int]] = Generations(max_contexts)

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, key: int) -> Entry | None:
        found = self.entries.get(key)
        if found is None:
            return None
        if isinstance(found, int):
            return Entry(1, (found,), (1.0,))
        total = sum(found.values())
        # Newest first among equals: sorting is stable.
        return _entry(total, {each: found[each] / total for each in reversed(found)})

    def learn(self, window: int, context_levels: Sequence[Level], token_id: int) -> None:
        """Counts the token after every complete context that ends in ``window``."""
        entries = self.entries
        for _, mask, smallest in context_levels:
            key = window & mask
            if key < smallest:
                continue
            found = entries.get(key)
            if found is None:
                entries.put(key, token_id)
                continue
            if isinstance(found, int):
                found = {found: 1}
            found[token_id] = found.pop(token_id, 0) + 1
            if len(found) > self._MAX_SUCCESSORS:
                del found[next(iter(found))]
            entries.put(key, found)

    def learn_text(
        self, window: int, context_levels: Sequence[Level], token_ids: Sequence[int]
    ) -> None:
        """Learns each of these tokens, the first one after ``window``. Level by level, which is
        several times as fast; where contexts may be dropped meanwhile, in the order of the text."""
        longest = max(level.mask for level in context_levels)
        rolled = [window, *windows(window, token_ids[:-1], longest)][: len(token_ids)]
        if not self.entries.has_room(len(token_ids) * len(context_levels)):
            for each, token_id in zip(rolled, token_ids, strict=True):
                self.learn(each, context_levels, token_id)
            return
        entries, most = self.entries.young, self._MAX_SUCCESSORS
        for _, mask, smallest in context_levels:
            for key, token_id in zip(map(mask.__and__, rolled), token_ids, strict=True):
                if key < smallest:
                    continue
                found = entries.get(key)
                if found is None:
                    entries[key] = token_id
                    continue
                if isinstance(found, int):
                    entries[key] = found = {found: 1}
                found[token_id] = found.pop(token_id, 0) + 1
                if len(found) > most:
                    del found[next(iter(found))]


def find(
    window: int, context_levels: Sequence[Level], table: ProbTable, text: TextTable
) -> tuple[int, bool, Entry] | None:
    """Returns (tokens of context, whether only the text knew, entry) of the longest known ending of
    ``window``; at equal length the target's word counts and not the text's."""
    for num_tokens, mask, smallest in context_levels:
        key = window & mask
        if key >= smallest:
            if (said := table.get(key)) is not None:
                return num_tokens, False, said
            if (followed := text.get(key)) is not None:
                return num_tokens, True, followed
    return None
