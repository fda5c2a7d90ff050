"""Defines the messages of driver and worker: one JSON object per line, over stdin and stdout.

The driver asks, the worker answers, one at a time. Imports the standard library only: a worker
runs in its peer's environment, where nothing of ours is installed.

- ``{"do": "load", ..}`` with what the peer's own ``WorkerPlan`` holds; the answer is an object of facts
  to print: versions, settings.
- ``{"do": "run", ..}`` with the fields of an :class:`Ask`: complete all prompts at once. The answer has
  ``requests``, one :class:`Reply` each.

Any answer may be ``{"error": "why"}`` instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ask:
    """One batch. ``arm`` holds what distinguishes ways of running in one worker; ``lengths``, ``laps``
    and ``num_running`` are as a :class:`bench.contenders.Job`'s, for workers that can keep requests
    running."""

    prompts: list[list[int]]
    num_new_tokens: int
    temperature: float
    seed: int
    arm: Mapping[str, Any] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    laps: list[int] = field(default_factory=list)
    num_running: int | None = None

    def length(self, at: int) -> int:
        """New tokens of a prompt."""
        return self.lengths[at] if self.lengths else self.num_new_tokens


@dataclass
class Reply:
    """One request's output. ``arrivals``: seconds since the first was sent, and how many tokens there
    were by then; ``sent``: when this one was. ``account``: what the reply tells of its speculation."""

    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    sent: float = 0.0
    account: Mapping[str, Any] | None = None

    def add(self, seconds: float, token_ids: list[int]) -> None:
        """Tokens that have just come; none are no arrival."""
        if token_ids:
            self.token_ids.extend(token_ids)
            self.arrivals.append((seconds, len(self.token_ids)))


class Runner(Protocol):
    """A loaded peer. May raise whatever its library raises: the driver is told, and drops the arm."""

    facts: dict[str, Any]

    def run(self, ask: Ask) -> list[Reply]: ...


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


def end_with_parent() -> None:
    """Linux ends this process with the one that started it, even one that stands still and when the
    other had no time to say so. Elsewhere nothing happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(load: Callable[[dict[str, Any]], Runner]) -> None:
    """A worker's whole life: answer until stdin ends. What libraries print goes to stderr."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    runner: Runner | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if message.pop("do") == "load":
                runner = load(message)
                answer: dict[str, Any] = runner.facts
            elif runner is None:
                raise RuntimeError("asked to run before anything was loaded")
            else:
                replies = runner.run(Ask(**message))
                answer = {"requests": [asdict(reply) for reply in replies]}
        except Exception as error:  # whatever went wrong in there is an answer
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
