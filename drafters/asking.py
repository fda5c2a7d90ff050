"""When ``auto`` asks a head: where it adds more tokens than the engine writes in the time it takes.

What a head adds to free drafts is counted: the tokens of its draft that came, beyond those of the best
free one, verified or not. Where free drafts expect much there is little to add, so counts are kept by
what these expected, for each request over those of all requests. What a head takes is measured for
batches of about the same size.

Requests for which a head does not pay are tried: one in some steps, however many there are, since what it
teaches reaches all of them, and only as often as the tokens allow that were written since the last trial.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drafters.batch_times import BatchTimes
from drafters.estimator import DiscountedMean
from drafters.tree import ROOT, DraftTree

_HOPED = 1.0
"""Tokens that an untried head is believed to add: enough that it is tried."""
_STRENGTH = 4.0
_DECAY = 0.95
_SHARED_DECAY = 0.99
_TRIED_EVERY = 16
"""Steps that lie between trials, at least."""
_TRIAL_SHARE = 0.02
"""Trials cost no more than this part of what is written."""


def expected_tokens(tree: DraftTree, survivals: Sequence[float]) -> float:
    """Returns the tokens that the best path of a tree is expected to bring."""
    if tree.is_chain():
        return sum(survivals)
    totals: list[float] = []
    for parent, survival in zip(tree.parents, survivals, strict=True):
        totals.append(survival if parent == ROOT else totals[parent] + survival)
    return max(totals)


def _kind(num_free: float) -> int:
    """Returns the bucket of so many tokens expected of free drafts: below 1/4, 1/2, 1, 2, 4 .."""
    return int(4 * num_free).bit_length()


@dataclass(slots=True)
class HeadGain:
    """What a head adds to one request's free drafts, in tokens per draft. ``shared``: what all requests
    have seen; no text, so it serves all tenants."""

    shared: dict[int, DiscountedMean]
    own: dict[int, DiscountedMean] = field(default_factory=dict)

    def expect(self, num_free: float) -> float:
        """Returns the gain beside free drafts that are expected to bring ``num_free`` tokens."""
        gain = _HOPED
        for counts in (self.shared, self.own):
            known = counts.get(_kind(num_free))
            if known is not None:
                gain = known.over(gain, _STRENGTH)
        return gain

    def observe(self, num_free: float, num_added: int) -> None:
        for counts, decay in ((self.shared, _SHARED_DECAY), (self.own, _DECAY)):
            counts.setdefault(_kind(num_free), DiscountedMean()).add(num_added, decay)


class Hope(NamedTuple):
    """A request for which the head may be asked: the tokens that it is expected to add, and what the
    engine writes per second meanwhile (as in ``DraftRequest``; 0: cost is not weighed)."""

    gain: float
    tokens_per_second: float


class Asking:
    """Chooses the requests that a head is asked for, step by step."""

    def __init__(self) -> None:
        self._gains: dict[int, DiscountedMean] = {}
        self._times = BatchTimes()
        self._known_sizes: set[int] = set()
        self._num_steps = 0
        """Steps since the last trial in which somebody was left out."""
        self._num_written = 0

    def gain(self) -> HeadGain:
        """Returns the estimate of a new request."""
        return HeadGain(self._gains)

    def choose(self, hopes: Sequence[Hope]) -> list[int]:
        """Returns the indices of the requests to ask for in one batch: those that do not weigh cost, and
        of the others, the most hopeful first, as many as the batch as a whole gains most by."""
        order = sorted(range(len(hopes)), key=lambda at: self._place(hopes[at]))
        first = sum(not each.tokens_per_second for each in hopes)
        rate = max((each.tokens_per_second for each in hopes), default=0.0)
        price = [rate * self._times.expect(size) for size in range(len(hopes) + 1)]
        best, most, gain = first, 0.0, 0.0
        for size in range(first + 1, len(hopes) + 1):
            gain += hopes[order[size - 1]].gain
            if gain - (price[size] - price[first]) > most:
                best, most = size, gain - (price[size] - price[first])
        if best < len(hopes) and self._is_trial(price[best + 1] / (best + 1)):
            best += 1
        return sorted(order[:best])

    @staticmethod
    def _place(hope: Hope) -> tuple[bool, float]:
        return hope.tokens_per_second > 0, -hope.gain

    def _is_trial(self, price: float) -> bool:
        """Whether somebody who was left out is tried; ``price``: the tokens not written meanwhile."""
        self._num_steps += 1
        is_due = self._num_steps >= _TRIED_EVERY
        if not is_due or price > _TRIAL_SHARE * self._num_written:
            return False
        self._num_steps = self._num_written = 0
        return True

    def wrote(self, num_tokens: int) -> None:
        """So many tokens were written for requests that may be tried."""
        self._num_written += num_tokens

    def took(self, size: int, seconds: float) -> None:
        """A batch of so many requests took so long. The first one of a size may have warmed something
        up, and is not counted."""
        key = size.bit_length()
        if key in self._known_sizes:
            self._times.observe(size, seconds)
        self._known_sizes.add(key)
