"""What the target thought would follow a context: merged distributions per n-gram (STAND).

An entry holds how often the target was seen at its context, and the running mean of what it said,
cut to the likeliest tokens. Contexts are packed windows (``drafters.packing``); those of different
lengths never have the same key. Keys of a text that is shorter than a context do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from drafters.generations import Generations
from drafters.packing import TOKEN_BITS, window_mask

NUM_TOKENS_KEPT = 10


class Entry(NamedTuple):
    """``num_visits`` distributions merged; tokens likeliest first."""

    num_visits: int
    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


class Level(NamedTuple):
    """A context length. ``smallest`` is the least key of a context that is complete."""

    num_tokens: int
    mask: int
    smallest: int


def levels(longest: int, shortest: int) -> list[Level]:
    """Longest first."""
    return [
        Level(n, window_mask(n), 1 << (TOKEN_BITS * (n - 1)))
        for n in range(longest, shortest - 1, -1)
    ]


def merged(entry: Entry, token_ids: Sequence[int], probs: Sequence[float]) -> Entry:
    """What ``num_visits`` distributions said before weighs ``num_visits / (num_visits + 1)``, the new
    one the rest."""
    count = entry.num_visits
    old, new = count / (count + 1), 1 / (count + 1)
    mass = {
        token_id: old * prob for token_id, prob in zip(entry.token_ids, entry.probs, strict=True)
    }
    for token_id, prob in zip(token_ids, probs, strict=True):
        mass[token_id] = mass.get(token_id, 0.0) + new * prob
    return _entry(count + 1, mass)


def _entry(num_visits: int, mass: Mapping[int, float]) -> Entry:
    best = sorted(mass.items(), key=itemgetter(1), reverse=True)[:NUM_TOKENS_KEPT]
    return Entry(num_visits, tuple([each[0] for each in best]), tuple([each[1] for each in best]))


class ProbTable:
    """Entries by context, at most ``max_contexts``; the least recently written are dropped.

    Memory: about 950 bytes per context once its ten tokens are in no other entry.
    """

    __slots__ = ("_entries",)

    def __init__(self, max_contexts: int) -> None:
        self._entries: Generations[Entry] = Generations(max_contexts)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: int) -> Entry | None:
        return self._entries.get(key)

    def learn(
        self,
        window: int,
        context_levels: Sequence[Level],
        token_ids: Sequence[int],
        probs: Sequence[float],
    ) -> None:
        """Merge one distribution of the target into every complete context that ends here."""
        if not token_ids:
            return
        entries = self._entries
        first = Entry(1, tuple(token_ids[:NUM_TOKENS_KEPT]), tuple(probs[:NUM_TOKENS_KEPT]))
        for _, mask, smallest in context_levels:
            key = window & mask
            if key >= smallest:
                entry = entries.get(key)
                if entry is not None:
                    entries.put(key, merged(entry, first.token_ids, first.probs))
                else:
                    entries.put(key, first)


class TextTable:
    """What followed each context in a text that the target was not asked about: counts.

    At most ``max_contexts`` contexts and ``_MAX_SUCCESSORS`` tokens each, the first seen dropped first.
    Most contexts are seen once: their token stands for itself, without a dictionary.
    """

    __slots__ = ("_entries",)
    _MAX_SUCCESSORS = 32

    def __init__(self, max_contexts: int) -> None:
        self._entries: Generations[int | dict[int, int]] = Generations(max_contexts)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: int) -> Entry | None:
        found = self._entries.get(key)
        if found is None:
            return None
        if isinstance(found, int):
            return Entry(1, (found,), (1.0,))
        total = sum(found.values())
        # Newest first among equals: sorting is stable.
        return _entry(total, {each: found[each] / total for each in reversed(found)})

    def learn(self, window: int, context_levels: Sequence[Level], token_id: int) -> None:
        """Count the token after every complete context that ends in ``window``."""
        entries = self._entries
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


def find(
    window: int, context_levels: Sequence[Level], table: ProbTable, text: TextTable
) -> tuple[int, bool, Entry] | None:
    """(tokens of context, whether only the text knew, entry) of the longest known ending of
    ``window``; at equal length the target's word counts and not the text's."""
    for num_tokens, mask, smallest in context_levels:
        key = window & mask
        if key >= smallest:
            entry = table.get(key)
            if entry is not None:
                return num_tokens, False, entry
            entry = text.get(key)
            if entry is not None:
                return num_tokens, True, entry
    return None
