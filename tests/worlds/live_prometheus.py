"""A real server under load, and a real Prometheus that scrapes it every second."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml

from deploy.ray.exchange import Forwarded, Whole
from engine.config import EngineConfig
from engine.process.threaded import AsyncEngine
from worlds.deploy_tools import DEPLOY, debian_tool
from worlds.engine_servers import engine_served
from worlds.gathered_replicas import Gathered, fleet
from worlds.scripted_engine import ScriptedEngine

CODE = '''def load_table(path, separator=","):
    """Read a table of numbers."""
    rows = []
    with open(path) as stream:
        for line in stream:
            rows.append([float(part) for part in line.strip().split(separator)])
    return rows
'''
MESSAGES = [{"role": "user", "content": f"Rename the variable `rows` to `table`.\n\n{CODE}"}]
HANG = 300.0


def until(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + HANG
    while not reached():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@dataclass
class LiveServer:
    engine: AsyncEngine
    address: str
    key: str = ""

    def post(self, path: str, body: dict[str, Any]) -> int:
        """The status of the answer, read to its end."""
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        url = f"http://{self.address}/v1{path}"
        return httpx.post(url, json=body, headers=headers, timeout=HANG).status_code


@contextmanager
def live_server(key: str = "", **settings: Any) -> Iterator[LiveServer]:
    """The bundled model behind uvicorn, with room for two requests and a queue of one. ``key``: what
    requests come with."""
    drafters = ("none", "ngram", "nasd", "prediction")
    config = EngineConfig(max_num_seqs=2, max_num_waiting=1, drafters=drafters)
    with engine_served(config, **settings) as found:
        yield LiveServer(found.engine, found.url.removeprefix("http://"), key)


class _Unseen(Gathered):
    """Whose metrics nobody sees: what is scraped is the ingress's own."""

    async def ask_all(self, request: Forwarded) -> list[Whole]:
        return [replace(each, body=b"") for each in await super().ask_all(request)]


@contextmanager
def live_ingress() -> Iterator[str]:
    """The address of an ingress in front of scripted replicas, the first of which is too busy for what
    belongs to it."""

    async def serve(listener: socket.socket) -> None:
        async with fleet(ScriptedEngine(), ScriptedEngine(), kind=_Unseen) as found:
            found.replicas.loads = {"a": 50}
            config = uvicorn.Config(found.app, log_config=None, access_log=False, lifespan="off")
            servers.append(uvicorn.Server(config))
            await servers[0].serve([listener])

    servers: list[uvicorn.Server] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)), daemon=True)
        thread.start()
        until(lambda: bool(servers) and servers[0].started, "the ingress did not start")
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        servers[0].should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


def ask_ingress(address: str) -> None:
    """Requests that belong to either replica."""
    for number in range(8):
        body = {"prompt": f"{number}", "max_tokens": 4}
        reply = httpx.post(f"http://{address}/v1/completions", json=body, timeout=HANG)
        assert reply.status_code == 200, reply.text


def put_under_load(server: LiveServer) -> dict[int, int]:
    """A round of what clients do, mistakes included; how many got which status."""
    adaptive = [
        {"draft_strategy": "none"},
        {"draft_strategy": "ngram"},
        {"draft_strategy": "ngram", "adaptive_depth": "target_rate"},
        {"draft_strategy": "nasd", "adaptive_depth": "fixed", "num_speculative_tokens": 3},
    ]
    # To full length: a text that ends at once would show nothing of its drafter.
    whole = {"prompt": CODE, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    statuses = [
        server.post("/completions", whole | {"speculative": speculative})
        for speculative in adaptive
    ]
    prediction = {"type": "content", "content": CODE.replace("rows", "table")}
    chat = {"messages": MESSAGES, "max_tokens": 48, "temperature": 0}
    statuses.append(server.post("/chat/completions", chat | {"prediction": prediction}))
    statuses.append(server.post("/completions", {"prompt": "x", "temperature": -1}))
    # More at once than run and wait.
    with ThreadPoolExecutor(8) as pool:
        body = whole | {"max_tokens": 64, "speculative": adaptive[0]}
        futures = [pool.submit(server.post, "/completions", body) for _ in range(8)]
        statuses += [future.result() for future in futures]
    return {status: statuses.count(status) for status in statuses}


class Prometheus:
    """Asked over HTTP, as Grafana asks."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    @property
    def url(self) -> str:
        return str(self._client.base_url)

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, path: str, **params: Any) -> Any:
        """The ``data`` of an answer; if a query does not parse, the test fails with what is wrong."""
        reply = self._client.get(f"/api/v1/{path}", params=params)
        assert reply.status_code == 200, f"{params}: {reply.text}"
        return reply.json()["data"]

    def vector(self, expression: str) -> list[Any]:
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def course(self, expression: str) -> list[list[float]]:
        """The values of each series over the last 20 seconds."""
        now = time.time()
        params = {"query": expression, "start": now - 20, "end": now, "step": 1}
        result = self.ask("query_range", **params)["result"]
        return [[float(value) for _, value in series["values"]] for series in result]

    def scrape_again(self) -> None:
        """Returns when what happened before the call has been scraped twice."""
        asked = time.time()
        newest = "timestamp(slipstream_engine_up)"

        def is_newer() -> bool:
            return any(float(each["value"][1]) > asked + 1 for each in self.vector(newest))

        until(is_newer, "Prometheus does not scrape")


@contextmanager
def live_prometheus(folder: Path, *targets: str) -> Iterator[Prometheus]:
    """Runs on the deployed configuration but for its addresses and intervals."""
    program = debian_tool("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    short = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["global"] |= short
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{free.getsockname()[1]}"
    addresses = {"slipstream": list(targets), "prometheus": [own]}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": addresses[job["job_name"]]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={own}",
        "--log.level=warn",
    ]
    with (
        (folder / "log").open("w") as log,
        httpx.Client(base_url=f"http://{own}", timeout=HANG) as client,
    ):
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            prometheus = Prometheus(client)
            until(
                lambda: prometheus.ready() or process.poll() is not None, "Prometheus did not start"
            )
            assert process.poll() is None, (folder / "log").read_text()
            yield prometheus
        finally:
            process.terminate()
            process.wait(HANG)
