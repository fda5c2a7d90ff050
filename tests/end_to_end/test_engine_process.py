"""``slipstream serve`` as it comes: the engine apart, killed, brought back, drained."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, APIStatusError

from server.request.large_bodies import LARGE
from worlds.engine_apart import has_gone
from worlds.served_command import HANG, Server, serving, until

pytestmark = pytest.mark.slow

ENGINE, WORKER = b"engine.process.child", b"server.workers.child"
ROOT = Path(__file__).resolve().parents[2]
LONG: dict[str, Any] = {
    "model": "slipstream-bundled",
    "prompt": "def load(path):\n",
    "max_tokens": 1500,
    "extra_body": {"ignore_eos": True, "speculative": {"draft_strategy": "none"}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--restart-engine", "--drain-seconds", "8")
    with serving(tmp_path_factory.mktemp("server"), *flags) as found:
        yield found


def test_the_openai_client_is_answered(server: Server) -> None:
    client = server.client()
    asked: dict[str, Any] = {"model": "slipstream-bundled", "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(prompt="def f(x):\n", **asked)
    stream = client.completions.create(prompt="def f(x):\n", stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    body = json.dumps({"prompt": "def f(x):\n", **asked}) + " " * LARGE
    headers = {"content-type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=HANG)
    assert reply.json()["choices"][0]["text"] == whole.choices[0].text
    with pytest.raises(APIStatusError) as refused:
        client.completions.create(prompt="x", **(asked | {"model": "other"}))
    assert refused.value.status_code == 404


def test_a_killed_engine_is_told_shown_and_brought_back(server: Server) -> None:
    client = server.client()
    pid = server.engine_pid()
    stream = client.completions.create(stream=True, **LONG)
    next(iter(stream))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(APIError, match="engine has stopped"):
        list(stream)
    # However long it takes to ask: the next one does not get ready meanwhile.
    until(lambda: [pid] != server.children(ENGINE) != [])
    os.kill(server.engine_pid(), signal.SIGSTOP)
    assert server.status("health") == server.status("ready") == 503
    with pytest.raises(APIStatusError) as refused:
        client.completions.create(model="slipstream-bundled", prompt="x")
    assert refused.value.status_code == 503
    assert figure(server, "slipstream_engine_up") == {0.0}
    os.kill(server.engine_pid(), signal.SIGCONT)
    until(lambda: server.status("health") == 200)
    assert server.status("ready") == 200
    assert server.engine_pid() != pid
    assert figure(server, 'slipstream_kv_blocks{state="committed"}') == {0.0}
    assert client.completions.create(model="slipstream-bundled", prompt="x").choices
    assert "signal SIGKILL" in server.log.read_text()


async def drain(server: Server) -> list[httpx.Response]:
    """Ends the server under long requests, half of them streams that have begun: so many that an idle
    machine is not done with them sooner. Gives their answers, and asserts that the port stays open until
    the last of them."""
    body = {key: value for key, value in LONG.items() if key != "extra_body"}
    body |= LONG["extra_body"] | {"max_tokens": 1900}
    async with httpx.AsyncClient(
        base_url=server.url, headers=by("unused"), timeout=HANG, limits=ONE_EACH
    ) as client:

        async def ask(stream: bool) -> httpx.Response:
            asked = client.build_request("POST", "/v1/completions", json=body | {"stream": stream})
            return await client.send(asked, stream=stream)

        wholes = [asyncio.ensure_future(ask(stream=False)) for _ in range(24)]
        streams = await asyncio.gather(*(ask(stream=True) for _ in range(24)))
        server.process.terminate()
        # Until both workers have heard of it: each answers about half of so many.
        while {(await client.get("/ready")).status_code for _ in range(20)} != {503}:
            await asyncio.sleep(0.01)
        assert (await client.get("/ready")).json() == {"status": "draining"}
        assert (await client.get("/health")).status_code == 200
        assert "\nslipstream_draining 1.0\n" in (await client.get("/metrics")).text
        assert_told([await client.post("/v1/completions", json=body)])
        await asyncio.gather(*(each.aread() for each in streams))
        return [*streams, *await asyncio.gather(*wholes)]


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


ONE_EACH = httpx.Limits(max_keepalive_connections=0)
"""A connection for each request: it may reach any of several workers."""


def assert_told(answers: list[httpx.Response]) -> None:
    for each in answers:
        if each.headers["content-type"].startswith("text/event-stream"):
            *_, last, done, rest = each.text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        else:
            assert each.status_code == 503
            assert each.json()["error"]["code"] == "shutting_down"


def test_requests_that_outlast_the_drain_are_told_and_the_port_answers(server: Server) -> None:
    """Ends the server that the tests before share."""
    until(lambda: server.is_ready())
    assert_told(asyncio.run(drain(server)))
    assert server.process.wait(HANG) == 0


def test_workers_without_a_request_answer_until_the_others_have_none(tmp_path: Path) -> None:
    flags = ("--api-workers", "2", "--drain-seconds", "300", "--log-format", "json")
    with serving(tmp_path, *flags) as server:
        # One answers before the other has started: that would end without a word at the signal.
        until(lambda: server.log.read_text().count("running on ") == 2)
        with server.client() as client:
            stream = client.completions.create(stream=True, **LONG)
            next(iter(stream))
            server.process.terminate()
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(HANG) == 0
        lines = server.log.read_text().splitlines()
    draining, ended, closed = (
        [place for place, line in enumerate(lines) if what in line]
        for what in ("draining", '"completion_tokens"', "shutting down")
    )
    assert [len(draining), len(ended), len(closed)] == [2, 1, 2]
    assert ended[0] < min(closed)


def figure(server: Server, name: str) -> set[float]:
    """Returns the values that ``/metrics`` shows over new connections, any of which may reach another
    process."""
    found = set()
    for _ in range(8):
        text = httpx.get(f"{server.url}/metrics", timeout=HANG).text
        line = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        found.add(float(line[1]) if line else 0.0)
    return found


def test_workers_share_port_engine_and_metrics(tmp_path: Path) -> None:
    flags = ("--api-workers", "2", "--restart-engine", "--drain-seconds", "8")
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    flags += ("--admin-key", "adm1n", "--log-format", "json", "--api-keys-file", str(keys))
    with serving(tmp_path, *flags) as server:
        until(lambda: server.is_ready())
        asked = {"model": "slipstream-bundled", "prompt": "def f(x):\n", "temperature": 0}
        texts = set()
        for _ in range(12):
            # A client each: a connection each.
            with server.client() as client:
                more = {"max_tokens": 6, "extra_body": {"ignore_eos": True}}
                texts.add(client.completions.create(**asked, **more).choices[0].text)
        assert len(texts) == 1
        workers = server.children(WORKER)
        assert len(workers) == 2
        ended = 'slipstream_requests_total{finish_reason="length"}'
        until(lambda: figure(server, ended) == {12.0})
        assert figure(server, "slipstream_generation_tokens_total") == {72.0}
        answered = '{method="POST",path="/v1/completions",status="200"}'
        assert figure(server, f"slipstream_http_requests_total{answered}") == {12.0}
        assert figure(server, "slipstream_engine_up") == {1.0}

        assert default_depths(server) == {8}
        change = {"defaults": {"num_speculative_tokens": 3}}
        changed = ask_admin(server, "PATCH", change)
        assert changed.status_code == 200
        # At once: the answer came when all had taken it.
        assert default_depths(server) == {3}
        assert figure(server, "slipstream_speculative_changes_total") == {1.0}
        refused = ask_admin(server, "PATCH", {"caps": {"draft_strategies": ["nobody"]}})
        assert refused.json()["error"]["param"] == "caps.draft_strategies"

        os.kill(workers[0], signal.SIGKILL)
        until(lambda: len({*server.children(WORKER)} - {workers[0]}) == 2)
        assert figure(server, ended) == {12.0}
        os.kill(workers[1], signal.SIGKILL)
        until(lambda: not {*server.children(WORKER)} & {*workers})
        assert default_depths(server) == {3}

        os.kill(server.engine_pid(), signal.SIGKILL)
        until(lambda: "the engine is back" in server.log.read_text())
        until(lambda: all(server.is_ready() for _ in range(8)))
        with server.client() as client:
            assert client.completions.create(max_tokens=6, **asked).choices[0].text in texts

        assert_tenants_are_apart(server)

        children = [*server.children(WORKER), server.engine_pid()]
        assert_told(asyncio.run(drain(server)))
        server.process.wait(HANG)
        assert all(has_gone(pid) for pid in children)
        text = server.log.read_text().splitlines()
        # What interpreters say when they end, and helpers of multiprocessing, is nobody's log line;
        # nothing is written in this server's own form for text, or in torch's.
        others = [line for line in text if not line.startswith("{")]
        assert [line for line in others if re.match(r"[DIWEC]\d{4} |\d{4}-\d\d-\d\d ", line)] == []
        lines = [json.loads(line) for line in text if line.startswith("{")]
        (line,) = [each for each in lines if each["logger"] == "slipstream.admin"]
        assert line["x_request_id"] == changed.headers["x-request-id"]
        assert len({each["process"] for each in lines}) > 3


KEYS = """
tenants:
  - {name: all, key: unused}
  - {name: few, key: few, requests_per_minute: 3, drafters: [suffix]}
