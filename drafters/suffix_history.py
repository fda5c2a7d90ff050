"""What a tenant's finished requests said: text to copy from, for that tenant only.

Owned by the ``suffix`` drafter.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from drafters.suffix_index import SuffixIndex

MAX_TENANTS = 64
MAX_HISTORY_TOKENS = 65_536
_INDEXED_PER_STEP = 256
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
    Texts wait until ``advance`` has the time to index them: a few hundred tokens per step, so that
    no step stalls. A text longer than a generation keeps its end.

    Memory: about 450 bytes per token, 30 MB for a tenant who filled ``max_tokens``.
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

    def advance(self, num_tokens: int = _INDEXED_PER_STEP) -> None:
        """Index up to ``num_tokens`` tokens of the texts that wait."""
        while num_tokens > 0 and self._waiting:
            token_ids = self._waiting.popleft()
            part, rest = token_ids[:num_tokens], token_ids[num_tokens:]
            self._append(part)
            num_tokens -= len(part)
            self._num_waiting -= len(part)
            if rest:
                self._waiting.appendleft(rest)

    def find(self, token_ids: Sequence[int], end: int, limit: int) -> list[tuple[list[int], int]]:
        """Up to ``limit`` places (text, position) that continue a context of ``token_ids[:end]``."""
        found: list[tuple[list[int], int]] = []
        for generation in (self._young, self._old):
            text = generation.token_ids
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
    """One ``TenantHistory`` per salt, at most ``max_tenants``; the one used longest ago goes."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._by_salt: OrderedDict[str, TenantHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_salt)

    def of(self, salt: str) -> TenantHistory:
        history = self._by_salt.get(salt)
        if history is None:
            history = self._by_salt[salt] = TenantHistory()
        self._by_salt.move_to_end(salt)
        while len(self._by_salt) > self._max_tenants:
            self._by_salt.popitem(last=False)
        return history

    def advance(self) -> None:
        for history in self._by_salt.values():
            history.advance()
