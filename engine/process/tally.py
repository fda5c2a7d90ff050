"""Tells of steps now and then instead of one by one: to pack a step's figures, unpack and count them
takes longer than all else that is done for a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.request.stats import StepStats

TELL_SECONDS = 0.05
"""The longest delay of statistics while the same requests go on."""


class StepTally:
    """Adds steps up until it is time to tell of them. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sum: StepStats | None = None
        self._due = 0.0
        self._num_requests = (0, 0)

    def add(self, step: StepStats, *, some_end: bool) -> list[StepStats]:
        """Adds the next step, and returns the statistics to send now, in order, with steps of one kind
        summed. Steps in which requests come or go, as ``some_end`` or the gauges show, are sent at
        once: a finished reply is then already counted, and nothing is left over when no step follows."""
        told = []
        if self._sum is None:
            self._sum = step
        elif self._sum.goes_on_with(step):
            self._sum.add(step)
        else:
            told.append(self._sum)
            self._sum = step
        now = self._clock()
        num_requests = step.num_running, step.num_waiting
        if some_end or num_requests != self._num_requests or now >= self._due:
            told.append(self._sum)
            self._sum = None
            self._num_requests = num_requests
            self._due = now + TELL_SECONDS
        return told
