"""A rank that follows the first: runs what ``Launch`` names for it, and ends with who launched it.

    python -m engine.process.follower HANDLE

HANDLE is the pipe from the first rank, which launched it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pkgutil import resolve_name

from engine.errors import EngineError
from engine.process.link import Launch, Refused

logger = logging.getLogger(__name__)


def main() -> int:
    # Signals to a whole group are the server's business; this ends when the first rank says so or ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    launch: Launch = control.recv()
    launch.logs.begin()
    threading.Thread(target=_end_with, args=(control,), daemon=True).start()
    try:
        resolve_name(launch.follow)(launch.config)
    except (EngineError, ValueError, OSError) as error:
        logger.error("this rank ends: %s", error)
        control.send(Refused(str(error)))
        return 2
    return 0


def _end_with(control: Connection) -> None:
    """All that is still to come is the word to stop, or the pipe's end."""
    control.poll(None)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
