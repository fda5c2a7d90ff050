"""The engine's time that one request's grammar may take: a share of each step's.

All requests of a step wait for each other's masks. A request over its share drafts less, then not at all,
then sits out steps until its shares have made up for it; where single rows take far too long, its text is
cut. Time never decides which tokens a mask allows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MAX_ROW_SECONDS = 0.1
_MAX_NUM_OVER = 3
_MAX_SAVED_SHARES = 8
_DECAY = 0.75


class MaskTime:
    """``clock``: seconds of processor time of the calling thread; a busy machine does not stretch them.

    ``spent``: in this step so far. ``owed``: taken beyond all shares; what was left of them is below 0.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        self.spent = 0.0
        self.owed = 0.0
        self._share = 0.0
        self._row_seconds = 0.0
        self._num_over = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            self.spent += self.clock() - start

    def begin_step(self, share: float) -> None:
        self._share = share
        self.owed = max(self.owed, (1 - _MAX_SAVED_SHARES) * share) - share

    @property
    def num_affordable_drafts(self) -> int:
        """Draft rows that fit into the share beside the anchor's, by what rows took before."""
        return int(self._share / self._row_seconds) - 1 if self._row_seconds else sys.maxsize

    def is_spent(self, since: float = 0.0) -> bool:
        """Whether the step's share is used up by what was spent after ``since``. Without one there is no
        limit."""
        return 0 < self._share <= self.spent - since

    def end_step(self, num_rows: int) -> str:
        """``num_rows`` were masked. Returns why the text has to be cut; "" where it need not be."""
        latest = self.spent / max(1, num_rows)
        self.owed += self.spent
        self.spent = 0.0
        self._row_seconds = max(latest, _DECAY * self._row_seconds)
        self._num_over = self._num_over + 1 if latest > _MAX_ROW_SECONDS else 0
        is_cut = self._num_over >= _MAX_NUM_OVER
        return f"takes too long: {latest:.2f} s for a token" if is_cut else ""
