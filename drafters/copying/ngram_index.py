"""Where in a request's own text did its last tokens occur before? Kept up to date token by token.

Owned by the ``ngram`` drafter. Holds positions, never tokens: the text is the request's live list,
passed in at each call.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.contexts import TOKEN_BITS, window_mask

MAX_INDEXED_TOKENS = 32_768
MAX_MATCH_LENGTH = 32
_BULK_MIN_TOKENS = 64


class NgramIndex:
    """Newest occurrence of every n-gram of ``ngram_min``..``ngram_max`` tokens of a growing text.

    ``extend`` makes one dictionary lookup and one store per order and token, whatever the length of
    the text. The walk that stores the grams ending at a token is also the search for that token's
    match, because a gram's newest earlier occurrence is what the store overwrites. ``match`` is the
    last token of the longest earlier gram that also ends the text, the most recent one where there
    are several; -1: none. ``links`` chains the occurrences of the shortest order, newest first.

    Memory: at most ``MAX_INDEXED_TOKENS`` tokens are indexed (about 130 bytes per token and order);
    beyond that the index starts again from the last half of them, so the oldest text is forgotten.
    """

    __slots__ = ("_base", "_levels", "_links", "_mask", "_window", "match", "num_tokens")

    def __init__(self, ngram_min: int, ngram_max: int) -> None:
        orders = range(ngram_min, ngram_max + 1)
        self._levels: list[tuple[int, dict[int, int]]] = [(window_mask(n), {}) for n in orders]
        self._mask = window_mask(ngram_max)
        self._window = 0
        self._base = 0
        self._links: list[int] = []
        self.match = -1
        self.num_tokens = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index what ``token_ids`` has beyond ``num_tokens``, and find the match of its end."""
        num_tokens = len(token_ids)
        if num_tokens - self._base > MAX_INDEXED_TOKENS:
            self._restart(num_tokens - MAX_INDEXED_TOKENS // 2)
        if num_tokens - self.num_tokens > _BULK_MIN_TOKENS:
            self._extend_in_bulk(token_ids[self.num_tokens : num_tokens - 1])
        for position in range(self.num_tokens, num_tokens):
            self._append(token_ids[position])

    def size(self) -> int:
        """Entries held, links included."""
        return len(self._links) + sum(len(newest) for _, newest in self._levels)

    def earlier(self, window: int, steps: int) -> list[int]:
        """Up to ``steps`` positions where the shortest gram of ``window`` ends, newest first.

        Only positions that have a next token: the end of the text is left out.
        """
        mask, newest = self._levels[0]
        position = newest.get(window & mask, -1)
        found: list[int] = []
        while position >= 0 and len(found) < steps:
            if position != self.num_tokens - 1:
                found.append(position)
            position = self._links[position - self._base]
        return found

    @property
    def window(self) -> int:
        """The last ``ngram_max`` tokens, packed (see ``drafters.contexts``)."""
        return self._window

    def _append(self, token_id: int) -> None:
        window = self._window = ((self._window << TOKEN_BITS) | (token_id + 1)) & self._mask
        position = self.num_tokens
        link = match = -1
        # Orders ascend, and a gram that occurred implies its shorter endings did: the last hit is
        # the longest. Grams that reach before the text's start pack zeros and so match nothing.
        for mask, newest in self._levels:
            key = window & mask
            previous = newest.get(key)
            newest[key] = position
            if previous is not None:
                match = previous
                if link < 0:
                    link = previous
        self._links.append(link)
        self.match = match
        self.num_tokens = position + 1

    def _extend_in_bulk(self, token_ids: Sequence[int]) -> None:
        """As ``_append`` for each, ``match`` aside, with the stores in C: a prompt opens faster."""
        windows: list[int] = []
        window, mask = self._window, self._mask
        for token_id in token_ids:
            window = ((window << TOKEN_BITS) | (token_id + 1)) & mask
            windows.append(window)
        positions = range(self.num_tokens, self.num_tokens + len(windows))
        shortest_mask, shortest = self._levels[0]
        for position, window in zip(positions, windows, strict=True):
            key = window & shortest_mask
            self._links.append(shortest.get(key, -1))
            shortest[key] = position
        for level_mask, newest in self._levels[1:]:
            newest.update(zip(map(level_mask.__and__, windows), positions, strict=True))
        self._window = windows[-1]
        self.num_tokens = positions.stop

    def _restart(self, start: int) -> None:
        for _, newest in self._levels:
            newest.clear()
        self._links.clear()
        self._base = self.num_tokens = start
        self._window = 0
        self.match = -1


def common_suffix_length(
    token_ids: Sequence[int], end: int, tail_token_ids: Sequence[int], limit: int = MAX_MATCH_LENGTH
) -> int:
    """How many tokens ending at position ``end`` equal the last ones of ``tail_token_ids``."""
    limit = min(limit, end + 1, len(tail_token_ids))
    length = 0
    while length < limit and token_ids[end - length] == tail_token_ids[-1 - length]:
        length += 1
    return length
