"""Lets drafters that cost time rest while their drafts do not earn it.

Granting decides after the draft is made, when its price is already paid. So what a request's drafts
earned is held against what making them cost; after each loss in a row the drafter is asked half as
often, at the least every 32nd step, and the first draft that pays brings it back. Drafters that
cost next to nothing never rest: their proposals are also what their acceptance is measured on.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.gamma.base import DraftCandidate, StepCost

_FREE_TOKENS = 0.02
"""A draft that costs less time than the batch takes to write this many tokens counts as free."""
_LONGEST_REST = 32


@dataclass(slots=True)
class _Account:
    num_losses: int = 0
    num_resting_steps: int = 0


class DraftingPrice:
    """One account per request that ever drafted at a loss."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._accounts: dict[str, _Account] = {}

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
        account = self._accounts.get(candidate.request_id)
        if account is not None and account.num_resting_steps > 0:
            account.num_resting_steps -= 1
            return
        price = tokens_per_second * self._cost.draft_seconds(candidate.drafter)
        pays = expected_gain >= price + tokens_per_second * verify_seconds
        if price <= _FREE_TOKENS or pays or candidate.params.min_tokens > 0:
            if account is not None:
                account.num_losses = 0
            return
        if account is None:
            account = self._accounts[candidate.request_id] = _Account()
        account.num_losses += 1
        account.num_resting_steps = min(2 ** (account.num_losses - 1), _LONGEST_REST) - 1

    def forget(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)
