"""``slipstream serve`` as a command in a process of its own, and the processes below it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import OpenAI

from engine.process.launch import child_environment
from worlds.engine_apart import has_gone

HANG = 900.0
"""Seconds; a busy machine is no fault."""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    url: str

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=HANG)

    def status(self, path: str) -> int:
        return httpx.get(f"{self.url}/{path}", timeout=HANG).status_code

    def is_ready(self) -> bool:
        try:
            return self.status("ready") == 200
        except httpx.TransportError:  # nobody listens yet
            return False

    def engine_pid(self) -> int:
        (pid,) = self.children(b"engine.process.child")
        return pid

    def children(self, module: bytes, of: int | None = None) -> list[int]:
        """Processes right below the server, or the process ``of``, that run this module."""
        parent = of or self.process.pid
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and not has_gone(int(folder.name)):
                with suppress(OSError):
                    command = (folder / "cmdline").read_bytes()
                    status = (folder / "status").read_text()
                    if module in command and f"PPid:\t{parent}\n" in status:
                        found.append(int(folder.name))
        return found


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.05)


@contextmanager
def serving(
    folder: Path,
    *flags: str,
    model: str | Sequence[str] = "bundled",
    launcher: Sequence[str] = (),
    path: Path | None = None,
) -> Iterator[Server]:
    """``launcher``: the module that runs the command in place of Python, and its own flags. ``path``:
    where its modules are looked for first."""
    log = folder / "log"
    command = [sys.executable, *([] if not launcher else ["-m", *launcher])]
    models = [model] if isinstance(model, str) else model
    command += ["-m", "slipstream.cli", "serve", *models, "--port", "0", *flags]
    environment = child_environment()
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment['PYTHONPATH']}"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, env=environment, cwd=folder)
    try:
        pattern = re.compile(r"running on (http://[\d.:]+)")
        until(lambda: bool(pattern.search(log.read_text())) or process.poll() is not None)
        found = pattern.search(log.read_text())
        assert found, log.read_text()
        yield Server(process, log, found[1])
    finally:
        if launcher:  # Only a launcher that is asked to end takes along what it launched.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        process.kill()
        process.wait(60)
