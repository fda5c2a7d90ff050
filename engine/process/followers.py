"""The other ranks of an engine that shares its model with them: launched by the first, as ``torchrun``
would, and gone with it."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from engine.process.launch import Child, describe, launch_child
from engine.process.link import PeerGoneError
from engine.process.messages import Launch, Refused, Stop
from engine.ranks.rank import STORE, Rank

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""All ranks are on this machine, and nobody else is to reach them."""


class Followers:
    """Ranks 1 and up, each a process; they end when this one does, by whatever end. ``environment``: what
    this process says of itself to become rank 0."""

    def __init__(self, launch: Launch) -> None:
        size = launch.config.tensor_parallel_size
        # Where ranks find each other: a file without a name, so that none is left behind.
        self._store = os.memfd_create("ranks")
        common = {STORE: f"/proc/self/fd/{self._store}", **_NETWORK}
        ranks = [Rank(number, size, number, size) for number in range(size)]
        self.environment = common | ranks[0].environment()
        self._stopping = threading.Event()
        self._children = [self._launch(launch, common | each.environment()) for each in ranks[1:]]

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._children]

    def _launch(self, launch: Launch, environment: dict[str, str]) -> Child:
        child = launch_child("engine.process.follower", self._store, environment=environment)
        child.link.send(launch)
        return child

    def watch(self, lost: Callable[[str], None]) -> None:
        """``lost`` is called from a thread, with the reason, when one ends before ``stop``."""
        for number, child in enumerate(self._children, 1):
            threading.Thread(target=self._watch, args=(number, child, lost), daemon=True).start()

    def _watch(self, number: int, child: Child, lost: Callable[[str], None]) -> None:
        reason = ""
        with suppress(PeerGoneError):
            refused: Refused = child.link.receive()
            reason = refused.reason
        status = child.process.wait()
        if not self._stopping.is_set():
            lost(f"rank {number}: {reason or f'its process ended: {describe(status)}'}")

    def stop(self) -> None:
        """End those that are left, and wait until they have gone."""
        self._stopping.set()
        for child in self._children:
            child.link.send(Stop())
        for child in self._children:
            child.end(_END_SECONDS)
        os.close(self._store)
