"""The server under test: a process of its own, with a drafter from outside that breaks at random."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAULTY = "faulty"
_START_SECONDS = 600.0
_PLUGIN = '''
import random
from drafters.base import Drafter, DrafterInfo
from drafters.tree import chain

class Faulty(Drafter):
    """Right by chance, and often broken."""
    info = DrafterInfo("faulty", "Breaks.", drafts_trees=False)
    def start(self, request):
        if random.random() < 0.1:
            raise RuntimeError("told not to start")
        return super().start(request)
    def propose(self, requests):
        ways = (lambda: 1 / 0, lambda: (each for each in ()), lambda: None, lambda: exit(3))
        if random.random() < 0.5:
            return random.choice(ways)()
        return [chain([each.token_ids[-1]] * min(2, each.max_nodes)) for each in requests]
    def observe(self, observations):
        if random.random() < 0.2:
            raise KeyError("told to forget")
    def num_top_tokens(self, request_id):
        return random.choice((0, "many", -1))

def make(context):
    return Faulty()
'''


@dataclass
class Server:
    """A running one."""

    process: subprocess.Popen[bytes]
    host: str
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def kill_engine(self) -> None:
        """As the system does when memory is short."""
        for pid in self.pids():
            if "engine.process" in _command(pid):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """The server's own and those of its children, at this moment."""
        return [self.process.pid, *_children(self.process.pid)]

    def resident_bytes(self) -> int:
        """Memory of all its processes, shared pages counted once each."""
        return sum(_resident(pid) for pid in self.pids())


@contextmanager
def serving(folder: Path, flags: Mapping[str, str]) -> Iterator[Server]:
    """``slipstream serve`` with these flags, from when it is ready; a flag without a value is a switch.
    Raises RuntimeError with its log where it does not start."""
    install_plugin(folder)
    log = folder / "log"
    command = [sys.executable, "-m", "slipstream.cli", "serve", "bundled", "--port", "0"]
    for name, value in flags.items():
        command += [f"--{name}", value] if value else [f"--{name}"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream, env=environment)
    try:
        host, port = _address(process, log)
        yield Server(process, host, port, log)
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


def install_plugin(folder: Path) -> None:
    """Makes the folder a place of ``sys.path`` in which the faulty drafter seems to be installed."""
    info = folder / "faulty_drafter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-drafter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[slipstream.drafters]\n{FAULTY} = faulty_drafter:make\n"
    )
    (folder / "faulty_drafter.py").write_text(_PLUGIN)


def _address(process: subprocess.Popen[bytes], log: Path) -> tuple[str, int]:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"running on http://([\d.]+):(\d+)", log.read_text(errors="replace"))
        if found:
            return found[1], int(found[2])
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')}")


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and _parent(int(folder.name)) == pid:
            found += [int(folder.name), *_children(int(folder.name))]
    return found


def _parent(pid: int) -> int:
    with suppress(OSError):
        # The name in brackets may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _resident(pid: int) -> int:
    """Proportional: pages that processes share are divided among them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0
