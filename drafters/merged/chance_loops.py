"""Compiled: how likely each guess is, given that its parent was accepted, and what comes of it.

Guesses that may follow a node compete: their chances are a softmax over the sums of their features'
weights, in which a 0 stands for "none of them". Weights are learned from the text, step by step: those
that all requests share slowly, and what is a request's own beside them faster.
"""

from __future__ import annotations

import math
from typing import Any

from compiled.loops import callee
from drafters.merged.records import Merged
from drafters.merged.row_loops import LOG_UNITS

FEATURE_BITS = 7
NUM_VALUES = 1 << FEATURE_BITS
KINDS = ("depth", "copy", "row_1", "row_2", "row_4", "nearly", "noise", "frequent")
NUM_FEATURES = len(KINDS)
COPY, ROW, NEARLY, NOISE, FREQUENT = 1, 2, 5, 6, 7
"""``ROW`` and the next two: those of the levels of contexts."""
NUM_WEIGHTS = NUM_FEATURES * NUM_VALUES
NUM_SAID = 16
"""Stored after the shared weights: for chances by their size, the sum of the estimates and the number
that were right. The best of many guesses is seldom as good as it looks."""
_SAID_DECAY = 0.998
SHARED_RATE, OWN_RATE = 0.005, 0.04
COPY_VALUES = 58
"""Values of ``COPY`` with no row beside it, and as many with one."""


@callee
def margin_bucket(rank: int, log: int, first: int, second: int) -> int:
    """Returns the bucket of a row's token for a greedy request: the lead of the first one before the
    second, and how far another lies behind the first, in units of log-probability."""
    margin = (first - (second if rank == 0 else log)) / LOG_UNITS
    bucket = (
        (margin >= 0.25)
        + (margin >= 0.5)
        + (margin >= 1.0)
        + (margin >= 1.5)
        + (margin >= 2.5)
        + (margin >= 4.0)
    )
    return bucket if rank == 0 else 7 + bucket


@callee
def log_bucket(log: float) -> int:
    """Returns the bucket of a tempered log-probability."""
    bucket = 0
    for bound in (-0.1, -0.3, -0.6, -1.0, -1.4, -1.8, -2.3, -2.8, -3.3, -4.0, -5.0, -6.0, -7.5):
        bucket += log < bound
    return bucket


@callee
def score_bucket(score: int) -> int:
    """Returns the bucket of how nearly a token was said: 0..9."""
    nats = score / LOG_UNITS
    bucket = 0
    for bound in (-1.0, -1.6, -2.2, -2.8, -3.4, -4.0, -4.7, -5.5, -6.5):
        bucket += nats < bound
    return bucket


@callee
def share_bucket(share: float) -> int:
    """Returns the bucket of how often a token is said: 0..7."""
    bucket = 0
    for bound in (0.06, 0.045, 0.033, 0.024, 0.017, 0.012, 0.008):
        bucket += share < bound
    return bucket


@callee
def noise_bucket(noise: float) -> int:
    return max(0, min(23, int((noise + 2.0) / 0.33)))


@callee
def copy_bucket(match: int, share: float) -> int:
    length = (
        (match >= 1) + (match >= 2) + (match >= 3) + (match >= 5) + (match >= 8) + (match >= 16)
    )
    part = (
        (share >= 0.03)
        + (share >= 0.1)
        + (share >= 0.25)
        + (share >= 0.5)
        + (share >= 0.75)
        + (share >= 0.93)
        + (share >= 0.98)
    )
    return 8 * length + part


@callee
def _sum(m: Merged, features: int) -> float:
    total = 0.0
    for kind in range(NUM_FEATURES):
        at = NUM_VALUES * kind + ((features >> (FEATURE_BITS * kind)) & (NUM_VALUES - 1))
        total += m.shared[at] + m.own[at]
    return total


@callee
def set_chances(m: Merged, first: int, count: int) -> None:
    total = 1.0
    for at in range(first, first + count):
        g = m.guesses[at]
        g.chance = math.exp(min(30.0, _sum(m, g.features)))
        total += g.chance
    for at in range(first, first + count):
        m.guesses[at].chance /= total


@callee
def _teach(m: Merged, features: int, error: float) -> None:
    for kind in range(NUM_FEATURES):
        at = NUM_VALUES * kind + ((features >> (FEATURE_BITS * kind)) & (NUM_VALUES - 1))
        m.shared[at] += SHARED_RATE * error
        m.own[at] += OWN_RATE * error


@callee
def believed(m: Merged, chance: float) -> float:
    """Returns how often guesses that were given such a chance were right."""
    at = NUM_WEIGHTS + min(NUM_SAID - 1, int(chance * NUM_SAID))
    found: float = m.shared[at + NUM_SAID]
    return min(1.0, chance * found / m.shared[at])


@callee
def judge(m: Merged, most_guesses: int, tokens: Any, start: int, end: int) -> None:
    """The text has come to ``tokens[start:end]``."""
    expansion = 0
    for position in range(start, end):
        reached = -1
        for each in range(m.counts[expansion]):
            g = m.guesses[most_guesses * expansion + each]
            is_right = g.token == tokens[position]
            right = 1.0 if is_right else 0.0
            _teach(m, g.features, right - g.chance)
            said = NUM_WEIGHTS + min(NUM_SAID - 1, int(g.chance * NUM_SAID))
            m.shared[said] = _SAID_DECAY * m.shared[said] + g.chance
            m.shared[said + NUM_SAID] = _SAID_DECAY * m.shared[said + NUM_SAID] + right
            if is_right:
                reached = g.next
        if reached < 0:
            return
        expansion = reached
