"""Responses that requests may go on from, in memory: by tenant and id, as JSON."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from threading import Lock

from engine.process.link import Acts

MAX_RESPONSES = 4096
AskStore = Callable[..., Awaitable[bytes | None]]
"""Takes the name of a method of ``ResponseStore`` and its arguments, wherever the store is."""


class ResponseStore:
    """Holds at most ``MAX_RESPONSES`` of ``max_bytes`` together. The tenant with most bytes loses first:
    what it used least recently. Any thread may call."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._kept: dict[str, OrderedDict[str, bytes]] = {}
        self.acts: Acts = {"keep": self.keep, "find": self.find, "drop": self.drop}

    async def ask(self, act: str, *arguments: bytes | str) -> bytes | None:
        found: bytes | None = self.acts[act](*arguments)
        return found

    def keep(self, tenant: str, response_id: str, record: bytes) -> None:
        with self._lock:
            self._kept.setdefault(tenant, OrderedDict())[response_id] = record
            while self._is_over():
                largest = max(self._kept.values(), key=_num_bytes)
                largest.popitem(last=False)

    def find(self, tenant: str, response_id: str) -> bytes | None:
        with self._lock:
            own = self._kept.get(tenant, OrderedDict())
            if response_id in own:
                own.move_to_end(response_id)
            return own.get(response_id)

    def drop(self, tenant: str, response_id: str) -> bytes | None:
        """Returns what was dropped."""
        with self._lock:
            return self._kept.get(tenant, OrderedDict()).pop(response_id, None)

    def _is_over(self) -> bool:
        every = self._kept.values()
        too_many = sum(map(len, every)) > MAX_RESPONSES
        return too_many or sum(map(_num_bytes, every)) > self._max_bytes


def _num_bytes(kept: OrderedDict[str, bytes]) -> int:
    return sum(map(len, kept.values()))
