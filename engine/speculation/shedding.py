"""Drafts yield before requests do: what is shed while many requests wait.

A draft that pays makes the queue shorter, and policies that weigh cost grant no others. Those that do
not grant drafts whatever the rows cost, and so does a ``min_speculative_tokens``: these are unpaid.
Blocks need no rule: a lease takes none but free ones, and gives them back before the next request is
planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.config import ShedSpeculation
from engine.request.params import SpeculativeParams


@dataclass(frozen=True, slots=True)
class Shedding:
    """``num_waiting``: from so many waiting requests on."""

    which: ShedSpeculation = "never"
    num_waiting: int = 1

    def is_shed(self, num_waiting: int, weighs_cost: bool) -> bool:
        """Returns whether a request whose policy ``weighs_cost`` or does not goes without a draft."""
        if self.which == "never" or num_waiting < self.num_waiting:
            return False
        return self.which == "all" or not weighs_cost

    def params(self, params: SpeculativeParams, num_waiting: int) -> SpeculativeParams:
        """As they are, or with nothing granted for certain."""
        if not params.min_speculative_tokens or not self.is_shed(num_waiting, weighs_cost=False):
            return params
        return replace(params, min_speculative_tokens=0)
