"""Backs off from drafters whose drafts do not earn the time they take.

Granting decides after the draft is made, when its price is already paid. So what a request's drafts
earned is held against what making them cost; after each loss in a row the drafter is asked half as
often, at the least every 32nd step, and the first draft that pays brings it back. Drafters that
cost next to nothing never rest: their proposals are also what their acceptance is measured on.

Some drafts have rows that are there for later steps (the window of Lookahead, the guesses of Jacobi):
they are granted whole or not at all, and what one is expected to gain now says too little. It is worth
what such drafts have gained lately: accepted tokens per verified draft, a discounted mean over those of
all requests with that drafter. Where that does not pay for the rows, a few more drafts may show that
it could, if it would pay at the gain that is hoped for; then the drafter rests, each time twice as long
as the time before. Where many drafts of other requests did not pay, a new request begins with a rest,
and a long one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.speculation.gamma.policy import DraftCandidate, Grant, Load, StepCost
from engine.stats import Reason

_FREE_TOKENS = 0.02
"""A draft that costs less time than the batch takes to write this many tokens counts as free."""
_LONGEST_REST = 32
_HOPED_GAIN = 1.0
"""Tokens per draft: what is believed of a drafter nobody has tried, and what a trial may show."""
_STRENGTH = 4.0
_DECAY = 0.95
_SHARED_DECAY = 0.995
_TRIAL_DRAFTS = 6
"""In a row, before the result counts: a window needs some steps before it yields n-grams."""
_KNOWN_WEIGHT = 4.0 * _TRIAL_DRAFTS
"""Drafts of all requests after which what they gained tells what a trial would."""
_LOSSES_OF_THE_KNOWN = 3
"""A new request's first rest is as long as after so many lost trials: four times a trial."""


@dataclass(slots=True)
class _Losses:
    num_losses: int = 0
    num_resting_steps: int = 0


class Backoff:
    """One account per request that ever drafted at a loss."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._accounts: dict[str, _Losses] = {}

    def is_resting(self, request_id: str) -> bool:
        account = self._accounts.get(request_id)
        return account is not None and account.num_resting_steps > 0

    def record(
        self,
        candidate: DraftCandidate,
        expected_gain: float,
        tokens_per_second: float,
        verify_seconds: float,
    ) -> None:
        """Settle one step: ``expected_gain`` tokens for the draft's and its rows' time."""
        if self.pass_rest(candidate.request_id):
            return
        price = tokens_per_second * self._cost.draft_seconds(candidate.drafter)
        pays = expected_gain >= price + tokens_per_second * verify_seconds
        if price <= _FREE_TOKENS or pays or candidate.params.min_draft_tokens > 0:
            self.reset(candidate.request_id)
        else:
            self.back_off(candidate.request_id)

    def pass_rest(self, request_id: str) -> bool:
        """Whether the request rested in this step, which is then over."""
        account = self._accounts.get(request_id)
        if account is None or account.num_resting_steps == 0:
            return False
        account.num_resting_steps -= 1
        return True

    def reset(self, request_id: str) -> None:
        """A draft paid: the next loss is the first again."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.num_losses = 0

    def back_off(self, request_id: str, num_steps: int = 1, num_losses: int = 1) -> None:
        """A draft, or a trial over ``num_steps`` of them, did not pay; the rest is in proportion.

        It counts as ``num_losses`` in a row.
        """
        account = self._accounts.setdefault(request_id, _Losses())
        account.num_losses += num_losses
        rest = min(2 ** (account.num_losses - 1), _LONGEST_REST)
        account.num_resting_steps = rest * num_steps - 1

    def forget(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)


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
class _Account:
    drafter: str
    gain: _Gain = field(default_factory=_Gain)
    num_trials: int = 0
    """Drafts granted since the last rest although they did not pay."""
    has_rested: bool = False


