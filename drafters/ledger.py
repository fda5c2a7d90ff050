"""Chooses the requests to ask for drafts that take time: the ones that gain more tokens than the batch
could generate meanwhile.

The engine keeps one for each drafter that requests name, and for each that it asks beside another.
Benefits are counted in tokens, for each request over those of its kind of traffic; the price of a call is
that of batches of about the same size, since a call costs about as much for one request as for many.

Requests for which a draft does not pay are tried: one at a time, in turn, and only as often as the
tokens generated since the last trial allow. So expensive drafts are tried seldom, and almost free ones,
such as copies that come in runs, hardly rest. Where a drafter has to take in what a request has missed,
and that takes long, requests join it by doubling their number: one lucky trial does not have all of them
take in their texts at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from drafters.batch_times import BatchTimes, margin_of
from drafters.estimator import DiscountedMean
from drafters.tree import ROOT, DraftTree

MAX_NUM_KINDS = 1024
"""Kinds of traffic that are remembered; the one that was not met for longest is forgotten."""
_HOPED = 1.0
"""Tokens that an untried drafter is believed to bring where rows are free: enough that it is tried."""
_STRENGTH = 4.0
_OWN_STRENGTH = 16.0
"""A request's own drafts are few: a run of luck says little of the next steps."""
_DECAY = 0.95
_SHARED_DECAY = 0.99
_TRIAL_SHARE = 0.01
"""Trials cost no more than this part of what is written."""
_VAIN_SHARE = 0.0025
_MOST_VAIN = 8
"""Trials in a row after which nobody was asked; of those that follow, the ones that take longer than a
token cost no more than ``_VAIN_SHARE``."""
_MOST_TRIAL_STEPS = 4
"""Steps of a trial whose first one takes as long as several others."""
_MOST_SURPRISE = 8.0
"""Times what a trial was expected to take that the last one is believed to have taken."""
_STAY = 32
"""Steps over which what a request has missed is paid for."""
_LEAST_STAY = 4
"""Steps in which one is asked alone, since nothing is known of what drafts gain."""
_CHEAP = 1.0
"""Tokens' time that requests which join in one step may take besides."""
_MOST_UNWORTHY = 256
"""Choices without any but trials, after which the drafter is believed not to pay."""
_MOST_QUIET = 32
"""Steps in which no request is asked before the ledger looks again."""


def expected_tokens(tree: DraftTree, survivals: Sequence[float]) -> float:
    """Returns the tokens that the best path of a tree is expected to bring."""
    if tree.is_chain():
        return sum(survivals)
    totals: list[float] = []
    for parent, survival in zip(tree.parents, survivals, strict=True):
        totals.append(survival if parent == ROOT else totals[parent] + survival)
    return max(totals)


def _bucket(num_free: float) -> int:
    """Returns the bucket of so many tokens expected of free drafts: below 1/4, 1/2, 1, 2, 4 .."""
    return int(4 * num_free).bit_length()


@dataclass(slots=True)
class Gain:
    """The benefit of a draft for one request, in tokens. ``shared``: the average of all requests of its
    kind."""

    shared: dict[int, DiscountedMean]
    own: dict[int, DiscountedMean] = field(default_factory=dict)

    def expect(self, num_free: float = 0.0, row_tokens: float = 0.0) -> float:
        """Returns the gain beside drafts that cost nothing and are expected to bring ``num_free``
        tokens: where these expect much there is little to add. Where little was tried beside drafts that
        expect about as much, it is what was gained beside others. Where nothing was tried yet, no more is
        hoped than ``row_tokens``, the tokens not written while a row is verified, leave of one."""
        bucket, others = _bucket(num_free), DiscountedMean()
        for at, each in self.shared.items():
            if at != bucket:
                others.total += each.total
                others.weight += each.weight
        gain = others.over(max(0.0, _HOPED - row_tokens), _STRENGTH)
        for counts, strength in ((self.shared, _STRENGTH), (self.own, _OWN_STRENGTH)):
            known = counts.get(bucket)
            if known is not None:
                gain = known.over(gain, strength)
        return gain

    def observe(self, num_tokens: float, num_free: float = 0.0) -> None:
        """A draft brought so many."""
        for counts, decay in ((self.shared, _SHARED_DECAY), (self.own, _DECAY)):
            counts.setdefault(_bucket(num_free), DiscountedMean()).add(num_tokens, decay)


