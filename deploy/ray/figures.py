"""The figures of an ingress: where requests went, what was done again, and what was lost.

Replicas know nothing of it: a request that waits before them or whose replica is gone is in no metric of
theirs. The text is without the ingress's own name, which is added as a label where it is shown.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_NAME = "slipstream_gateway"
HOME, SPILLED, UNKEYED = "home", "spilled", "unkeyed"
# Codes of the errors that the ingress itself answers with, clients' mistakes aside.
CODES = ("internal_error", "not_adopted", "queue_full", "replica_lost")
_QUEUE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Figures:
    """Collectors of one ingress, fed from one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{_NAME}_requests",
            "Requests by where a replica took them first.",
            ["route"],
            registry=self.registry,
        )
        self._redone = Counter(
            f"{_NAME}_requests_redone",
            "Requests that another replica took after one was lost.",
            registry=self.registry,
        )
        self._lost = Counter(
            f"{_NAME}_streams_lost",
            "Streams cut short since their replica was gone or ended.",
            registry=self.registry,
        )
        self._errors = Counter(
            f"{_NAME}_errors",
            "Requests that the ingress itself answered with an error.",
            ["code"],
            registry=self.registry,
        )
        self._queue = Histogram(
            f"{_NAME}_queue_seconds",
            "Until a replica took a request.",
            buckets=_QUEUE,
            registry=self.registry,
        )
        self._waiting = Gauge(
            f"{_NAME}_requests_waiting",
            "Requests that no replica has taken yet.",
            registry=self.registry,
        )
        self._open = Gauge(
            f"{_NAME}_requests_open",
            "Requests that a replica has taken and that go on.",
            ["replica"],
            registry=self.registry,
        )
        self._leaving = Gauge(
            f"{_NAME}_replica_leaving",
            "1 for a replica that is given no more requests and has open ones.",
            ["replica"],
            registry=self.registry,
        )
        # A rate needs a series before what it counts happens.
        for route in (HOME, SPILLED, UNKEYED):
            self._requests.labels(route)
        for code in CODES:
            self._errors.labels(code)
        self._open_at: Tally[str] = Tally()

    @contextmanager
    def sent(self, *, is_first: bool) -> Iterator[Callable[[str, str], None]]:
        """A request on its way to a replica, for the length of a block, which calls what it is given with
        the replica that has taken it and the route by which it came there."""
        start = time.perf_counter()
        at: str | None = None

        def taken(replica: str, route: str) -> None:
            nonlocal at
            at = replica
            self._waiting.dec()
            self._open_at[replica] += 1
            self._queue.observe(time.perf_counter() - start)
            if is_first:
                self._requests.labels(route).inc()
            else:
                self._redone.inc()

        self._waiting.inc()
        try:
            yield taken
        finally:
            if at is None:
                self._waiting.dec()
            else:
                self._open_at[at] -= 1
                self._open_at += Tally()  # without those that have none

    def lost_stream(self) -> None:
        self._lost.inc()

    def error(self, code: str | None) -> None:
        self._errors.labels(code if code in CODES else "internal_error").inc()

    def text(self, replicas: Collection[str]) -> str:
        """In Prometheus's text format. ``replicas``: those that are given requests."""
        self._open.clear()
        self._leaving.clear()
        for name in {*replicas, *self._open_at}:
            self._open.labels(name).set(self._open_at[name])
            self._leaving.labels(name).set(name not in replicas)
        return generate_latest(self.registry).decode()
