"""A drafter's part in one request, as whoever asks it keeps it: the engine, or ``auto`` for a guest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafters.base import Drafter, Observation
from drafters.containment import guarded
from drafters.ledger import Gain

_FAILURES_BEFORE_SILENCE = 8
"""A drafter that failed this often for a request is not asked again for it."""


@dataclass(slots=True, eq=False)
class Part:
    """``gain``: what its drafts bring to the request."""

    drafter: Drafter
    gain: Gain
    num_failures: int = field(default=0, init=False)
    num_missed: int = field(default=0, init=False)
    """Tokens at the end of the text that the drafter was not told of yet."""
    has_rested: bool = field(default=True, init=False)
    """It was not asked in the step before, and has to take in what has come since."""
    is_open: bool = field(default=True, init=False)
    """False: the drafter could not start the request."""

    @property
    def name(self) -> str:
        return self.drafter.info.name

    @property
    def is_asked(self) -> bool:
        return self.is_open and self.num_failures < _FAILURES_BEFORE_SILENCE

    def catch_up(self, request_id: str, text: Sequence[int]) -> None:
        """Tells the drafter what it has missed, as one long draft that was accepted."""
        num_missed, self.num_missed = self.num_missed, 0
        if num_missed and self.is_asked:
            seen = Observation.of_missed(request_id, text, num_missed)
            guarded([self], self.drafter.observe, [seen])