class AllOrNothing:
    """One account per request that offered such a draft; rests are kept by ``backoff``."""

    def __init__(self, cost: StepCost, backoff: Backoff) -> None:
        self._cost = cost
        self._backoff = backoff
        self._accounts: dict[str, _Account] = {}
        self._shared: dict[str, _Gain] = {}

    def grant(self, candidate: DraftCandidate, load: Load) -> tuple[Grant, Load]:
        """The grant of a draft that is not empty, and the load with it."""
        account = self._account(candidate)
        gain = max(self.expected_gain(candidate), sum(candidate.survivals))
        reason = self._refusal(candidate, load, account, gain)
        if reason:
            return Grant(candidate.request_id, (), reason), load
        num_nodes = len(candidate.tree)
        load = load._replace(
            num_rows=load.num_rows + num_nodes,
            num_spare_rows=load.num_spare_rows - num_nodes,
            expected_tokens=load.expected_tokens + gain,
        )
        return Grant(candidate.request_id, range(num_nodes), ""), load

    def observe(self, request_id: str, num_accepted: int) -> None:
        """A draft was verified. Requests that never offered a whole one are ignored."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.gain.add(num_accepted, _DECAY)
            self._shared.setdefault(account.drafter, _Gain()).add(num_accepted, _SHARED_DECAY)

    def forget(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)

    def expected_gain(self, candidate: DraftCandidate) -> float:
        """Tokens that a draft of this request gains in the long run."""
        shared = self._shared.get(candidate.drafter, _Gain()).over(_HOPED_GAIN)
        return self._account(candidate).gain.over(shared)

    def _account(self, candidate: DraftCandidate) -> _Account:
        account = self._accounts.get(candidate.request_id)
        if account is None:
            account = self._accounts[candidate.request_id] = _Account(candidate.drafter)
        return account

    def _refusal(
        self, candidate: DraftCandidate, load: Load, account: _Account, gain: float
    ) -> Reason:
        """Why the draft is not granted, "" if it is; the outcome is settled with ``backoff``."""
        params, num_nodes = candidate.params, len(candidate.tree)
        if num_nodes > min(candidate.max_nodes, params.max_draft_tokens):
            return candidate.cap_reason
        if num_nodes > load.num_spare_rows:
            return "overload"
        target_rate = params.target_acceptance_rate
        if target_rate is not None and gain < target_rate * num_nodes:
            return self._refuse(candidate, account, "policy")
        if params.min_draft_tokens > 0 or self._pays(candidate, load, gain):
            account.num_trials = 0
            self._backoff.reset(candidate.request_id)
            return ""
        hoped = max(gain, _HOPED_GAIN)
        may_try = account.num_trials < _TRIAL_DRAFTS and not self._rests_first(account)
        if may_try and self._pays(candidate, load, hoped):
            account.num_trials += 1
            return ""
        pays_alone = self._pays(candidate, self._alone(candidate, load), gain)
        return self._refuse(candidate, account, "overload" if pays_alone else "low_acceptance")

    def _refuse(self, candidate: DraftCandidate, account: _Account, reason: Reason) -> Reason:
        if self._rests_first(account):
            self._backoff.back_off(candidate.request_id, _TRIAL_DRAFTS, _LOSSES_OF_THE_KNOWN)
        else:
            self._backoff.back_off(candidate.request_id, max(1, account.num_trials))
        account.num_trials = 0
        account.has_rested = True
        return reason

    def _rests_first(self, account: _Account) -> bool:
        shared = self._shared.get(account.drafter)
        is_known = shared is not None and shared.weight >= _KNOWN_WEIGHT
        return is_known and not account.num_trials and not account.has_rested

    def _pays(self, candidate: DraftCandidate, load: Load, gain: float) -> bool:
        """Whether the batch is no slower with draft and rows than with neither."""
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
        return Load(
            num_rows=1,
            num_spare_rows=load.num_spare_rows,
            num_sampling_requests=1,
            expected_tokens=1.0,
            num_kv_tokens=context,
            num_requests=1,
            draft_seconds=self._cost.draft_seconds(candidate.drafter),
        )
