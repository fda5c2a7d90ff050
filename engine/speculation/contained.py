"""Requests that draft, and calls of their drafters, which may come from outside.

A drafter that raises, tries to end the program or gives back what it may not costs its request the draft
of that step, never the request or the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from drafters.base import Drafter, Observation
from drafters.checks import count_of, is_interrupt
from drafters.tree import chain
from engine.schedule.request import Request, ScheduledRequest
from engine.speculation.acceptance import Acceptance

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FAILURES_BEFORE_SILENCE = 8
"""A drafter that failed this often for a request is not asked again for it."""


@dataclass(slots=True)
class Drafting:
    """State of a request that drafts."""

    drafter: Drafter
    acceptance: Acceptance
    num_failures: int = 0
    is_open: bool = True
    """False: the drafter could not start the request."""
    num_missed: int = 0
    """Tokens at the end of the text that the drafter was not told of yet."""

    @property
    def name(self) -> str:
        return self.drafter.info.name

    @property
    def is_asked(self) -> bool:
        return self.is_open and self.num_failures < _FAILURES_BEFORE_SILENCE

    def is_told(self, each: ScheduledRequest) -> bool:
        """Returns whether the drafter hears of this step at once, not when it is asked again: it was
        asked, or keeps the target's states or a window of its own."""
        needs = self.drafter.info.needs
        keeps_more = needs.hidden_rows or needs.draft_slots or needs.all_or_nothing
        return each.num_asked > 0 or keeps_more or bool(needs.draft_model)

    def catch_up(self, request: Request) -> None:
        """Tell the drafter what it has missed, as one long draft that was accepted."""
        num_missed, self.num_missed = self.num_missed, 0
        if not num_missed or not self.is_asked:
            return
        missed = request.token_ids[-num_missed:]
        seen = Observation(
            request.request_id,
            request.token_ids,
            chain(missed[:-1]),
            missed,
            range(num_missed),
            missed,
        )
        guarded([self], self.drafter.observe, [seen])

    def counted(self, most: int | None, call: Callable[..., object], *args: Any) -> int:
        """Returns what ``call`` returns where that is a count up to ``most``; else it has failed, for
        0."""
        return guarded([self], lambda: count_of(call(*args), most)) or 0


def guarded(blamed: Sequence[Drafting], call: Callable[..., _Result], *args: Any) -> _Result | None:
    """Returns what ``call`` returns; None where it raises, which counts as a failure of these."""
    try:
        return call(*args)
    except BaseException as error:
        if is_interrupt(error):
            raise
        for each in blamed:
            each.num_failures += 1
        logger.exception("drafter %s failed", blamed[0].name if blamed else "of several requests")
        return None
