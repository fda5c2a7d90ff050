"""Which replica a request goes to. The same code routes simulated fleets and real ones.

A router counts what it has sent where and what of it is done; it asks no replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from hashlib import blake2b
from typing import Protocol

import numpy as np

_NUM_RANKED = 8
"""Replicas that a key may go to before it goes to the least loaded of all."""


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
    """To whoever has fewest open requests, the lowest number among equals."""

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
        """Count a request for this one, whoever chose it."""
        self._move(replica, 1)
        return replica

    def done(self, replica: int) -> None:
        self._move(replica, -1)

    def _move(self, replica: int, change: int) -> None:
        self.loads[replica] += change
        heapq.heappush(self._heap, (self.loads[replica], replica))


class Affinity:
    """To the replica that ranks first for the key by rendezvous hashing, as long as it has no more than
    ``spill`` times the mean number of open requests, and two; else to the next in rank; where none of
    the first eight has room, to the least loaded.

    A replica more or less moves no keys but those that it takes or had.
    """

    def __init__(self, num_replicas: int, spill: float = 1.5) -> None:
        """Raises ValueError for a ``spill`` below 1: then nobody might have room."""
        if not spill >= 1:
            raise ValueError("spill must be at least 1")
        self._least = LeastLoaded(num_replicas)
        self._spill = spill
        self._num_open = 0
        self._salts = _mixed(np.arange(1, num_replicas + 1, dtype=np.uint64))
        self._ranked: dict[str, list[int]] = {}

    def ranked(self, key: str) -> list[int]:
        """The first replicas for a key, best first."""
        found = self._ranked.get(key)
        if found is None:
            digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            scores = _mixed(self._salts ^ np.uint64(int.from_bytes(digest, "little")))
            count = min(_NUM_RANKED, len(scores))
            best = np.argpartition(scores, len(scores) - count)[-count:]
            found = self._ranked[key] = sorted(best.tolist(), key=lambda each: -int(scores[each]))
        return found

    def send(self, key: str) -> int:
        loads = self._least.loads
        self._num_open += 1
        bound = max(2.0, self._spill * self._num_open / len(loads))
        for replica in self.ranked(key):
            if loads[replica] + 1 <= bound:
                return self._least.take(replica)
        return self._least.send(key)

    def done(self, replica: int) -> None:
        self._num_open -= 1
        self._least.done(replica)


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's last steps: every bit of the input moves half of the output's."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "affinity": Affinity,
}
"""By the name that the command line knows."""
