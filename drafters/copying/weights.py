"""The worth of a place to copy from, by where it lies and how much before it agrees.

Owned by the ``suffix`` drafter. The next token is modelled as a mixture: every candidate place
votes for the token that stands there with a weight, and one more weight, ``NOTHING``, stands for
"none of them". A token's probability is the sum of its votes over the sum of all.

The weights are maximum-likelihood fits over source files and what they became in a later release
of their package (tokens of the bundled model), smoothed so that longer matches never weigh less.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from enum import IntEnum


class Place(IntEnum):
    """The position of a candidate relative to where copying was last under way and broke off."""

    CURRENT = 0
    """The place that is copied from now; copies shorter than 5 tokens are not told from others."""
    NEAR = 1
    """At most 4 tokens ahead: a token was inserted, replaced, or a few dropped."""
    AHEAD = 2
    """At most 32 tokens ahead."""
    FAR_AHEAD = 3
    """At most 256 tokens ahead."""
    BEHIND = 4
    """At most 64 tokens back."""
    EARLIER = 5
    """At most 64 tokens ahead of where an earlier copy broke off."""
    PROMPT = 6
    OUTPUT = 7
    HISTORY = 8
    """In a finished request of the same tenant."""
    INSTRUCTION = 9
    """In the prompt, at most 96 tokens before the first place that was ever copied from."""
    BESIDE = 10
    """In a finished request of the same tenant, while the output copies its prompt from the start."""


MAX_MATCH_LENGTH = 48
NUM_LENGTHS = MAX_MATCH_LENGTH + 1
NEAR_TOKENS = 4
INSTRUCTION_TOKENS = 96
AHEAD_TOKENS = 32
FAR_AHEAD_TOKENS = 256
BEHIND_TOKENS = 64
EARLIER_TOKENS = 64

_LENGTHS = (1, 2, 3, 4, 5, 7, 10, 16, 24, 32, 48)
_LOG_WEIGHTS = {
    Place.CURRENT: (-9.0, -9.0, -9.0, -9.0, 1.7, 2.2, 2.8, 3.8, 3.9, 4.5, 5.3),
    Place.NEAR: (-0.9, 0.6, 1.6, 1.6, 1.6, 1.7, 1.7, 1.7, 1.7, 1.7, 1.7),
    Place.AHEAD: (-2.0, -0.7, 0.3, 0.5, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1),
    Place.FAR_AHEAD: (-3.2, -2.0, -1.5, -0.6, -0.1, -0.1, -0.1, -0.1, -0.1, -0.1, 0.0),
    Place.BEHIND: (-2.6, -1.7, -0.9, -0.1, 0.1, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9),
    Place.EARLIER: (-2.9, -1.2, -0.3, 0.0, 0.9, 1.7, 2.8, 3.0, 3.2, 3.2, 3.2),
    Place.PROMPT: (-3.8, -2.3, -1.5, -0.8, -0.3, 0.1, 0.1, 0.1, 0.6, 1.3, 1.3),
    Place.OUTPUT: (-3.2, -2.2, -1.4, -1.1, -0.6, -0.1, 0.1, 0.3, 1.5, 1.5, 1.5),
    Place.INSTRUCTION: (-0.5, 0.8, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5, 1.5),
    Place.HISTORY: (-4.3, -2.8, -2.0, -1.3, -0.8, -0.4, -0.4, -0.2, 0.1, 0.8, 0.8),
    Place.BESIDE: (-5.8, -4.3, -3.5, -2.8, -2.3, -1.9, -1.9, -1.7, -1.4, -0.7, -0.7),
}
_UNMATCHED_LOG_WEIGHTS = (-3.7, -5.2)
UNMATCHED_SINCE = 4


def _table(log_weights: tuple[float, ...]) -> tuple[float, ...]:
    buckets = [bisect_right(_LENGTHS, length) for length in range(1, MAX_MATCH_LENGTH + 1)]
    return (0.0, *(math.exp(log_weights[bucket - 1]) for bucket in buckets))


WEIGHTS = tuple(_table(_LOG_WEIGHTS[place]) for place in Place)
"""``WEIGHTS[place][match_length]``, lengths 0..``MAX_MATCH_LENGTH``; 0 where nothing matches."""

CHAIN_CORRECTION = 0.5
TREE_CORRECTION = 0.3
"""The least likelihood at which a correction is drafted, in place of the original or beside it."""

UNMATCHED = NUM_LENGTHS * len(Place)
NUM_LOST_BUCKETS = 6
NOTHING = UNMATCHED + NUM_LOST_BUCKETS * (NEAR_TOKENS + 1)
LEADING, CORRECTION, JOINING, DOUBT, TRUST = (
    NOTHING + 2,
    NOTHING + 3,
    NOTHING + 5,
    NOTHING + 6,
    NOTHING + 8,
)
UNMATCHED_EARLIER, RESUMING, BEGINNING = NOTHING + 9, NOTHING + 10, NOTHING + 13
"""Where in ``WORTH`` they are: the weights of places right where copying broke off, if the last token is
not before them, up to ``UNMATCHED_SINCE`` tokens later and afterwards; that of no place at all, while
copying and otherwise; the share of its weight that a place with the longest match has inside a draft,
of what it would have if it had been copied from so far; ``CHAIN_CORRECTION`` and ``TREE_CORRECTION``;
the least survival at which a draft is looked up anew."""

WORTH = array(
    "d",
    [
        *(weight for table in WEIGHTS for weight in table),
        *([math.exp(-3.7)] * 20),
        *([math.exp(-5.2)] * 10),
        0.4,
        0.3,
        0.3,
        CHAIN_CORRECTION,
        TREE_CORRECTION,
        0.1,
        1.0,
        2.0,
        6.0,
        math.exp(-3.7),
        0.01,
        0.1,
        0.03,
        0.3,
    ],
)
"""All of them, as compiled loops read them: ``NUM_LENGTHS`` for each ``Place``, then the others."""
