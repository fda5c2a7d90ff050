"""A drafter's acceptance of late beside its own past: how drafts that go stale are seen.

What is compared is the share of first drafts that were accepted. It does not change with gamma, as the
share of all draft tokens does, of which deeper ones are right less often. Older steps count less, by the
draft tokens verified since. The past reaches back over many draft tokens and over a day of the engine's
work, whichever is more: a busy server verifies as many in minutes, and its past would follow what it is
compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

from engine.request.stats import SpeculativeStats

RECENT_TOKENS = 2_000
PAST_TOKENS = 200_000
PAST_SECONDS = 86_400.0


@dataclass(slots=True)
class _Discounted:
    """Sums in which older steps count less; their ratio is a weighted mean from the first step on."""

    drafts: float = 0.0
    accepted: float = 0.0

    def add(self, age: float, drafts: int, accepted: int) -> None:
        """``age``: how much older everything before gets, in lifetimes."""
        kept = exp(-age)
        self.drafts = kept * self.drafts + drafts
        self.accepted = kept * self.accepted + accepted

    def rate(self) -> float:
        """Returns the share accepted, 0 to 1."""
        return self.accepted / self.drafts


@dataclass(slots=True)
class AcceptanceDrift:
    """One drafter's: ``recent``, over about 2,000 draft tokens, and its ``past``, what is late included.
    Rates are there once ``observe`` was given a step with a draft."""

    recent: _Discounted = field(default_factory=_Discounted)
    past: _Discounted = field(default_factory=_Discounted)

    def observe(self, stats: SpeculativeStats, seconds: float) -> None:
        """Takes a step in which ``stats`` has drafts; ``seconds``: how long it took."""
        tokens, drafts = stats.num_draft_tokens, stats.num_drafts
        accepted = stats.num_steps - stats.accepted[0]
        self.recent.add(tokens / RECENT_TOKENS, drafts, accepted)
        self.past.add(min(tokens / PAST_TOKENS, seconds / PAST_SECONDS), drafts, accepted)
