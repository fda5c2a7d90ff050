"""Backs off from drafters whose drafts do not earn the time they take.

Granting decides after the draft is made, when its price is already paid. So each kind of traffic has a
purse: what its drafts gain is put in, the time for making and verifying them is taken out, both in steps
of the kind's own requests without drafts. New requests go on with the purse of their kind, so a trial is
paid for once. When it is empty all requests of the kind rest, and then one step asks them all again,
since a call of a drafter costs about as much for one request as for many. Each loss in a row doubles the
rest, up to where trials take a small share of all time, so that what is dear to try is tried rarely. But
copying comes in runs, of each of which a rest misses half of itself: a kind rests no longer than that
loss is worth, by what it earns where it is asked. Drafters that cost next to nothing never rest: their
proposals are also what their acceptance is measured on.

Some drafts have rows that are there for later steps (the window of Lookahead, the guesses of Jacobi).
They are granted whole or not at all, and are worth what such drafts have gained lately, in accepted
tokens per verified draft. Where that does not pay for the rows, a few more drafts of one request may
show that it could, if it would pay at the gain that is hoped for; then the kind rests, each time twice
as long.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from drafters.estimator import DiscountedMean
from engine.request.stats import Reason
from engine.speculation.gamma.policy import DraftCandidate, Grant, Load, StepCost

_TRIAL = 0.6
"""Most that a new kind of traffic may lose before it rests, in tokens per request."""
_MOST = 1.5
"""Most that a kind which gained may lose, however much it gained: times change."""
_PROBE = 0.1
"""Most that may be lost after a rest."""
_TRIAL_SHARE = 0.01
"""Of all time, at most, what trials may lose in the long run."""
_LONGEST_REST = 1024
"""In steps, whatever a trial loses."""
_RUN_STEPS = 8
"""Steps that a run takes in which much is accepted, about."""
_HOPED_INCOME = 0.4
"""Tokens that a step brings in which an untried kind is asked."""
_INCOME_STRENGTH = 8.0
_INCOME_DECAY = 0.995
_HOPED_GAIN = 1.0
"""Tokens per draft that an untried drafter is believed to gain, and that a trial may show."""
_STRENGTH = 4.0
_DECAY = 0.95
_SHARED_DECAY = 0.995
_TRIAL_DRAFTS = 6
"""In a row, before the result counts: a window needs some steps before it yields n-grams."""
_LONGEST_TRIAL_REST = 32


@dataclass(slots=True)
class Purse:
    """One kind of traffic: what it may still lose, in steps, and until which step it rests. ``stake``:
    what it began with after its last rest."""

    money: float = _TRIAL
    stake: float = _TRIAL
    num_losses: int = 0
    rests_until: int = 0
    charged: float = 0.0
    """Tokens that the batch could have written in the time of ``num_charged`` drafts, since it was
    settled, and tokens that these ``earned``."""
    earned: int = 0
    num_charged: int = 0
    income: DiscountedMean = field(default_factory=DiscountedMean)
    """Tokens per request that were earned in steps in which the kind was asked."""
    whole_gain: DiscountedMean = field(default_factory=DiscountedMean)
    """Gain of drafts that are granted whole."""
    num_trials: int = 0
    """Drafts granted since the last rest although they did not pay, all to ``trier``."""
    trier: str = ""

    def is_resting(self, step: int) -> bool:
        """Returns whether the kind rests, once what its drafts were charged and earned is settled."""
        if self.num_charged:
            self._settle(step)
        return step < self.rests_until

    def _settle(self, step: int) -> None:
        price, earned = self.charged / self.num_charged, self.earned / self.num_charged
        self.charged, self.earned, self.num_charged = 0.0, 0, 0
        self.income.add(earned, _INCOME_DECAY)
        self.money = min(self.money + earned - price, _MOST)
        if self.money < 0:
            self._rest(step, price)
        elif self.money >= 2 * _PROBE:
            self.num_losses = 0

    def _rest(self, step: int, price: float) -> None:
        """``price``: of a draft, in tokens."""
        self.num_losses += 1
        lost, self.money, self.stake = self.stake - self.money, _PROBE, _PROBE
        longest = min(lost / _TRIAL_SHARE, _LONGEST_REST)
        # A rest of R steps saves R prices, and loses the income of R / 2 steps in each run.
        missed = self.income.over(_HOPED_INCOME, _INCOME_STRENGTH) / (2 * _RUN_STEPS)
        if missed * longest > price:
            longest = price / missed
        rest = 2
        while rest < min(2**self.num_losses, longest):
            rest *= 2
        # Rests end together, whenever they began: a call that several share is cheaper.
        self.rests_until = ((step + rest // 2) // rest + 1) * rest

    def charge(self, num_tokens: float) -> None:
        """A request's draft took the time in which the batch writes so many tokens without drafts."""
        self.charged += num_tokens
        self.num_charged += 1

    def earn(self, num_tokens: int) -> None:
        """So many tokens were accepted. Drafts that were free to make earn nothing either."""
        if self.num_charged:
            self.earned += num_tokens

    def end_trial(self, step: int) -> None:
        """The trial did not pay; the rest is in proportion to its drafts."""
        self.num_losses += 1
        rest = min(2 ** (self.num_losses - 1), _LONGEST_TRIAL_REST) * max(1, self.num_trials)
        self.rests_until = step + rest
        self.num_trials, self.trier = 0, ""