class Hope(NamedTuple):
    """A request for which the drafter may be asked: the tokens expected from its draft, less the tokens
    forgone while its rows are verified, and the tokens the engine generates per second meanwhile (as in
    ``DraftRequest``; 0: cost is not weighed). ``rows``: the price of its rows, in tokens, if it were
    tried; ``request_id``: whose trial it is. ``has_rested``: it first takes in what was missed."""

    gain: float
    tokens_per_second: float
    rows: float = 0.0
    request_id: str = ""
    has_rested: bool = False


class Ledger:
    """Chooses the requests that one drafter is asked for, step by step."""

    def __init__(self, seconds: Callable[[int], float], num_trial_steps: int = 1) -> None:
        """``seconds``: what a batch of so many requests takes. ``num_trial_steps``: how often in a row a
        request has to be asked before that shows anything."""
        self._gains: dict[Hashable, dict[int, DiscountedMean]] = {}
        """Benefits by kind of traffic; the kind whose last request is longest ago comes first."""
        self._seconds = seconds
        self._num_trial_steps = num_trial_steps
        self._trial_times = BatchTimes()
        self._trial_seconds = 0.0
        """The last trial's time for each request: they differ by how much of a text was missed."""
        self._num_written, self._num_missing = 0, 0.0
        """Tokens since the last trial, and how many more the next one waits for."""
        self._num_trials = self._num_vain = 0
        """Trials, and those since a request was last asked for other than as one."""
        self._num_quiet = self._num_resting = self._load = 0
        """Steps in which no request is asked yet, how many resting requests there may be, and how many
        others."""
        self._trier, self._num_left = "", 0
        """Whose trial lasts, and in how many steps more it is asked."""
        self._least = 0.0
        """The gain that one request more needed to be asked, when requests were last chosen."""
        self._joined: set[str] = set()
        """Requests that were asked in the last step for what they are expected to gain."""
        self._num_joined = self._num_stayed = 0
        """How many these were, with those that are over since, and steps that had some, since drafts
        have paid."""
        self._num_unworthy = 0
        """Choices since one of some that were not trials."""

    @property
    def pays(self) -> bool:
        """Whether any request was last asked for other than as a trial."""
        return not self._num_unworthy

    @property
    def has_paid(self) -> bool:
        """Whether that was so of late."""
        return self._num_unworthy < _MOST_UNWORTHY

    def gain(self, kind: Hashable = None) -> Gain:
        """Returns the estimate of a new request."""
        shared = self._gains[kind] = self._gains.pop(kind, {})
        if len(self._gains) > MAX_NUM_KINDS:
            del self._gains[next(iter(self._gains))]
        gain = Gain(shared)
        if not shared or gain.expect() > self._least:
            self._num_quiet = 0
        return gain

    def choose(self, hopes: Sequence[Hope]) -> list[int]:
        """Returns the indices of the requests to ask in one batch: those that do not weigh cost, and of
        the others, the most promising first, the number with the largest gain for the batch as a whole.
        """
        first = sum(not each.tokens_per_second for each in hopes)
        rate = max((each.tokens_per_second for each in hopes), default=0.0)
        gains = self._gains_of(hopes)
        order = sorted(range(len(hopes)), key=gains.__getitem__, reverse=True)
        num_gaining = sum(gain > 0 for gain in gains)  # more of the others never pay
        base = rate * self._seconds(first) if first else 0.0
        margin = margin_of(max(1, len(hopes) - first))
        best, most, gain = first, 0.0, 0.0
        for size in range(first + 1, num_gaining + 1):
            gain += gains[order[size - 1]]
            left = gain - margin * (rate * self._seconds(size) - base)
            if left > most:
                best, most = size, left
        chosen, resting = self._join(hopes, order[:best], first), order[best:]
        price = rate * self._seconds(best + 1) / (best + 1)
        self._least = margin * price
        if resting:
            chosen += self._tried(hopes, resting, price)
        if hopes and not chosen:
            self._rest(len(hopes))
        return sorted(chosen)

    def _gains_of(self, hopes: Sequence[Hope]) -> list[float]:
        """Returns the gain of each: infinite where cost is not weighed, so that these come first; for a
        request that has rested, less a part of what it takes to join."""
        share = self._one_trial / _STAY
        return [
            each.gain - each.has_rested * share * each.tokens_per_second
            if each.tokens_per_second
            else math.inf
            for each in hopes
        ]

    @property
    def _one_trial(self) -> float:
        """The seconds of a trial of one request; 0: none was timed."""
        return max(self._trial_times.expect(1), self._trial_seconds)

    def _join(self, hopes: Sequence[Hope], worthy: list[int], num_free: int) -> list[int]:
        """Returns the part of ``worthy`` that is asked in this step: of requests that have rested, as
        many as were asked in the last step, or as take little time. The first ``num_free`` weigh no cost
        and are always asked."""
        self._num_stayed = (self._num_stayed + bool(worthy)) if self.has_paid else 0
        self._num_unworthy += 1
        if worthy:
            self._num_unworthy = self._num_vain = 0
        each = max((hopes[at].tokens_per_second for at in worthy), default=0.0) * self._one_trial
        known = self._joined.intersection(hopes[at].request_id for at in worthy[num_free:])
        most = int(_CHEAP / each) if each else 0
        if self._num_stayed > _LEAST_STAY:
            most = max(1, self._num_joined, most)
        elif not known:
            most = max(1, most)
        joining = [
            at
            for at in worthy[num_free:]
            if hopes[at].has_rested and hopes[at].request_id not in known
        ]
        late = set(joining[most:])
        chosen = [at for at in worthy if at not in late]
        self._joined = {hopes[at].request_id for at in chosen[num_free:]}
        self._num_joined = len(self._joined)
        return chosen

    def _rest(self, num_requests: int) -> None:
        """Records that no request is asked: until others come, or a trial, nothing is learned of the
        resting ones, and they need not be examined. Each generates one token per step."""
        self._num_resting = num_requests
        self._num_quiet = max(0, min(_MOST_QUIET, int(self._num_missing / num_requests)))

    def rests(self, num_requests: int, load: int = 0) -> bool:
        """Whether none of ``num_requests``, all of which weigh cost, is asked in this step; then they
        need not be examined. ``load``: the number of other requests, without which drafts may pay."""
        if load != self._load:
            self._load, self._num_quiet = load, 0
        if self._num_quiet <= 0 or num_requests > self._num_resting:
            return False
        self._num_quiet -= 1
        return True

    def _tried(self, hopes: Sequence[Hope], left: Sequence[int], price: float) -> list[int]:
        """Returns who of those ``left`` out is tried, if anybody; ``price``: the tokens not written while
        one more draft is made."""
        if self._num_left:
            self._num_left, self._num_missing = self._num_left - 1, 0.0
            return [at for at in left if hopes[at].request_id == self._trier]
        tried = left[self._num_trials % len(left)]
        most = hopes[tried].tokens_per_second * self._one_trial
        number = self._num_trial_steps
        if price:  # what was missed is taken in once
            number = max(number, min(_MOST_TRIAL_STEPS, int(most / price)))
        price = max(price, most) + (number - 1) * price + number * hopes[tried].rows
        is_vain = self._num_vain >= _MOST_VAIN and price > 1.0
        share = _VAIN_SHARE if is_vain else _TRIAL_SHARE
        self._num_missing = price / share - self._num_written
        if self._num_missing > 0:
            return []
        self._num_written = 0
        self._num_trials, self._num_vain = self._num_trials + 1, self._num_vain + 1
        self._trier, self._num_left = hopes[tried].request_id, number - 1
        return [tried]

    def forget(self, request_id: str) -> None:
        """The request is over, and its trial with it."""
        self._joined.discard(request_id)
        if self._trier == request_id:
            self._trier, self._num_left = "", 0

    def wrote(self, num_tokens: int) -> None:
        """So many tokens were written for requests that may be tried."""
        self._num_written += num_tokens

    def took(self, size: int, seconds: float) -> None:
        """A batch of so many requests took so long, with what one of them had missed: that is the price
        of a trial, not of a call."""
        times = self._trial_times
        times.observe(size, seconds)
        self._trial_seconds = min(seconds, _MOST_SURPRISE * times.expect(size)) / size
