"""The driver's end of a worker: starting it, asking it, and holding it still while others are timed."""

from __future__ import annotations

import json
import operator
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.contenders import Account, ContenderFailedError, Job, Run
from bench.peers.place import ROOT, Arm, WorkerPlan
from bench.peers.protocol import Ask, Reply

_LOG_TAIL = 600
_KILL_SECONDS = 10.0


class Worker:
    """A running worker, held still except while it is asked. A process group of its own, so that servers
    it starts stand still and end with it."""

    def __init__(self, plan: WorkerPlan, log: Path, run_seconds: float) -> None:
        self.plan = plan
        self.facts: dict[str, Any] = {}
        self._log = log
        self._run_seconds = run_seconds
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [str(plan.python), "-m", plan.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": str(ROOT), **plan.environ},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process, and its group's number."""
        return self._process.pid

    def load(self) -> None:
        """Raises ContenderFailedError with the reason."""
        self.facts = self._ask({"do": "load", **self.plan.load}, self.plan.load_seconds)
        self._signal(signal.SIGSTOP)

    def run(self, ask: Ask) -> list[Reply]:
        """Raises ContenderFailedError with the reason."""
        self._signal(signal.SIGCONT)
        try:
            answer = self._ask({"do": "run", **asdict(ask)}, self._run_seconds)
        finally:
            self._signal(signal.SIGSTOP)
        return [Reply(**request) for request in answer["requests"]]

    def close(self) -> None:
        """End the whole group. May be called again."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        # A server that the worker started may take longer than the worker, or not listen.
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it was asked when it had ended
                    pipe.close()

    def _ask(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line = self._read_line(time.monotonic() + seconds)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderFailedError(answer["error"])
        return answer

    def _read_line(self, deadline: float) -> bytes:
        """One answer. Read by hand: a pipe that is waited on must not be read ahead of."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    # Its late answer would be taken for the next one's.
                    self._signal(signal.SIGKILL)
                    raise ContenderFailedError("no answer in time" + self._tail())
                parts.append(os.read(descriptor, 1 << 20))
                if not parts[-1]:
                    raise self._died()
        return b"".join(parts)

    def _died(self) -> ContenderFailedError:
        return ContenderFailedError("the worker ended" + self._tail())

    def _tail(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
        return f"; its last words: {text}" if text else ""

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class PeerContender:
    """An arm of a worker, as the bench's runner wants it."""

    def __init__(self, worker: Worker, arm: Arm) -> None:
        self._worker = worker
        self.arm = arm

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def max_batch_size(self) -> int | None:
        return self.arm.max_batch_size

    def run(self, job: Job) -> Run:
        """Raises ContenderFailedError with the reason, also if tokens are missing."""
        ask = Ask(
            prompts=[list(prompt) for prompt in job.prompts],
            num_new_tokens=job.num_new_tokens,
            temperature=job.sampling.temperature,
            seed=job.seed,
            arm=self.arm.options,
            lengths=list(job.lengths),
            laps=list(job.laps),
            num_running=job.num_running,
        )
        return to_run(self._worker.run(ask), job)


def to_run(replies: list[Reply], job: Job) -> Run:
    """Prompts are done, and decoding begins, when as many requests as ever run have their first tokens;
    of a steady job it is timed until the last one is sent."""
    counts = [len(reply.token_ids) for reply in replies]
    if counts != list(job.lengths):
        raise ContenderFailedError(f"asked for {job.lengths} tokens of the prompts, got {counts}")
    num_running = min(job.num_running or len(replies), len(replies))
    first = sorted(reply.arrivals[0][0] for reply in replies)[num_running - 1]
    end = max(reply.arrivals[-1][0] for reply in replies)
    is_steady = num_running < len(replies)
    last = max(reply.sent for reply in replies) if is_steady else end
    account = _account(replies)
    return Run(
        output_token_ids=tuple(tuple(reply.token_ids) for reply in replies),
        seconds=end,
        decode_seconds=last - first,
        num_decode_tokens=_num_by(replies, last) - _num_by(replies, first),
        num_request_steps=(
            sum(len(reply.arrivals) for reply in replies)
            if account is None
            else account.num_request_steps
        ),
        account=account,
    )


def _num_by(replies: list[Reply], time: float) -> int:
    return sum(
        max((count for seconds, count in reply.arrivals if seconds <= time), default=0)
        for reply in replies
    )


def _account(replies: list[Reply]) -> Account | None:
    """Sums up our replies' accounts: each one's estimate holds for the time that it took. None for other
    peers."""
    told = [reply.account for reply in replies if reply.account is not None]
    if len(told) < len(replies):
        return None
    seconds = [reply.arrivals[-1][0] - reply.sent for reply in replies]
    gains = [each["estimated_speedup"] or 1.0 for each in told]
    return Account(
        num_request_steps=sum(each["num_steps"] for each in told),
        num_draft_tokens=sum(each["num_draft_tokens"] for each in told),
        num_accepted_tokens=sum(each["num_accepted_tokens"] for each in told),
        num_emitted_tokens=sum(len(reply.token_ids) for reply in replies),
        reply_baseline_seconds=sum(map(operator.mul, gains, seconds)),
        reply_step_seconds=sum(seconds),
    )
