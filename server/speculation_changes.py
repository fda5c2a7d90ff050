"""Where speculation is changed for several processes that speak HTTP: in the one that launched them.

A worker sends what its client wishes (``Change``). It is checked here, once; all workers are told
(``NewSpeculation``) and say that they go by it (``Adopted``); then the client's worker gets its answer
(``Changed``), so that a request that follows finds the change wherever it arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.errors import ApiError
from server.request.live_speculation import SpeculativeChange, changed
from server.request.speculative import SpeculativeResolver
from slipstream.options import SpeculativeParams


@dataclass(frozen=True, slots=True)
class Change:
    """From a worker, question ``number``: change it so."""

    number: int
    change: SpeculativeChange
    from_built_in: bool


@dataclass(frozen=True, slots=True)
class NewSpeculation:
    """To a worker: go by this."""

    version: int
    resolver: SpeculativeResolver


@dataclass(frozen=True, slots=True)
class Adopted:
    """From a worker: it goes by this version or a later one."""

    version: int


@dataclass(frozen=True, slots=True)
class Changed:
    """To a worker: what question ``number`` came to."""

    number: int
    outcome: SpeculativeResolver | ApiError


class Worker(Protocol):
    def send(self, message: Any) -> None: ...


@dataclass(slots=True)
class _Open:
    asker: Worker
    answer: Changed
    waits_for: list[Worker]


class SpeculationChanges:
    """Speculation of all workers. Hold ``lock`` where one is launched with ``resolver`` and becomes one
    of those who are told. ``show`` as in ``OwnSpeculation``. From any thread."""

    def __init__(
        self, resolver: SpeculativeResolver, show: Callable[[SpeculativeParams, bool], None]
    ) -> None:
        self.lock = threading.RLock()
        self.resolver = resolver
        self._show = show
        self._version = 0
        self._open: dict[int, _Open] = {}

    def change(self, asker: Worker, asked: Change, workers: Sequence[Worker]) -> None:
        """Answers with the error, or once all of ``workers`` go by the change or have gone."""
        with self.lock:
            try:
                found = changed(self.resolver, asked.change, from_built_in=asked.from_built_in)
            except ApiError as error:
                asker.send(Changed(asked.number, error))
                return
            self.resolver = found
            self._version += 1
            self._show(found.defaults, True)
            self._open[self._version] = _Open(asker, Changed(asked.number, found), list(workers))
            for worker in workers:
                worker.send(NewSpeculation(self._version, found))
            self._answer()

    def adopted(self, worker: Worker, version: int) -> None:
        self._wait_no_more(worker, version)

    def gone(self, worker: Worker) -> None:
        with self.lock:
            self._wait_no_more(worker, self._version)

    def _wait_no_more(self, worker: Worker, version: int) -> None:
        with self.lock:
            for number, each in self._open.items():
                if number <= version and worker in each.waits_for:
                    each.waits_for.remove(worker)
            self._answer()

    def _answer(self) -> None:
        for number in [number for number, each in self._open.items() if not each.waits_for]:
            done = self._open.pop(number)
            done.asker.send(done.answer)
