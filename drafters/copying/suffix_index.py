"""Earlier occurrences of a text's last tokens, in the text and in the same tenant's finished requests.

Owned by the ``suffix`` drafter. Contexts are packed windows (see ``drafters.contexts``), so one
dictionary holds all lengths.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from drafters.contexts import levels, pack, windows

CONTEXT_LENGTHS = (1, 2, 4)
MAX_OCCURRENCES = 8
MAX_MATCH_LENGTH = 48
MAX_TENANTS = 64
MAX_HISTORY_TOKENS = 65_536
MAX_TOKENS_OF_ALL = 524_288
_INDEXED_PER_STEP = 96
SEPARATOR = -1
"""Stands after every text, so that nothing is copied across; no context ends with it."""

_LEVELS = levels(CONTEXT_LENGTHS)
_LONGEST = _LEVELS[-1]


class SuffixIndex:
    """Newest occurrences of the contexts of a text that grows, or of the parts of it that are told.

    Three dictionary operations per indexed token. An occurrence is the position after the context,
    where its continuation stands. A context keeps its ``MAX_OCCURRENCES`` newest ones (up to twice
    as many before the older half is dropped).

    Memory: about 150 bytes per token of code, 310 where nothing repeats.
    """

    __slots__ = ("_occurrences", "num_indexed")

    def __init__(self) -> None:
        self._occurrences: dict[int, int | list[int]] = {}
        self.num_indexed = 0

    def __len__(self) -> int:
        """Returns how many contexts are held."""
        return len(self._occurrences)

    def clear(self) -> None:
        self._occurrences.clear()
        self.num_indexed = 0

    def extend(self, token_ids: Sequence[int], start: int, end: int) -> None:
        """Indexes the contexts that end at the tokens ``start`` .. ``end - 1`` of the text."""
        occurrences = self._occurrences
        context_levels = _LEVELS
        rolled = windows(_window(token_ids, start), token_ids[start:end], _LONGEST.mask)
        for after, window in enumerate(rolled, start + 1):
            for _, mask, smallest in context_levels:
                key = window & mask
                if key < smallest:
                    break  # the text has fewer tokens than the context
                known = occurrences.setdefault(key, after)
                if known is after:  # it is new
                    continue
                if isinstance(known, int):
                    occurrences[key] = [known, after]
                else:
                    known.append(after)
                    if len(known) > 2 * MAX_OCCURRENCES:
                        del known[:-MAX_OCCURRENCES]
        self.num_indexed = end

    def find(self, token_ids: Sequence[int], end: int, limit: int) -> list[int]:
        """Returns up to ``limit`` positions that follow an occurrence of a context of
        ``token_ids[:end]``, those of the longest context first, newest first.

        ``token_ids`` need not be the indexed text. Where it is, ``end`` itself may be among them.
        """
        window = _window(token_ids, end)
        found: dict[int, None] = {}
        for _, mask, smallest in reversed(_LEVELS):
            key = window & mask
            known = self._occurrences.get(key) if key >= smallest else None
            if known is None:
                continue
            if isinstance(known, int):
                found[known] = None
            else:
                found.update(dict.fromkeys(known[: -MAX_OCCURRENCES - 1 : -1]))
            if len(found) >= limit:
                return list(found)[:limit]
        return list(found)


def _window(token_ids: Sequence[int], end: int) -> int:
    return pack(token_ids[max(0, end - _LONGEST.num_tokens) : end])


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
        """Returns how many tokens are held, those that wait included."""
        return len(self._young.token_ids) + len(self._old.token_ids) + self._num_waiting

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's text; texts that waited longest make room."""
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
        """Returns up to ``limit`` (text, position) that continue a context of ``token_ids[:end]``."""
        found: list[tuple[list[int], int]] = []
        for generation in (self._young, self._old):
            text = generation.token_ids
            if not text:
                continue
            for position in generation.index.find(token_ids, end, limit - len(found)):
                if position < len(text) and text[position] != SEPARATOR:
                    found.append((text, position))
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
        """Returns the tenant's history, begun if there is none; makes room for it."""
        history = self._by_salt.get(cache_salt)
        if history is None:
            history = self._by_salt[cache_salt] = TenantHistory()
        self._by_salt.move_to_end(cache_salt)
        while len(self._by_salt) > 1 and self._is_full():
            self._by_salt.popitem(last=False)
        return history

    def advance(self) -> None:
        """Indexes a little of what waits."""
        left = _INDEXED_PER_STEP
        for history in self._by_salt.values():
            left -= history.advance(left)

    def _is_full(self) -> bool:
        num_tokens = sum(map(len, self._by_salt.values()))
        return len(self._by_salt) > self._max_tenants or num_tokens > self._max_tokens
