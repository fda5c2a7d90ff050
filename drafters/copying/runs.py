"""Runs of tokens: how far two texts agree before a place, and copies of what stands at one."""

from __future__ import annotations

from collections.abc import Sequence


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
