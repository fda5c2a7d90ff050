"""Backs off from drafters whose drafts do not earn the time they take.

Granting decides after the draft is made, when its price is already paid. So each kind of traffic (see
``Traffic``) has a purse: what its drafts gain is put in, the time for making and verifying them is taken
out, both counted in steps without drafts. New requests go on with the purse of
their kind, so a trial is paid for once, not by each of them. When it is empty all requests of the kind
rest, and after that one step asks them all again, since a call of a drafter costs about as much for one
request as for many; each loss in a row doubles the rest, and rests of different kinds end in the same
steps. Drafters that cost next to nothing never rest: their proposals are also what their acceptance is
measured on. Purses are kept per tenant, in memory of a fixed size.

Some drafts have rows that are there for later steps (the window of Lookahead, the guesses of Jacobi):
they are granted whole or not at all, and what one is expected to gain now says too little. It is worth
what such drafts have gained lately: accepted tokens per verified draft, a discounted mean over those of
all requests of the kind. Where that does not pay for the rows, a few more drafts of one request may
show that it could, if it would pay at the gain that is hoped for; then the kind rests, each time twice as
long as the time before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request.stats import Reason
from engine.speculation.gamma.policy import DraftCandidate, Grant, Load, StepCost, Traffic

MAX_NUM_KINDS = 1024
"""Kinds of traffic that are remembered; the one that was not met for longest is forgotten."""
_FREE_TOKENS = 0.005
"""A draft that costs less time than the batch takes to write this many tokens counts as free."""
_TRIAL = 1.0
"""Most that a new kind of traffic may lose before it rests, in steps without drafts."""
_MOST = 1.5
"""Most that a kind which gained may lose, however much it gained: times change."""
_PROBE = 0.1
"""Most that may be lost after a rest."""
_LONGEST_REST = 64
_HOPED_GAIN = 1.0
"""Tokens per draft that an untried drafter is believed to gain, and that a trial may show."""
_STRENGTH = 4.0
_DECAY = 0.95
_SHARED_DECAY = 0.995
_TRIAL_DRAFTS = 6
"""In a row, before the result counts: a window needs some steps before it yields n-grams."""
_LONGEST_TRIAL_REST = 32


@dataclass(slots=True)
class _Gain:
    """A discounted mean of accepted tokens per draft."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, num_accepted: int, decay: float) -> None:
        self.total = self.total * decay + num_accepted
        self.weight = self.weight * decay + 1.0

    def over(self, prior: float) -> float:
        return (self.total + _STRENGTH * prior) / (self.weight + _STRENGTH)


@dataclass(slots=True)
class Purse:
    """One kind of traffic: what it may still lose, in steps, and until which step it rests."""

    money: float = _TRIAL
    num_losses: int = 0
    rests_until: int = 0
    has_account: bool = False
    """Drafts were charged for, and the account is not settled yet."""
    balance: float = 0.0
    """Sum of that account."""
    window_gain: _Gain = field(default_factory=_Gain)
    """Gain of drafts that are granted whole."""
    num_trials: int = 0
    """Drafts granted since the last rest although they did not pay, all to ``trier``."""
    trier: str = ""


class Plain(NamedTuple):
    """A step without drafts: what it writes, and how long it takes."""

    tokens: float
    seconds: float


