"""The texts of a tenant's finished requests, to be copied from for that tenant only.

Owned by the ``suffix`` drafter.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from drafters.copying.suffix_index import SuffixIndex

MAX_TENANTS = 64
MAX_HISTORY_TOKENS = 65_536
MAX_TOKENS_OF_ALL = 524_288
_INDEXED_PER_STEP = 96
SEPARATOR = -1
"""Stands after every text, so that nothing is copied across; no context ends with it."""


class _Generation:
    """Texts one after the other, and the index over them."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.index = SuffixIndex()

    def clear(self) -> None:
        self.token_ids.clear()
        self.index.clear()


class TenantHistory:
    """Finished requests' texts, first in, first out, in two generations of ``max_tokens / 2``.

    The young generation fills; when it is full it becomes the old one, whose texts are forgotten.
    Texts wait until ``advance`` has the time to index them, a little per step, so that no step
    stalls. A text longer than a generation keeps its end.

    Memory: about 150 bytes per token of code, 310 where nothing repeats: 10 to 20 MB for a tenant who
    filled ``max_tokens``.
    """

    def __init__(self, max_tokens: int = MAX_HISTORY_TOKENS) -> None:
        self._generation_tokens = max(2, max_tokens // 2)
        self._young, self._old = _Generation(), _Generation()
        self._waiting: deque[Sequence[int]] = deque()
        self._num_waiting = 0

    def __len__(self) -> int:
        """Tokens held, those that wait included."""
        return len(self._young.token_ids) + len(self._old.token_ids) + self._num_waiting

    def add(self, token_ids: Sequence[int]) -> None:
        """Take in a finished request's text; texts that waited longest make room."""
        kept = [*token_ids[1 - self._generation_tokens :], SEPARATOR]
        self._waiting.append(kept)
        self._num_waiting += len(kept)
        while self._num_waiting > self._generation_tokens:
            self._num_waiting -= len(self._waiting.popleft())

    def advance(self, num_tokens: int) -> int:
        """Indexes up to ``num_tokens`` tokens of the texts that wait, and returns how many it was."""
        left = num_tokens
        while left > 0 and self._waiting:
            token_ids = self._waiting.popleft()
            part, rest = token_ids[:left], token_ids[left:]
            self._append(part)
            left -= len(part)
            self._num_waiting -= len(part)
            if rest:
                self._waiting.appendleft(rest)
        return num_tokens - left

    def find(self, token_ids: Sequence[int], end: int, limit: int) -> list[tuple[list[int], int]]:
        """Up to ``limit`` places (text, position) that continue a context of ``token_ids[:end]``."""
        found: list[tuple[list[int], int]] = []
        for generation in (self._young, self._old):
            text = generation.token_ids
            if not text:
                continue
            positions = generation.index.find(token_ids, end, limit - len(found))
            found += [
                (text, position)
                for position in positions
                if position < len(text) and text[position] != SEPARATOR
            ]
        return found[:limit]

    def _append(self, token_ids: Sequence[int]) -> None:
        if len(self._young.token_ids) + len(token_ids) > self._generation_tokens:
            self._old.clear()  # who copies from it finds it empty
            self._young, self._old = _Generation(), self._young
        text = self._young.token_ids
        start = len(text)
        text.extend(token_ids)
        self._young.index.extend(text, start, len(text))


class Histories:
    """One ``TenantHistory`` per cache_salt: at most ``max_tenants``, and ``max_tokens`` in all (80 to
    160 MB); the tenants used longest ago are forgotten."""

    def __init__(self, max_tenants: int = MAX_TENANTS, max_tokens: int = MAX_TOKENS_OF_ALL) -> None:
        self._max_tenants = max_tenants
        self._max_tokens = max_tokens
        self._by_salt: OrderedDict[str, TenantHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_salt)

    def of(self, cache_salt: str) -> TenantHistory:
        """The tenant's history, begun if there is none; makes room for it."""
        history = self._by_salt.get(cache_salt)
        if history is None:
            history = self._by_salt[cache_salt] = TenantHistory()
        self._by_salt.move_to_end(cache_salt)
        while len(self._by_salt) > 1 and self._is_full():
            self._by_salt.popitem(last=False)
        return history

    def advance(self) -> None:
        """Index a little of what waits."""
        left = _INDEXED_PER_STEP
        for history in self._by_salt.values():
            left -= history.advance(left)

    def _is_full(self) -> bool:
        num_tokens = sum(map(len, self._by_salt.values()))
        return len(self._by_salt) > self._max_tenants or num_tokens > self._max_tokens
