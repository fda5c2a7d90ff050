"""The last few tokens as one integer: keys that roll forward at one shift per token.

The newest token takes the lowest field. Fields hold ``token_id + 1``, so that a field before the
start of the text (0) equals no token.
"""

from __future__ import annotations

from collections.abc import Sequence

TOKEN_BITS = 24


def window_mask(num_tokens: int) -> int:
    """Keeps the newest ``num_tokens`` fields."""
    return (1 << (TOKEN_BITS * num_tokens)) - 1


def pack(token_ids: Sequence[int]) -> int:
    """The window of these tokens, the last one newest."""
    window = 0
    for token_id in token_ids:
        window = (window << TOKEN_BITS) | (token_id + 1)
    return window