class Backoff:
    """The purses, and which of them each open request has its hand in. A step is over with ``tick``."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._purses: OrderedDict[Traffic, Purse] = OrderedDict()
        self._purse_of: dict[str, Purse] = {}
        self._step = 0
        self._plain_tokens = 1.0

    def __len__(self) -> int:
        """Kinds of traffic that are remembered."""
        return len(self._purses)

    def open(self, request_id: str, traffic: Traffic) -> Purse:
        """A request of this kind has come."""
        purse = self._purses.pop(traffic, None) or Purse()
        self._purses[traffic] = self._purse_of[request_id] = purse
        if len(self._purses) > MAX_NUM_KINDS:
            self._purses.popitem(last=False)
        return purse

    def purse(self, candidate: DraftCandidate) -> Purse:
        """The purse of a request that may never have been announced: then its kind is its drafter's."""
        known = self._purse_of.get(candidate.request_id)
        return known or self.open(candidate.request_id, Traffic(candidate.drafter))

    def forget(self, request_id: str) -> None:
        """The request is over; its kind is remembered."""
        self._purse_of.pop(request_id, None)

    def tick(self) -> None:
        self._step += 1

    def is_resting(self, request_id: str) -> bool:
        purse = self._purse_of.get(request_id)
        if purse is None:
            return False
        if purse.has_account:
            self._settle(purse)
        return self._step < purse.rests_until

    def charge(self, candidate: DraftCandidate, row_seconds: float, plain: Plain) -> None:
        """A draft was asked for, and ``row_seconds`` are for verifying its rows."""
        price = self._cost.draft_seconds(candidate.drafter)
        is_free = price * plain.tokens <= _FREE_TOKENS * plain.seconds
        if not is_free and candidate.params.min_speculative_tokens == 0:
            purse = self.purse(candidate)
            purse.has_account = True
            purse.balance -= (price + row_seconds) / plain.seconds
            self._plain_tokens = plain.tokens

    def earn(self, request_id: str, num_accepted: int) -> None:
        """Its draft was verified."""
        purse = self._purse_of.get(request_id)
        if purse is not None and purse.has_account:
            purse.balance += num_accepted / self._plain_tokens

    def _settle(self, purse: Purse) -> None:
        balance, purse.balance, purse.has_account = purse.balance, 0.0, False
        purse.money = min(purse.money + balance, _MOST)
        if purse.money < 0:
            self._rest(purse)
        elif purse.money >= 2 * _PROBE:
            purse.num_losses = 0

    def _rest(self, purse: Purse) -> None:
        purse.num_losses += 1
        purse.money = _PROBE
        rest = min(2**purse.num_losses, _LONGEST_REST)
        # Rests end together, whenever they began: a call that several share is cheaper.
        purse.rests_until = ((self._step + rest // 2) // rest + 1) * rest

    def reset(self, purse: Purse) -> None:
        """A draft granted whole paid: the next loss is the first again."""
        purse.num_losses = purse.num_trials = 0

    def end_trial(self, purse: Purse) -> None:
        """It did not pay; the rest is in proportion to its drafts."""
        purse.num_losses += 1
        rest = min(2 ** (purse.num_losses - 1), _LONGEST_TRIAL_REST) * max(1, purse.num_trials)
        purse.rests_until = self._step + rest
        purse.num_trials, purse.trier = 0, ""


class AllOrNothing:
    """Drafts that are granted whole or not at all; rests are kept by ``backoff``."""

    def __init__(self, cost: StepCost, backoff: Backoff) -> None:
        self._cost = cost
        self._backoff = backoff
        self._gains: dict[str, tuple[Purse, _Gain]] = {}

    def grant(self, candidate: DraftCandidate, load: Load) -> tuple[Grant, Load]:
        """The grant of a draft that is not empty, and the load with it."""
        gain = max(self.expected_gain(candidate), sum(candidate.survivals))
        reason = self._refusal(candidate, load, gain)
        if reason:
            return Grant((), reason), load
        num_nodes = len(candidate.tree)
        return Grant(range(num_nodes), ""), load.with_nodes(num_nodes, gain)

    def observe(self, request_id: str, num_accepted: int) -> None:
        """A draft was verified. Requests that never offered a whole one are ignored."""
        known = self._gains.get(request_id)
        if known is not None:
            purse, gain = known
            gain.add(num_accepted, _DECAY)
            purse.window_gain.add(num_accepted, _SHARED_DECAY)

    def forget(self, request_id: str) -> None:
        known = self._gains.pop(request_id, None)
        if known is not None and known[0].trier == request_id:
            known[0].trier = ""

    def expected_gain(self, candidate: DraftCandidate) -> float:
        """Tokens that a draft of this request gains in the long run."""
        known = self._gains.get(candidate.request_id)
        if known is None:
            known = self._gains[candidate.request_id] = (self._backoff.purse(candidate), _Gain())
        purse, gain = known
        return gain.over(purse.window_gain.over(_HOPED_GAIN))

    def _refusal(self, candidate: DraftCandidate, load: Load, gain: float) -> Reason:
        """Returns why the draft is not granted, "" if it is; the outcome is settled with ``backoff``."""
        params, num_nodes = candidate.params, len(candidate.tree)
        purse = self._backoff.purse(candidate)
        if num_nodes > min(candidate.max_nodes, params.max_speculative_tokens):
            return "client_cap"
        if num_nodes > load.num_spare_rows:
            return "overload"
        target_rate = params.target_acceptance_rate
        if target_rate is not None and gain < target_rate * num_nodes:
            self._backoff.end_trial(purse)
            return "policy"
        if params.min_speculative_tokens > 0 or self._pays(candidate, load, gain):
            self._backoff.reset(purse)
            return ""
        pays_alone = self._pays(candidate, self._alone(candidate, load), gain)
        reason: Reason = "overload" if pays_alone else "low_acceptance"
        if self._pays(candidate, load, max(gain, _HOPED_GAIN)):
            if purse.trier not in ("", candidate.request_id):
                return reason  # another request tries for all
            if purse.num_trials < _TRIAL_DRAFTS:
                purse.trier = candidate.request_id
                purse.num_trials += 1
                return ""
        self._backoff.end_trial(purse)
        return reason

    def _pays(self, candidate: DraftCandidate, load: Load, gain: float) -> bool:
        """Returns whether the batch is no slower with draft and rows than with neither."""
        num_nodes = len(candidate.tree)
        table = self._cost.step_seconds_table(
            load.num_rows, num_nodes, load.num_kv_tokens, load.num_requests
        )
        saved = min(load.draft_seconds, self._cost.draft_seconds(candidate.drafter))
        without = load.expected_tokens / (load.draft_seconds - saved + table[0])
        return (load.expected_tokens + gain) / (load.draft_seconds + table[num_nodes]) >= without

    def _alone(self, candidate: DraftCandidate, load: Load) -> Load:
        """The request by itself, with its share of the context."""
        context = load.num_kv_tokens // max(1, load.num_requests)
        seconds = self._cost.draft_seconds(candidate.drafter)
        return Load(1, load.num_spare_rows, 1, 1.0, context, 1, seconds)
