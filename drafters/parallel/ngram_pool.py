"""The n-gram pool of Lookahead decoding: what may follow a token, newest last."""

from __future__ import annotations

from collections.abc import Sequence


class NgramPool:
    """Per first token, up to ``num_per_key`` tuples of the ``n - 1`` tokens that followed it.

    What is inserted again counts as new; the oldest goes first, of a key's tuples as of the keys.
    Looking up refreshes nothing. At most ``max_keys`` keys.
    """

    def __init__(self, n: int, num_per_key: int, max_keys: int) -> None:
        self.n = n
        self._num_per_key = num_per_key
        self._max_keys = max_keys
        self._ngrams: dict[int, list[tuple[int, ...]]] = {}

    def insert(self, key: int, continuation: tuple[int, ...]) -> None:
        """Add one n-gram: ``key`` and the ``n - 1`` tokens after it."""
        held = self._ngrams.pop(key, None)
        if held is None:
            if len(self._ngrams) >= self._max_keys:
                del self._ngrams[next(iter(self._ngrams))]
            held = []
        elif continuation in held:
            held.remove(continuation)
        elif len(held) >= self._num_per_key:
            del held[0]
        held.append(continuation)
        self._ngrams[key] = held  # last among the keys

    def insert_text(self, token_ids: Sequence[int]) -> None:
        """Add every n-gram of a text, first to last."""
        for start in range(len(token_ids) - self.n + 1):
            end = start + self.n
            self.insert(token_ids[start], tuple(token_ids[start + 1 : end]))

    def newest(self, key: int, num: int) -> list[tuple[int, ...]]:
        """Up to ``num`` continuations of ``key``, the newest first."""
        held = self._ngrams.get(key)
        return held[: -num - 1 : -1] if held else []

    def size(self) -> int:
        """N-grams held."""
        return sum(map(len, self._ngrams.values()))

    def num_keys(self) -> int:
        return len(self._ngrams)
