"""A rank that follows the first: runs what ``Launch`` names for it, and ends with its launcher.

    python -m engine.process.follower HANDLE

HANDLE is the pipe from the first rank, which launched it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from pkgutil import resolve_name

from engine.process.link import Link
from engine.process.messages import Launch, Refused
from engine.request.errors import EngineError

logger = logging.getLogger(__name__)


def begin_child() -> tuple[Link, Launch]:
    """The pipe from the process that launched this one, and the first message on it, by which this
    process logs from here on."""
    # A terminal's Ctrl-C and a service manager's SIGTERM reach the whole group: the server drains its
    # requests first and then says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = Link(Connection(int(sys.argv[1])))
    launch: Launch = control.receive()
    launch.logs.begin()
    return control, launch


def main() -> int:
    control, launch = begin_child()
    # All that is still to come is the word to stop, or the pipe's end.
    control.listen_in_thread(lambda _: os._exit(0), lambda: os._exit(0))
    try:
        resolve_name(launch.follow)(launch.config)
    except (EngineError, ValueError, OSError) as error:
        logger.error("this rank ends: %s", error)
        control.send(Refused(str(error)))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
