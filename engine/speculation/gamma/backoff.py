"""Lets drafters that cost time rest while their drafts do not earn it.

Granting decides after the draft is made, when its price is already paid. So what a request's drafts
earned is held against what making them cost; after each loss in a row the drafter is asked half as
often, at the least every 32nd step, and the first draft that pays brings it back. Drafters that
cost next to nothing never rest: their proposals are also what their acceptance is measured on.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.speculation.gamma.policy import DraftCandidate, StepCost

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
        if self.pass_rest(candidate.request_id):
            return
        price = tokens_per_second * self._cost.draft_seconds(candidate.drafter)
        pays = expected_gain >= price + tokens_per_second * verify_seconds
        if price <= _FREE_TOKENS or pays or candidate.params.min_tokens > 0:
            self.win(candidate.request_id)
        else:
            self.lose(candidate.request_id)

    def pass_rest(self, request_id: str) -> bool:
        """Whether the request rested in this step, which is then over."""
        account = self._accounts.get(request_id)
        if account is None or account.num_resting_steps == 0:
            return False
        account.num_resting_steps -= 1
        return True

    def win(self, request_id: str) -> None:
        """A draft paid: the next loss is the first again."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.num_losses = 0

    def lose(self, request_id: str, num_steps: int = 1, num_losses: int = 1) -> None:
        """A draft, or a trial over ``num_steps`` of them, did not pay; the rest is in proportion.

        It counts as ``num_losses`` in a row.
        """
        account = self._accounts.setdefault(request_id, _Account())
        account.num_losses += num_losses
        rest = min(2 ** (account.num_losses - 1), _LONGEST_REST)
        account.num_resting_steps = rest * num_steps - 1

    def forget(self, request_id: str) -> None:
        self._accounts.pop(request_id, None)
