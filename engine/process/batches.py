"""Counts which batches are being let in: their choices come one by one, each on its own."""

from __future__ import annotations

from collections import OrderedDict

from engine.request.params import Batch

_MOST_KEPT = 1024
"""Batches whose other choices may still come, or never do, where a client has gone."""


class Batches:
    """Not for several threads at once."""

    def __init__(self) -> None:
        self._num_in: OrderedDict[str, int] = OrderedDict()

    def counted(self, batch: Batch | None) -> tuple[int, int]:
        """Returns how many choices of a batch are in, and how many need a place with the next one; None:
        of one choice."""
        if batch is None:
            return 0, 1
        num_in = self._num_in.get(batch.name, 0)
        return num_in, 1 if batch.num_at_once else batch.num_choices - num_in

    def add(self, batch: Batch | None) -> None:
        """One more choice of it is in."""
        if batch is None:
            return
        num_in = self._num_in.pop(batch.name, 0) + 1
        if num_in < batch.num_choices:
            self._num_in[batch.name] = num_in
        if len(self._num_in) > _MOST_KEPT:
            self._num_in.popitem(last=False)
