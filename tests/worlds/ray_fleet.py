"""``serve run`` with deploy/ray/serve.yaml and two replicas of the bundled model, on this machine."""

from __future__ import annotations

import os
import re
import secrets
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
from prometheus_client.samples import Sample

from engine.process.launch import child_environment
from worlds.served_command import HANG, until

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "serve.yaml"
_RUN = "from ray.serve.scripts import cli; cli()"


@dataclass
class RayFleet:
    """``config``: what is served; ``folder`` has it, and the log. ``token``: opens its cluster, and no
    other."""

    process: subprocess.Popen[bytes]
    url: str
    folder: Path
    config: dict[str, Any]
    token: str

    def samples(self, name: str) -> list[Sample]:
        """Those of a metric, of all replicas or of the ingress."""
        reply = httpx.get(f"{self.url}/metrics", timeout=HANG)
        # Until the application is there, Serve says in words that it is not.
        families = text_string_to_metric_families(reply.text if reply.is_success else "")
        return [each for family in families for each in family.samples if each.name == name]

    def by_replica(self, name: str) -> dict[str, float]:
        """The sum of a metric's samples of each replica."""
        found: dict[str, float] = {}
        for sample in self.samples(name):
            replica = sample.labels["replica"]
            found[replica] = found.get(replica, 0.0) + sample.value
        return found

    def serves(self, num_replicas: int = 2) -> bool:
        """Whether so many replicas answer, and their engines are up."""
        with suppress(httpx.TransportError):
            up = list(self.by_replica("slipstream_engine_up").values())
            return up == [1.0] * num_replicas
        return False

    def deploy(self, num_replicas: int, settings: dict[str, Any] | None = None) -> None:
        """As who changes the configuration does; Serve takes its time. ``settings``: in place of those
        that were."""
        (application,) = self.config["applications"]
        if settings is not None:
            application["args"]["settings"] = settings
        _engine(application)["num_replicas"] = num_replicas
        done = subprocess.run(
            [*_serve_run(self.folder, self.config), "--non-blocking"],
            env=_environment(self._cluster(), self.token),
            check=False,
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _cluster(self) -> str:
        """The address of the cluster that ``serve run`` has begun."""
        commands = b" ".join(_command(pid).replace(b"\0", b" ") for pid in self._below())
        found = re.search(rb"--gcs-address=(\S+)", commands)
        assert found is not None
        return found[1].decode()

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


def _engine(application: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each for each in application["deployments"] if each["name"] == "engine"
    )
    return found


def _serve_run(folder: Path, config: dict[str, Any]) -> list[str]:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return [sys.executable, "-c", _RUN, "run", str(path)]


def _environment(cluster: str, token: str) -> dict[str, str]:
    return {
        **child_environment(),
        "RAY_ADDRESS": cluster,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_WAIT_POLICY": "passive",
    }


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
    engine = _engine(application)
    del engine["autoscaling_config"]
    engine |= {"num_replicas": 2, "health_check_period_s": 1}
    engine["ray_actor_options"] = {"num_cpus": 0.5}
    token = secrets.token_hex(32)
    with (folder / "log").open("wb") as stream:
        process = subprocess.Popen(
            _serve_run(folder, config),
            stdout=stream,
            stderr=stream,
            env=_environment("local", token),
        )
    fleet = RayFleet(process, f"http://127.0.0.1:{port}", folder, config, token)
    try:
        until(lambda: fleet.serves() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
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
