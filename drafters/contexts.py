"""Places in texts: the tokens before one as an integer, how far two agree, a copy of what stands there.

A context is the last few tokens as one integer, a key that rolls forward at one shift per token.

The newest token takes the lowest field. Fields hold ``token_id + 1``, so that a field before the
start of the text (0) equals no token, and windows of different lengths never have the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

TOKEN_BITS = 24


def window_mask(num_tokens: int) -> int:
    """Returns the mask that keeps the newest ``num_tokens`` fields."""
    return (1 << (TOKEN_BITS * num_tokens)) - 1


def advanced(window: int, token_id: int, mask: int) -> int:
    """Returns the window one token on."""
    return ((window << TOKEN_BITS) | (token_id + 1)) & mask


def windows(window: int, token_ids: Iterable[int], mask: int) -> Iterator[int]:
    """Yields the window after each of these tokens, one after the other."""
    for token_id in token_ids:
        window = ((window << TOKEN_BITS) | (token_id + 1)) & mask
        yield window


def pack(token_ids: Sequence[int]) -> int:
    """Returns the window of these tokens, the last one newest."""
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
    """Returns the levels of these lengths, in their order."""
    return tuple(Level(n, window_mask(n), 1 << (TOKEN_BITS * (n - 1))) for n in lengths)


def num_equal_before(
    text: Sequence[int], position: int, other: Sequence[int], end: int, most: int
) -> int:
    """Returns how many tokens before ``text[position]`` equal those before ``other[end]``, at most
    ``most``."""
    limit = min(most, position, end)
    length = 0
    while length < limit and text[position - 1 - length] == other[end - 1 - length]:
        length += 1
    return length


def cyclic_run(text: Sequence[int], position: int, num_tokens: int) -> list[int]:
    """Returns ``num_tokens`` tokens from ``position`` on. Past the end of the text the run goes on into
    itself, as an overlapped copy in LZ77 does; at the end itself there is none."""
    run = list(text[position : position + num_tokens])
    if 0 < len(run) < num_tokens:
        run = (run * (num_tokens // len(run) + 1))[:num_tokens]
    return run


def run_features(by_length: Sequence[int], match_length: int, num_nodes: int) -> list[int]:
    """Returns the features of a copied run: of each node, that of the tokens that agree before it."""
    features = list(by_length[match_length : match_length + num_nodes])
    return features + [by_length[-1]] * (num_nodes - len(features))
