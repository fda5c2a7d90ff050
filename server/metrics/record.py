"""The record of a request, written while it is answered, for those who watch from outside.

It is plain data: a watcher puts an empty ``RequestRecord`` into the request's scope and reads it when
the answer has ended. Where nobody does, nothing is written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.request.events import FinishInfo, TokenEvent
from server.plan import ChoicePlan, RequestPlan

RECORD_KEY = "slipstream.record"
MAX_STEPS = 128
"""Most steps of a choice of which each is written down."""


@dataclass(slots=True)
class ChoiceRecord:
    """``steps``: the first, with the times when they came, in ns since 1970; ``num_steps`` counts all.
    ``outcome`` as in the metrics; ``finish_reason`` and ``num_tokens`` as in the reply, and so many of
    ``token_ids`` are in it. ``info`` is None where it did not come to an end of its own; then all that
    was written counts."""

    plan: ChoicePlan
    steps: list[tuple[int, TokenEvent]] = field(default_factory=list)
    num_steps: int = 0
    outcome: str = "error"
    finish_reason: str | None = None
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    info: FinishInfo | None = None

    def add(self, event: TokenEvent) -> None:
        """A step's."""
        self.num_steps += 1
        self.token_ids.extend(event.token_ids)
        self.num_tokens = len(self.token_ids)
        if self.num_steps <= MAX_STEPS:
            self.steps.append((time.time_ns(), event))
        self.info = event.finish


@dataclass(slots=True)
class RequestRecord:
    """``plan`` is None while the body has not been read, or was refused."""

    plan: RequestPlan | None = None
    choices: list[ChoiceRecord] = field(default_factory=list)

    def begin(self, plan: RequestPlan) -> None:
        self.plan = plan
        self.choices = [ChoiceRecord(choice) for choice in plan.choices]