@dataclass(slots=True)
class Account:
    """One request: the purse of its kind, and what is known of its own drafts."""

    purse: Purse
    has_verified: bool = False
    whole_gain: DiscountedMean | None = None
    """Gain of its drafts that are granted whole; None while it has offered none."""

    def expected_gain(self) -> float:
        """Returns the tokens that a draft granted whole gains in the long run."""
        if self.whole_gain is None:
            self.whole_gain = DiscountedMean()
        shared = self.purse.whole_gain.over(_HOPED_GAIN, _STRENGTH)
        return self.whole_gain.over(shared, _STRENGTH)

    def observe(self, num_accepted: int) -> None:
        """A draft was verified."""
        self.has_verified = True
        if self.whole_gain is not None:
            self.whole_gain.add(num_accepted, _DECAY)
            self.purse.whole_gain.add(num_accepted, _SHARED_DECAY)


def grant_whole(
    candidate: DraftCandidate, load: Load, account: Account, cost: StepCost, step: int
) -> tuple[Grant, Load]:
    """Returns the grant of a draft that is not empty, all of it or nothing, and the load with it."""
    gain = max(account.expected_gain(), sum(candidate.survivals))
    reason = _why_not(candidate, load, gain, account.purse, cost, step)
    if reason:
        return Grant((), reason), load
    num_nodes = len(candidate.tree)
    return Grant(range(num_nodes), ""), load.with_nodes(num_nodes, gain)


def _why_not(
    candidate: DraftCandidate, load: Load, gain: float, purse: Purse, cost: StepCost, step: int
) -> Reason:
    """Returns why the draft is not granted, "" if it is; the purse keeps the outcome."""
    params, num_nodes = candidate.params, len(candidate.tree)
    if num_nodes > min(candidate.max_nodes, params.max_speculative_tokens):
        return "client_cap"
    if num_nodes > load.num_spare_rows:
        return "overload"
    target_rate = params.target_acceptance_rate
    if target_rate is not None and gain < target_rate * num_nodes:
        purse.end_trial(step)
        return "policy"
    if params.min_speculative_tokens > 0 or _pays(candidate, load, gain, cost):
        purse.num_losses = purse.num_trials = 0  # the next loss is the first again
        return ""
    if _pays(candidate, load, max(gain, _HOPED_GAIN), cost):
        if purse.trier not in ("", candidate.request_id):
            return _why_unpaid(candidate, load, gain, cost)  # another request tries for all
        if purse.num_trials < _TRIAL_DRAFTS:
            purse.trier = candidate.request_id
            purse.num_trials += 1
            return ""
    purse.end_trial(step)
    return _why_unpaid(candidate, load, gain, cost)


def _pays(candidate: DraftCandidate, load: Load, gain: float, cost: StepCost) -> bool:
    """Returns whether the batch is no slower with draft and rows than with neither."""
    num_nodes = len(candidate.tree)
    table = cost.step_seconds_table(load.num_rows, num_nodes, load.num_kv_tokens, load.num_requests)
    saved = min(load.draft_seconds, cost.draft_seconds(candidate.drafter))
    without = load.expected_tokens / (load.draft_seconds - saved + table[0])
    return (load.expected_tokens + gain) / (load.draft_seconds + table[num_nodes]) >= without


def _why_unpaid(candidate: DraftCandidate, load: Load, gain: float, cost: StepCost) -> Reason:
    """Returns whether the request is slowed by its neighbours, or drafts badly: alone it would have its
    share of the context."""
    context = load.num_kv_tokens // max(1, load.num_requests)
    seconds = cost.draft_seconds(candidate.drafter)
    alone = Load(1, load.num_spare_rows, 1, 1.0, context, 1, seconds)
    return "overload" if _pays(candidate, alone, gain, cost) else "low_acceptance"
