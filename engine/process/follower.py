"""The other ranks of an engine that shares its model with them: launched by the first, as ``torchrun``
would, and gone with it.

    python -m engine.process.follower PIPE

runs what ``Launch`` names for such a rank. PIPE is the handle of the pipe from the first one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pkgutil import resolve_name

from engine.process.launch import (
    Child,
    Launch,
    begin_child,
    describe,
    ignore_signals,
    launch_child,
)
from engine.process.link import PeerGoneError
from engine.ranks.rank import STORE, Rank
from engine.request.errors import EngineError

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""All ranks are on this machine, and no other host needs to reach them."""


class Followers:
    """Ranks 1 and up, each a process; they end when this one does, by whatever end. ``environment``: what
    this process says of itself to become rank 0."""

    def __init__(self, launch: Launch) -> None:
        size = launch.config.tensor_parallel_size
        # Where ranks find each other: a file without a name, so that none is left behind.
        self._store = os.memfd_create("ranks")
        common = {STORE: f"/proc/self/fd/{self._store}", **_NETWORK}
        first, *others = (
            common | Rank(number, size, number, size).environment() for number in range(size)
        )
        self.environment = first
        self._stopping = threading.Event()
        self._children = [
            launch_child("engine.process.follower", launch, self._store, environment=each)
            for each in others
        ]

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._children]

    def watch(self, lost: Callable[[str], None]) -> None:
        """``lost`` is called from a thread, with the reason, when one ends before ``stop``."""
        for number, child in enumerate(self._children, 1):
            threading.Thread(target=self._watch, args=(number, child, lost), daemon=True).start()

    def _watch(self, number: int, child: Child, lost: Callable[[str], None]) -> None:
        reason = ""
        with suppress(PeerGoneError):
            reason = str(child.link.receive())
        status = child.process.wait()
        if not self._stopping.is_set():
            lost(f"rank {number}: {reason or f'its process ended: {describe(status)}'}")

    def stop(self) -> None:
        """End the remaining ones, and wait until they have gone."""
        self._stopping.set()
        for child in self._children:
            child.link.call("stop")
        for child in self._children:
            child.end(_END_SECONDS)
        os.close(self._store)


def main() -> int:
    ignore_signals()
    control, launch = begin_child()
    control.listen_in_thread({"stop": lambda: os._exit(0)}, lambda: os._exit(0))
    try:
        resolve_name(launch.follow)(launch.config)
    except (EngineError, ValueError, OSError) as error:
        logger.error("this rank ends: %s", error)
        control.send(EngineError(str(error)))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
