"""Trials of grammars (``trial.py``) in a process of their own, which a grammar may break or keep busy.

    python -m engine.grammar.trial_process PIPE

begins with the first grammar, and anew after one that ended it. It ends with the process that began it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NamedTuple

from engine.grammar.trial import fault_of
from engine.grammar.vocabulary import Vocabulary
from engine.request.errors import RequestFailedError

CPU_SECONDS = 1.5
"""The limit for a trial, including compilation. CPU time, so a busy machine refuses nothing more."""
_WALL_SECONDS, _MOMENT_SECONDS = 120.0, 10.0
_MAX_TRIES = 2
"""A process that was killed, by a system without memory, say, tells nothing of its grammar."""
_MEMORY_BYTES = 3 << 30
_STACK_BYTES = 4 << 20
"""Half of what the engine's threads have: what passes here does not overflow there."""
_NICENESS = 10


class TrialProcess:
    """Callable from any thread; one trial at a time. ``vocabulary`` is asked for with the first."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._children: list[_Child] = []
        weakref.finalize(self, _kill, self._children)

    def fault_of(self, grammar: str) -> str:
        """As in ``trial.py``; also where the trial takes too long or breaks its process. Raises
        RequestFailedError where something else ends that, time and again."""
        with self._lock:
            for _ in range(_MAX_TRIES):
                child = self._child()
                try:
                    child.pipe.send(grammar)
                    if not child.pipe.poll(_WALL_SECONDS):
                        child.process.kill()
                    fault: str = child.pipe.recv()
                    return fault
                except (EOFError, OSError):
                    self._children.clear()
                    if (status := child.end()) != -signal.SIGKILL:
                        return _in_words(status)
        raise RequestFailedError("the process that tries grammars was killed")

    def close(self) -> None:
        """Ends the process, whatever it does."""
        with self._lock:
            _kill(self._children)

    def _child(self) -> _Child:
        if self._children and self._children[0].process.poll() is not None:
            self._children.pop().end()
        if not self._children:
            ours, theirs = Pipe()
            paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
            command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": paths},
                )
            self._children.append(_Child(process, ours))
            ours.send(self._vocabulary())
        return self._children[0]


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: Connection

    def end(self) -> int:
        """Returns the status that the process ended with."""
        self.pipe.close()
        try:
            # One that breaks closes its end a moment before it is gone.
            return self.process.wait(_MOMENT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _kill(children: list[_Child]) -> None:
    while children:
        child = children.pop()
        child.process.kill()
        child.end()


def _in_words(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it is too large: it does not compile within {CPU_SECONDS:g} s"
    return "it is too large, or nested too deeply, to compile"


# --- in the process ---


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    # Tokens of running requests come first.
    os.nice(_NICENESS)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()


def _serve(pipe: Connection) -> None:
    try:
        vocabulary: Vocabulary = pipe.recv()
        built = vocabulary.build()
        while True:
            grammar: str = pipe.recv()
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            fault = fault_of(built, grammar)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send(fault)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
