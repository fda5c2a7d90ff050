"""Which replica a request goes to. The same code routes simulated fleets and real ones.

A router counts what it has sent where and what of it is done; it asks no replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from slipstream.tools.simulate.affinity import first_of, hashed, most_open


class Router(Protocol):
    """Replicas are numbered from 0."""

    def send(self, key: str) -> int:
        """The replica for a request of this tenant or prefix, which it has from now on."""

    def done(self, replica: int) -> None:
        """A request of this replica has ended."""


class RoundRobin:
    """One after the other."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._next = 0

    def send(self, key: str) -> int:
        del key
        replica = self._next
        self._next = (replica + 1) % self._num_replicas
        return replica

    def done(self, replica: int) -> None:
        """Nothing is counted."""


class LeastLoaded:
    """Routes to the replica with the fewest open requests, the lowest number among equals."""

    def __init__(self, num_replicas: int) -> None:
        self.loads = [0] * num_replicas
        # Entries that are out of date are passed over when they come up.
        self._heap = [(0, replica) for replica in range(num_replicas)]

    def send(self, key: str) -> int:
        del key
        while self._heap[0][0] != self.loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self.take(self._heap[0][1])

    def take(self, replica: int) -> int:
        """Count a request for this replica, whatever chose it."""
        self._move(replica, 1)
        return replica

    def done(self, replica: int) -> None:
        self._move(replica, -1)

    def _move(self, replica: int, change: int) -> None:
        self.loads[replica] += change
        heapq.heappush(self._heap, (self.loads[replica], replica))


class Affinity:
    """Routes by ``slipstream.tools.simulate.affinity``, whose parameters these are."""

    def __init__(self, num_replicas: int, load_factor: float = 1.5, free_requests: int = 8) -> None:
        """Raises ValueError for a ``load_factor`` below 1, since then possibly no replica would have
        room."""
        if not load_factor >= 1:
            raise ValueError("load_factor must be at least 1")
        self._least = LeastLoaded(num_replicas)
        self._limits = (load_factor, free_requests)
        self._num_open = 0
        self._replicas = hashed(map(str, range(num_replicas)))
        self._first: dict[str, list[int]] = {}

    def first(self, key: str) -> list[int]:
        """The first replicas of the key's order."""
        found = self._first.get(key)
        if found is None:
            found = self._first[key] = first_of(key, self._replicas)
        return found

    def send(self, key: str) -> int:
        loads = self._least.loads
        most = most_open(self._num_open, len(loads), *self._limits)
        self._num_open += 1
        for replica in self.first(key):
            if loads[replica] < most:
                return self._least.take(replica)
        return self._least.send(key)

    def done(self, replica: int) -> None:
        self._num_open -= 1
        self._least.done(replica)


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "affinity": Affinity,
}
"""Routings by their names on the command line."""
