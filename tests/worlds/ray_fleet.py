"""``serve run`` with deploy/ray/serve.yaml and two replicas of the bundled model, on this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from engine.process.launch import child_environment
from worlds.served_command import HANG, until

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "serve.yaml"
_RUN = "from ray.serve.scripts import cli; cli()"


@dataclass
class RayFleet:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def by_replica(self, name: str) -> dict[str, float]:
        """The sum of a metric's samples of each replica."""
        reply = httpx.get(f"{self.url}/metrics", timeout=HANG)
        found: dict[str, float] = {}
        # Until the application is there, Serve says in words that it is not.
        for family in text_string_to_metric_families(reply.text if reply.is_success else ""):
            for sample in family.samples:
                if sample.name == name:
                    replica = sample.labels["replica"]
                    found[replica] = found.get(replica, 0.0) + sample.value
        return found

    def is_whole(self) -> bool:
        """Whether both replicas answer, and their engines are up."""
        with suppress(httpx.TransportError):
            return list(self.by_replica("slipstream_engine_up").values()) == [1.0, 1.0]
        return False

    def replica_pids(self) -> list[int]:
        """The processes of the engine's replicas."""
        return [pid for pid in self._below() if b"ServeReplica:slipstream:engine" in _command(pid)]

    def engine_pids(self) -> list[int]:
        return [pid for pid in self._below() if b"engine.process.child" in _command(pid)]

    def _below(self) -> list[int]:
        """Processes that descend from ``serve run``."""
        parents = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    status = (folder / "stat").read_text().rpartition(")")[2].split()
                    parents[int(folder.name)] = int(status[1])
        found = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return sorted(found)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@contextmanager
def ray_fleet(folder: Path, settings: dict[str, Any]) -> Iterator[RayFleet]:
    """Serves for a block's length."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    (application,) = config["applications"]
    application["args"]["settings"] = settings
    engine = next(each for each in application["deployments"] if each["name"] == "engine")
    del engine["autoscaling_config"]
    engine |= {"num_replicas": 2, "health_check_period_s": 1}
    engine["ray_actor_options"] = {"num_cpus": 0.5}
    path, log = folder / "serve.yaml", folder / "log"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    environment = {
        **child_environment(),
        "RAY_ADDRESS": "local",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_WAIT_POLICY": "passive",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN, "run", str(path)],
            stdout=stream,
            stderr=stream,
            env=environment,
        )
    fleet = RayFleet(process, f"http://127.0.0.1:{port}", log)
    try:
        until(lambda: fleet.is_whole() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield fleet
    finally:
        below = fleet._below()
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
