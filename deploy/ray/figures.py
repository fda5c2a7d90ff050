"""The figures of an ingress: where requests went, what was done again, and what was lost.

Replicas know nothing of it: a request that waits before them or whose replica is gone is in no metric of
theirs. The text is without the ingress's own name, which is added as a label where it is shown.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_NAME = "slipstream_gateway"
HOME, SPILLED, UNKEYED = "home", "spilled", "unkeyed"
# Codes of the errors that the ingress itself answers with, clients' mistakes aside.
CODES = ("internal_error", "not_adopted", "queue_full", "replica_lost")
_QUEUE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Figures:
    """Collectors of one ingress, fed from one event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{_NAME}_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"{_NAME}_{name}", text, labels, registry=self.registry)

        self._requests = counter(
            "requests", "Requests by where a replica took them first.", "route"
        )
        self._redone = counter(
            "requests_redone", "Requests that another replica took after one was lost."
        )
        self._lost = counter(
            "streams_lost", "Streams cut short since their replica was gone or ended."
        )
        self._errors = counter(
            "errors", "Requests that the ingress itself answered with an error.", "code"
        )
        self._queue = Histogram(
            f"{_NAME}_queue_seconds",
            "Until a replica took a request.",
            buckets=_QUEUE,
            registry=self.registry,
        )
        self._waiting = gauge("requests_waiting", "Requests that no replica has taken yet.")
        self._open = gauge(
            "requests_open", "Requests that a replica has taken and that go on.", "replica"
        )
        self._leaving = gauge(
            "replica_leaving",
            "1 for a replica that is given no more requests and has open ones.",
            "replica",
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


class _Found(Collector):
    def __init__(self, families: Mapping[str, Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families.values()


def merge(texts: Mapping[str, str], label: str = "replica") -> bytes:
    """Expositions in Prometheus's text format, by the name of who made them, as one; every sample of the
    result has that name as this label."""
    families: dict[str, Metric] = {}
    for source, text in sorted(texts.items()):
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for each in family.samples:
                kept.add_sample(each.name, {**each.labels, label: source}, each.value)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found(families))
    return generate_latest(registry)
