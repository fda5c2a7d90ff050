"""Chooses the replica for a request, so that prompts with a common beginning share a cache. The ingress
under Ray Serve (``deploy/ray``) and the simulation both use this rule.

A key has its own order among replicas (rendezvous hashing, Thaler and Ravishankar 1998), so a replica
that comes or goes moves only the keys that it takes or had. A request goes to the first of its key's
first eight replicas that has room, and to the least loaded if none of them has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

import numpy as np

_NUM_RANKED = 8


def hashed(names: Iterable[str]) -> np.ndarray:
    """A number for each name of a replica or key: uint64, of shape (names,)."""
    digests = (blake2b(each.encode("utf-8", "surrogatepass"), digest_size=8) for each in names)
    return np.array([int.from_bytes(each.digest(), "little") for each in digests], dtype=np.uint64)


def first_of(key: str, replicas: np.ndarray) -> list[int]:
    """The first eight of the key's order, best first, as places in ``replicas``, which is ``hashed``."""
    if not len(replicas):
        return []
    scores = _mixed(replicas ^ hashed([key])[0])
    count = min(_NUM_RANKED, len(scores))
    best = np.argpartition(scores, len(scores) - count)[-count:]
    return sorted(best.tolist(), key=lambda each: -int(scores[each]))


def most_open(
    num_open: int, num_replicas: int, load_factor: float = 1.5, free_requests: int = 8
) -> int:
    """Requests at which a replica has no room for another, where ``num_open`` are open at all of them:
    ``load_factor`` times the mean, that one included, and ``free_requests`` at least."""
    return max(free_requests, math.ceil(load_factor * (num_open + 1) / num_replicas))


def preferred(
    key: str | None,
    loads: Mapping[str, int],
    avoid: Collection[str] = (),
    *,
    load_factor: float = 1.5,
    free_requests: int = 8,
) -> list[str]:
    """The replicas in the order in which to try them; none of none. ``loads``: their open requests.

    After the first eight of the key's order that have room, the rest comes by load; those to ``avoid``
    come last. Without a key all come by load.
    """
    names = sorted(loads)
    order = sorted(names, key=loads.__getitem__)
    if key is not None and names:
        most = most_open(sum(loads.values()), len(names), load_factor, free_requests)
        first = [names[each] for each in first_of(key, hashed(names))]
        order = [each for each in first if loads[each] < most] + order
    return sorted(dict.fromkeys(order), key=lambda each: each in avoid)


def home(key: str, replicas: Iterable[str]) -> str:
    """The replica that the key belongs to, however busy: the first of its order."""
    names = sorted(replicas)
    return names[first_of(key, hashed(names))[0]]


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's last steps: every bit of the input moves half of the output's."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
