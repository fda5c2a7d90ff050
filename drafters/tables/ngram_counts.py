"""How often did which token follow which context? Counts with back-off, bounded, most recent kept.

Owned by the ``nasd`` drafters. Contexts are packed windows (see ``drafters.contexts``).
"""

from __future__ import annotations

from drafters.contexts import TOKEN_BITS, window_mask

MAX_CONTINUATIONS = 16

Continuation = tuple[int, int, float]
"""Token id, tokens of context it was counted under (0: unknown), share of that context's counts."""

_UNKNOWN: Continuation = (0, 0, 0.0)


class NgramCounts:
    """Counts of (context, next token) for the given context lengths.

    Shares are ``count / (total + 1)``: a context seen once is believed by half. Within a context
    the highest count wins, then the token counted last.

    Memory: two generations of at most ``max_contexts / 2`` contexts, all lengths together. Counting
    moves a context to the young generation; when that is full it becomes the old one, and what
    the old one still held, contexts not counted for a whole generation, is dropped. A context keeps
    ``MAX_CONTINUATIONS`` tokens; the one counted least, then longest ago, makes room.
    """

    __slots__ = ("_generation_size", "_levels", "_old", "_young")

    def __init__(self, context_lengths: tuple[int, ...], max_contexts: int) -> None:
        """``context_lengths``: longest first."""
        # A key is smaller than the last number where the text has fewer tokens than the context.
        self._levels = [(n, window_mask(n), 1 << (TOKEN_BITS * (n - 1))) for n in context_lengths]
        self._generation_size = max(1, max_contexts // 2)
        # Insertion order inside a context is the order of counting: the last one is the newest.
        self._young: dict[int, dict[int, int]] = {}
        self._old: dict[int, dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, window: int, token_id: int) -> None:
        """Count ``token_id`` after every known length of ``window``'s ending."""
        young = self._young
        for _, mask, smallest in self._levels:
            key = window & mask
            if key < smallest:
                continue
            counts = young.get(key)
            if counts is None:
                counts = self._rejuvenate(key)
                young = self._young
            counts[token_id] = counts.pop(token_id, 0) + 1
            if len(counts) > MAX_CONTINUATIONS:
                _drop_least(counts)

    def best(self, window: int) -> Continuation:
        """The likeliest continuation under the longest known context."""
        young, old = self._young, self._old
        for length, mask, smallest in self._levels:
            key = window & mask
            counts = young.get(key) or old.get(key)
            if counts is None or key < smallest:
                continue
            if len(counts) == 1:
                ((token_id, count),) = counts.items()
                return token_id, length, count / (count + 1)
            token_id = max(reversed(counts), key=counts.__getitem__)
            return token_id, length, counts[token_id] / (sum(counts.values()) + 1)
        return _UNKNOWN

    def likeliest(self, window: int, num_tokens: int) -> list[Continuation]:
        """Up to ``num_tokens`` distinct continuations, likeliest first; the first is ``best``'s.

        Those of the longest known context first; what their shares leave over is shared out in the
        same way under the shorter ones.
        """
        found: list[Continuation] = []
        seen: set[int] = set()
        left = 1.0
        for length, mask, smallest in self._levels:
            key = window & mask
            counts = self._young.get(key) or self._old.get(key)
            if counts is None or key < smallest:
                continue
            scale = left / (sum(counts.values()) + 1)
            newest_first = list(counts)[::-1]
            for token_id in sorted(newest_first, key=counts.__getitem__, reverse=True):
                if token_id not in seen:
                    seen.add(token_id)
                    found.append((token_id, length, counts[token_id] * scale))
                    if len(found) == num_tokens:
                        return found
            left = scale
        return found

    def _rejuvenate(self, key: int) -> dict[int, int]:
        """The context's counts, or new ones, now in the young generation."""
        if len(self._young) >= self._generation_size:
            self._old = self._young
            self._young = {}
        counts = self._young[key] = self._old.pop(key, {})
        return counts


def _drop_least(counts: dict[int, int]) -> None:
    """The newest token is exempt: otherwise a full context could never learn another one."""
    newest = next(reversed(counts))
    del counts[min((token_id for token_id in counts if token_id != newest), key=counts.__getitem__)]
