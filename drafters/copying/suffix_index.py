"""Earlier occurrences of a text's last tokens, found by contexts of several lengths.

Owned by the ``suffix`` drafter. Contexts are packed windows (see ``drafters.contexts``), so one
dictionary holds all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafters.contexts import levels, pack, windows

CONTEXT_LENGTHS = (1, 2, 4)
MAX_OCCURRENCES = 8
MAX_MATCH_LENGTH = 48

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
        """Contexts held."""
        return len(self._occurrences)

    def clear(self) -> None:
        self._occurrences.clear()
        self.num_indexed = 0

    def extend(self, token_ids: Sequence[int], start: int, end: int) -> None:
        """Index the contexts that end at the tokens ``start`` .. ``end - 1`` of the text."""
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
        """Up to ``limit`` positions that follow an occurrence of a context of ``token_ids[:end]``,
        those of the longest context first, newest first.

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
    """The last tokens before ``end``, packed."""
    return pack(token_ids[max(0, end - _LONGEST.num_tokens) : end])
