"""The last few tokens as one integer: keys that roll forward at one shift per token.

The newest token takes the lowest field. Fields hold ``token_id + 1``, so that a field before the
start of the text (0) equals no token, and windows of different lengths never have the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

TOKEN_BITS = 24


def window_mask(num_tokens: int) -> int:
    """Keeps the newest ``num_tokens`` fields."""
    return (1 << (TOKEN_BITS * num_tokens)) - 1


def advanced(window: int, token_id: int, mask: int) -> int:
    """The window one token on."""
    return ((window << TOKEN_BITS) | (token_id + 1)) & mask


def windows(window: int, token_ids: Iterable[int], mask: int) -> Iterator[int]:
    """The window after each of these tokens, one after the other."""
    for token_id in token_ids:
        window = ((window << TOKEN_BITS) | (token_id + 1)) & mask
        yield window


def pack(token_ids: Sequence[int]) -> int:
    """The window of these tokens, the last one newest."""
    window = 0
    for token_id in token_ids:
        window = (window << TOKEN_BITS) | (token_id + 1)
    return window


class Level(NamedTuple):
    """A length of context. ``smallest`` is the least window of that many tokens: where the text has
    fewer, its window is smaller."""

    num_tokens: int
    mask: int
    smallest: int


def levels(lengths: Iterable[int]) -> tuple[Level, ...]:
    """In the order of ``lengths``."""
    return tuple(Level(n, window_mask(n), 1 << (TOKEN_BITS * (n - 1))) for n in lengths)