"""


def assert_tenants_are_apart(server: Server) -> None:
    """Over connections of their own, so that either worker is asked."""

    def post(path: str, key: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{server.url}/{path}", json=body, headers=by(key), timeout=HANG)

    def num_cached(key: str) -> int:
        reply = post("v1/completions", key, prompt="def f(x):\n    return x\n" * 8, max_tokens=1)
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    for headers, status in ({}, 401), (by("few"), 200):
        url = f"{server.url}/v1/models"
        found = {httpx.get(url, headers=headers, timeout=HANG).status_code for _ in range(8)}
        assert found == {status}
    assert num_cached("unused") == 0
    assert num_cached("unused") > 0
    assert num_cached("few") == 0
    assert num_cached("few") > 0
    other = post("v1/completions", "few", prompt="x", speculative={"draft_strategy": "ngram"})
    assert other.json()["error"]["param"] == "speculative.draft_strategy"
    assert post("tokenize", "few", prompt="x").status_code == 200
    # One more is allowed every 20 s, which a busy machine may need for a few of these.
    replies = [post(path, "few", prompt="x") for path in ("tokenize", "v1/completions") * 8]
    refused = [each for each in replies if each.status_code != 200]
    assert refused
    for each in refused:
        assert (each.status_code, each.json()["error"]["code"]) == (429, "rate_limited")
        assert 1 <= int(each.headers["retry-after"]) <= 20
    assert num_cached("unused") > 0


def ask_admin(server: Server, method: str, body: Any) -> httpx.Response:
    """Over a connection of its own."""
    url, headers = f"{server.url}/admin/speculative", {"authorization": "Bearer adm1n"}
    return httpx.request(method, url, json=body, headers=headers, timeout=HANG)


def default_depths(server: Server) -> set[int]:
    """Returns the defaults for requests that the processes show."""
    found = (ask_admin(server, "GET", None).json() for _ in range(8))
    return {each["defaults"]["num_speculative_tokens"] for each in found}


def test_workers_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    with serving(tmp_path, "--api-workers", "2") as server:
        until(lambda: server.is_ready())
        children = [*server.children(WORKER), server.engine_pid()]
        assert len(children) == 3
        server.process.kill()
        server.process.wait()
        until(lambda: all(has_gone(pid) for pid in children))


def test_what_workers_cannot_serve_is_refused_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slipstream.cli", "serve", "bundled", "--port", "0"]
    command += ["--api-workers", "2", "--speculative.draft-strategy", "ngram", "--drafters", "none"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2
    assert "slipstream: speculative" in result.stderr
