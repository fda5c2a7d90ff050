"""What the target thought would follow a context: merged distributions per n-gram (STAND).

An entry holds how often the target was seen at its context, and the running mean of what it said,
cut to the likeliest tokens. Contexts are packed windows (``drafters.packing``); those of different
lengths never have the same key. Keys of a text that is shorter than a context do not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

from drafters.generations import Generations
from drafters.packing import TOKEN_BITS, window_mask

NUM_TOKENS_KEPT = 10


class Entry(NamedTuple):
    """``num_visits`` distributions of the target merged; tokens likeliest first.

    Negative: the target was not asked here yet, and the entry counts ``-num_visits`` tokens of a
    prompt. The target's first word replaces them.
    """

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


def merged(entry: Entry, token_ids: Sequence[int], probs: Sequence[float], count: int) -> Entry:
    """``count`` distributions seen before weigh ``count / (count + 1)``, the new one the rest."""
    old, new = count / (count + 1), 1 / (count + 1)
    mass = {
        token_id: old * prob for token_id, prob in zip(entry.token_ids, entry.probs, strict=True)
    }
    for token_id, prob in zip(token_ids, probs, strict=True):
        mass[token_id] = mass.get(token_id, 0.0) + new * prob
    best = sorted(mass.items(), key=itemgetter(1), reverse=True)[:NUM_TOKENS_KEPT]
    visits = count + 1 if entry.num_visits > 0 else -count - 1
    return Entry(visits, *zip(*best, strict=True))


class ProbTable:
    """Entries by context, at most ``max_contexts``; the least recently written are dropped.

    Memory: about 1.1 kB per context once it holds ten tokens that no other entry holds.
    """

    __slots__ = ("_entries",)

    def __init__(self, max_contexts: int) -> None:
        self._entries: Generations[Entry] = Generations(max_contexts)

    def __len__(self) -> int:
        return len(self._entries)

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
            if key < smallest:
                continue
            entry = entries.get(key)
            if entry is None or entry.num_visits < 0:
                entries.put(key, first)
            else:
                entries.put(key, merged(entry, first.token_ids, first.probs, entry.num_visits))

    def learn_text(self, window: int, context_levels: Sequence[Level], token_id: int) -> None:
        """Count a token of a prompt, where the target has not spoken yet."""
        entries = self._entries
        first = Entry(-1, (token_id,), (1.0,))
        for _, mask, smallest in context_levels:
            key = window & mask
            if key < smallest:
                continue
            entry = entries.get(key)
            if entry is None:
                entries.put(key, first)
            elif entry.num_visits < 0:
                entries.put(key, merged(entry, first.token_ids, first.probs, -entry.num_visits))

    def find(self, window: int, context_levels: Sequence[Level]) -> tuple[int, Entry] | None:
        """(tokens of context, entry) of the longest known ending of ``window``."""
        get = self._entries.get
        for num_tokens, mask, smallest in context_levels:
            key = window & mask
            if key >= smallest:
                entry = get(key)
                if entry is not None:
                    return num_tokens, entry
        return None
