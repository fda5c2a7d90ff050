"""The other ranks of an engine that shares its model with them: launched by the first, as ``torchrun``
would, and gone with it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from engine.process.launch import child_environment, describe
from engine.process.link import Launch, Refused, Stop
from engine.rank import STORE, Rank

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0
_NETWORK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""All ranks are on this machine, and nobody else is to reach them."""


class _Follower(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]
    control: Connection


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
        self._followers = [self._launch(launch, each, common) for each in ranks[1:]]

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._followers]

    def _launch(self, launch: Launch, rank: Rank, common: dict[str, str]) -> _Follower:
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "engine.process.follower", str(theirs.fileno())],
                pass_fds=[theirs.fileno(), self._store],
                stdin=subprocess.DEVNULL,
                env=child_environment() | common | rank.environment(),
            )
        with suppress(OSError):  # ``watch`` sees that it has gone
            ours.send(launch)
        return _Follower(rank.number, process, ours)

    def watch(self, lost: Callable[[str], None]) -> None:
        """``lost`` is called from a thread, with the reason, when one ends before ``stop``."""
        for each in self._followers:
            threading.Thread(target=self._watch, args=(each, lost), daemon=True).start()

    def _watch(self, follower: _Follower, lost: Callable[[str], None]) -> None:
        reason = ""
        with suppress(EOFError, OSError):
            if isinstance(message := follower.control.recv(), Refused):
                reason = message.reason
        status = follower.process.wait()
        if not self._stopping.is_set():
            lost(f"rank {follower.number}: {reason or f'its process ended: {describe(status)}'}")

    def stop(self) -> None:
        """End those that are left, and wait until they have gone."""
        self._stopping.set()
        for each in self._followers:
            with suppress(OSError):
                each.control.send(Stop())
        for each in self._followers:
            try:
                each.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                each.process.kill()
                each.process.wait()
        os.close(self._store)
