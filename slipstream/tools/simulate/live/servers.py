"""``slipstream serve`` as processes of this machine, a core each where there are enough."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from slipstream.client.errors import ClientError
from slipstream.tools.simulate.live.streams import Address

_START_SECONDS = 300.0
_STOP_SECONDS = 30.0


@asynccontextmanager
async def served(
    ports: Sequence[int], flags: Sequence[str], logs: Path
) -> AsyncIterator[list[Address]]:
    """A server on each port for a block's length, with these flags; what they say goes to files of
    ``logs``. Each has one thread and, where the machine has as many cores, one of these for all of its
    processes: so that none slows another one down by more than what they share. Raises ClientError for
    one that does not come up."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index, port in enumerate(ports):
            processes.append(_start(index, len(ports), port, flags, logs))
        for port, process in zip(ports, processes, strict=True):
            await _until_ready(port, process, logs)
        yield [Address(port) for port in ports]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            await asyncio.to_thread(_stopped, process)


def _start(
    index: int, num_servers: int, port: int, flags: Sequence[str], logs: Path
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "slipstream.cli", "serve", "bundled", "--port", str(port)]
    command += ["--num-threads", "1", *flags]
    cores = sorted(os.sched_getaffinity(0))
    with open(_log(logs, port), "wb") as log:
        if len(cores) < num_servers:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        # Whoever is started has the affinity of its parent.
        os.sched_setaffinity(0, {cores[index]})
        try:
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        finally:
            os.sched_setaffinity(0, cores)


def _log(logs: Path, port: int) -> Path:
    return logs / f"replica-{port}.log"


async def _until_ready(port: int, process: subprocess.Popen[bytes], logs: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while not await asyncio.to_thread(_is_ready, port):
        if process.poll() is not None or time.monotonic() > end:
            said = _log(logs, port).read_text(encoding="utf-8", errors="replace")
            raise ClientError(f"the server on port {port} did not start: {said[-2000:]}")
        await asyncio.sleep(0.5)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stopped(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
