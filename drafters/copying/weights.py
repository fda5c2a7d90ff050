"""The worth of a place to copy from, by where it lies and how much before it agrees.

Owned by the ``suffix`` drafter. The next token is modelled as a mixture: every candidate place
votes for the token that stands there with a weight, and one more weight, ``NOTHING``, stands for
"none of them". A token's probability is the sum of its votes over the sum of all.

The weights are fits over source files and what they became in a later release of their package, over
edits made up by ``training/edits.py`` and over files that go on, none of them held out (tokens of the
bundled model): of maximum likelihood first, then of most tokens per step, by coordinate ascent. Longer
matches never weigh less.
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
    Place.CURRENT: (-9.0, -9.0, -9.0, -9.0, 1.7, 1.7, 2.2, 3.2, 3.3, 3.9, 4.7),
    Place.NEAR: (-1.5, 0.0, 2.2, 2.2, 2.2, 2.3, 2.3, 2.3, 2.3, 2.3, 2.3),
    Place.AHEAD: (-2.0, -0.7, 0.3, 0.5, 1.1, 1.7, 1.7, 1.7, 1.7, 1.7, 1.7),
    Place.FAR_AHEAD: (-3.2, -2.0, -0.9, 0.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
    Place.BEHIND: (-2.0, -1.1, -0.9, -0.1, 0.1, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9),
    Place.EARLIER: (-2.9, -1.2, -0.3, 0.0, 0.9, 1.7, 2.8, 3.0, 3.2, 3.2, 3.2),
    Place.PROMPT: (-3.2, -1.7, -1.5, -0.8, -0.3, -0.3, -0.3, -0.3, 0.0, 0.7, 0.7),
    Place.OUTPUT: (-2.6, -1.6, -0.8, -0.5, 0.0, 0.0, 0.0, 0.0, 0.9, 0.9, 0.9),
    Place.HISTORY: (-4.3, -2.8, -2.0, -1.3, -0.8, 0.2, 0.2, 0.4, 0.7, 1.4, 1.4),
    Place.INSTRUCTION: (-1.1, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9),
    Place.BESIDE: (-5.2, -3.7, -3.7, -3.4, -2.9, -1.9, -1.9, -1.7, -1.4, -0.7, -0.7),
}
_UNMATCHED_LOG_WEIGHTS = (
    (-3.7, -3.7, -3.7, -3.7, -3.7),
    (-4.3, -3.1, -4.3, -3.7, -3.7),
    (-4.3, -3.1, -3.7, -3.7, -4.3),
    (-4.3, -3.7, -4.3, -3.7, -3.7),
    (-4.6, -5.2, -5.8, -5.2, -5.8),
    (-5.8, -5.2, -5.2, -5.8, -5.2),
)
"""Log weights of places right where copying broke off, if the last token is not before them: it may
have been inserted or replaced. By ``lost_bucket``, and by how far ahead they are."""


def _table(log_weights: tuple[float, ...]) -> tuple[float, ...]:
    buckets = [bisect_right(_LENGTHS, length) for length in range(1, MAX_MATCH_LENGTH + 1)]
    return (0.0, *(math.exp(log_weights[bucket - 1]) for bucket in buckets))


WEIGHTS = tuple(_table(_LOG_WEIGHTS[place]) for place in Place)
"""``WEIGHTS[place][match_length]``, lengths 0..``MAX_MATCH_LENGTH``; 0 where nothing matches."""

UNMATCHED = NUM_LENGTHS * len(Place)
UNMATCHED_EARLIER = UNMATCHED + len(_UNMATCHED_LOG_WEIGHTS) * (NEAR_TOKENS + 1)
"""Where an earlier copy broke off."""
NOTHING_COPYING, NOTHING_LOST, BEGINNING = range(UNMATCHED_EARLIER + 1, UNMATCHED_EARLIER + 4)
"""Weights of no place at all, while copying and otherwise; that of the place where the output is expected
to begin as a copy."""
LEADING = UNMATCHED_EARLIER + 4
"""The share of its weight that a place with the longest match has inside a draft, of what it would have
if it had been copied from so far."""
JOINING = LEADING + 1
"""The least survival at which a draft is looked up anew."""
RESUMING = JOINING + 1
"""The ``RESUMED`` places where copying broke off: their shares of the weight of a place elsewhere that
a draft follows."""
RESUMED = 3
CHAIN_CORRECTION, TREE_CORRECTION = RESUMING + RESUMED, RESUMING + RESUMED + 1
"""The least likelihood at which a correction is drafted, in place of the original or beside it."""
DOUBT = TREE_CORRECTION + 1
"""Pseudocounts of how often a correction was and was not right: for one known by the preceding token as
well, and for one that is not."""

WORTH = array(
    "d",
    [
        *(weight for table in WEIGHTS for weight in table),
        *(math.exp(weight) for row in _UNMATCHED_LOG_WEIGHTS for weight in row),
        *(0.014, 0.4, 0.3, 0.3),
        *(0.165, 0.055),
        *(0.005, 0.055, 0.016),
        *(0.5, 0.3),
        *(1.0, 2.0),
    ],
)
"""All of them, as compiled loops read them: ``NUM_LENGTHS`` for each ``Place``, then the others."""
