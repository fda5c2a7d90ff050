"""Earlier occurrences of a text's last tokens, in the text and in the same tenant's finished requests.

Owned by the ``suffix`` drafter. The loops over tokens are compiled (``index_loops.py``).
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from itertools import count

from compiled.records import Memory, address_of
from drafters.copying import index_loops
from drafters.copying.index_loops import NUM_LEVELS
from drafters.copying.records import Text

MAX_TENANTS = 64
MAX_HISTORY_TOKENS = 65_536
MAX_TOKENS_OF_ALL = 524_288
_INDEXED_PER_STEP = 96
SEPARATOR = -1
"""Stands after every text, so that nothing is copied across; no context has one."""
_SMALLEST_TABLE = 256
_REMEMBERED_BEGINNINGS = 64
_TRIED_BEGINNINGS = 4
_LONGEST_BEGINNING = 4
_serials = count(1)


class IndexedText:
    """A growing text, and the places after its contexts, or after those of the indexed parts.

    ``serial``: its number; automatic ones are all different, and more than 0. ``told``: its record for
    compiled loops.

    Memory: 16 bytes per token, and 8 to 32 bytes per different context of 1, 2 or 4 tokens that is
    indexed: some 40 bytes per token of code in all, up to 112 where nothing repeats.
    """

    __slots__ = ("_links", "_table", "_tokens", "told")

    def __init__(self, serial: int | None = None) -> None:
        self.told = Memory(Text)
        self.told["serial"] = next(_serials) if serial is None else serial
        self._tokens = array("i")
        self._links = array("i", bytes(4 * NUM_LEVELS))
        self._table = array("i", bytes(4 * _SMALLEST_TABLE))
        self._tell()

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> list[int]:
        """A copy of all that was appended."""
        return self._tokens.tolist()

    @property
    def num_indexed(self) -> int:
        """The first token that is not indexed; of those before it some may be left out."""
        return self.told["num_indexed"]

    def append(self, token_ids: Sequence[int]) -> None:
        """Makes room for these tokens, too, and for their contexts. They are part of the text once a
        loop has taken them in: ``index`` here, another for a request's own text."""
        self._tokens.extend(token_ids)
        self._links.frombytes(bytes(4 * NUM_LEVELS * len(token_ids)))
        self._tell()
        num_contexts = NUM_LEVELS * (len(self._tokens) - self.told["num_indexed"])
        if 2 * (self.told["num_contexts"] + num_contexts) > len(self._table):
            self._enlarge(2 * (self.told["num_contexts"] + num_contexts))

    def index(self, end: int) -> None:
        """Indexes the tokens before ``end`` that are not."""
        self.told["num_tokens"] = len(self._tokens)
        index_loops.index_text.compile()(self.told.address, self.told["num_indexed"], end)

    def forget(self, start: int) -> None:
        """Empties the index; the first token that is indexed from now on is ``start``."""
        index_loops.forget_index.compile()(self.told.address, start)

    def find(self, token_ids: Sequence[int], most: int, limit: int) -> list[int]:
        """Returns up to ``limit`` places that follow an occurrence of the last 4, 2 or 1 of these tokens,
        those of the longest context first, newest first, ``most`` of each.

        Where this is the text itself, its end may be among them.
        """
        ending, places = array("i", token_ids), array("i", bytes(4 * limit))
        find = index_loops.find_places.compile()
        found = find(
            self.told.address, address_of(ending), len(ending), most, limit, address_of(places)
        )
        return places[:found].tolist()

    def _enlarge(self, least: int) -> None:
        size = len(self._table)
        while size < least:
            size *= 2
        table = array("i", bytes(4 * size))
        index_loops.move_index.compile()(self.told.address, address_of(table), size)
        self._table = table
        self._tell()

    def _tell(self) -> None:
        told = self.told
        told["tokens"] = address_of(self._tokens)
        told["links"] = address_of(self._links)
        told["table"] = address_of(self._table)
        told["table_size"] = len(self._table)


class TenantHistory:
    """Finished requests' texts, first in, first out, in two generations of ``max_tokens / 2``.

    The young generation fills; when it is full it becomes the old one, whose texts are forgotten.
    Texts wait until ``advance`` has the time to index them, a little per step, so that no step
    stalls. A text longer than a generation keeps its end.

    Memory: that of two ``IndexedText``, 2.6 to 7 MB for a tenant who filled ``max_tokens``.
    """

    def __init__(self, max_tokens: int = MAX_HISTORY_TOKENS) -> None:
        self._generation_tokens = max(2, max_tokens // 2)
        self.young, self.old = IndexedText(), IndexedText()
        self._waiting: deque[Sequence[int]] = deque()
        self._num_waiting = 0
        self._beginnings: Counter[tuple[int, ...]] = Counter()

    def __len__(self) -> int:
        """Returns the number of tokens held, including waiting ones."""
        return len(self.young) + len(self.old) + self._num_waiting

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes in a finished request's text; texts that waited longest make room."""
        kept = array("i", [*token_ids[1 - self._generation_tokens :], SEPARATOR])
        self._waiting.append(kept)
        self._num_waiting += len(kept)
        while self._num_waiting > self._generation_tokens:
            self._num_waiting -= len(self._waiting.popleft())

    def note_beginning(self, token_ids: Sequence[int], position: int) -> None:
        """Learns from a finished request: its output began as a copy of what stands at ``position`` in
        its prompt, or, where that is 0 or beyond it, as none of that."""
        if position > len(token_ids):  # a copy of what it had written itself
            position = 0
        self._beginnings[_leading_there(token_ids, position)] += 1
        if self._beginnings.total() > _REMEMBERED_BEGINNINGS:
            kept = {each: count // 2 for each, count in self._beginnings.items() if count > 1}
            self._beginnings = Counter(kept)

    def beginning(self, token_ids: Sequence[int]) -> int:
        """Returns the place in a prompt where the output is likely to begin to copy: after the same
        tokens as most outputs did. 0: most did not begin as a copy, or it is unknown."""
        for context, _ in self._beginnings.most_common(_TRIED_BEGINNINGS):
            found = _first_after(token_ids, context) if context else 0
            if found or not context:
                return found
        return 0

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

    def _append(self, token_ids: Sequence[int]) -> None:
        if len(self.young) + len(token_ids) > self._generation_tokens:
            self.young, self.old = IndexedText(), self.young
        self.young.append(token_ids)
        self.young.index(len(self.young))


def _first_after(token_ids: Sequence[int], context: Sequence[int]) -> int:
    """Returns the first place after these tokens; 0: there is none."""
    text, wanted = array("i", token_ids).tobytes(), array("i", context).tobytes()
    size = len(wanted) // len(context)
    found = text.find(wanted)
    while found > 0 and found % size:  # it begins within a token
        found = text.find(wanted, found + 1)
    return found // size + len(context) if found >= 0 else 0


def _leading_there(token_ids: Sequence[int], position: int) -> tuple[int, ...]:
    """Returns the fewest tokens before a place that stand nowhere before it; none where many do."""
    for length in range(1, min(_LONGEST_BEGINNING, position) + 1):
        context = token_ids[position - length : position]
        if _first_after(token_ids, context) == position:
            return tuple(context)
    return ()


class Histories:
    """One ``TenantHistory`` per cache_salt: at most ``max_tenants``, and ``max_tokens`` in all (21 to
    59 MB); the tenants used longest ago are forgotten."""

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
