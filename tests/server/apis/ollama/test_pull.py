"""``/api/pull``: refused unless allowed; Ollama's lines, by its own client, from a stand-in hub."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
from huggingface_hub import constants

import server.apis.ollama.pull
from worlds.hub import Hub, pointed_at, running
from worlds.live_server import live
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve, until

BIG = bytes(range(256)) * 400
FILES = {"a-Q4_K_M.gguf": BIG, "a-Q8_0.gguf": BIG * 2}
REPO = "org/repo-GGUF"
PULL = "http://test/api/pull"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(Hub({REPO: FILES})) as found:
        pointed_at(monkeypatch, found, tmp_path)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)
        yield found


async def test_it_is_refused_unless_it_is_allowed(hub: Hub) -> None:
    async with serve(ScriptedEngine()) as http:
        refused = await http.post(PULL, json={"model": REPO})
    assert refused.status_code == 403
    assert refused.json().keys() == {"error"}
    assert "allow_pull" in refused.json()["error"]
    assert not hub.served


async def test_ollamas_client_is_told_how_far_it_is(hub: Hub, tmp_path: Path) -> None:
    async with (
        live(ScriptedEngine(), allow_pull=True) as server,
        ollama.AsyncClient(server.url) as client,
    ):
        found = [each async for each in await client.pull(f"hf.co/{REPO}:q4_k_m", stream=True)]
        assert (await client.pull(REPO)).status == "success"
        names = [each.model for each in (await client.list()).models]
    assert found[0].status == "pulling manifest"
    assert found[-1].status == "success"
    pieces = [each for each in found if each.digest]
    assert {each.total for each in pieces} == {len(BIG)}
    done = [each.completed or 0 for each in pieces]
    assert done == sorted(done)
    assert done[-1] == len(BIG)
    (blob,) = (tmp_path / "hub" / "models--org--repo-GGUF" / "blobs").iterdir()
    assert pieces[0].digest == f"sha256:{blob.name}"
    assert blob.read_bytes() == BIG
    assert hub.served == {"a-Q4_K_M.gguf": [(0, len(BIG))]}
    assert names == ["test/scripted:latest"], "what is served has not changed"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("llama3", "is not org/repo[:QUANT]"),
        ("/etc/passwd", "is not org/repo[:QUANT]"),
        ("https://example.com/a/b", "is not org/repo[:QUANT]"),
        ("", "model"),
    ],
)
async def test_what_is_no_name_on_the_hub_is_a_400(hub: Hub, model: str, said: str) -> None:
    async with serve(ScriptedEngine(), allow_pull=True) as http:
        refused = await http.post(PULL, json={"name": model})
    assert refused.status_code == 400
    assert said in refused.json()["error"]
    assert not hub.served


async def test_what_the_hub_does_not_give_is_an_error_in_ollamas_shape(hub: Hub) -> None:
    async with serve(ScriptedEngine(), allow_pull=True) as http:
        whole = await http.post(PULL, json={"model": "org/none", "stream": False})
        lines = (await http.post(PULL, json={"model": f"{REPO}:Q2_K"})).text.splitlines()
    assert whole.status_code == 500
    assert whole.json()["error"].startswith("org/none: there is no such model on the hub")
    assert json.loads(lines[0]) == {"status": "pulling manifest"}
    assert "there is no Q2_K in it; there are Q4_K_M" in json.loads(lines[-1])["error"]
    assert not hub.served


async def test_a_client_that_leaves_ends_its_download(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, has_ended = threading.Event(), threading.Event()
    real = server.apis.ollama.pull.fetch

    def slow(name, *, told):  # type: ignore[no-untyped-def]
        def first_wait(file, done):  # type: ignore[no-untyped-def]
            told(file, done)
            assert may_go_on.wait(60)

        try:
            return real(name, told=first_wait)
        finally:
            has_ended.set()

    monkeypatch.setattr(server.apis.ollama.pull, "fetch", slow)
    async with live(ScriptedEngine(), allow_pull=True) as running_server:
        async with httpx.AsyncClient() as http:
            request = http.stream("POST", f"{running_server.url}/api/pull", json={"model": REPO})
            async with request as answer:
                lines = answer.aiter_lines()
                assert json.loads(await anext(lines)) == {"status": "pulling manifest"}
                assert json.loads(await anext(lines))["completed"] == 0
        await until(lambda: running_server.num_connections == 0)
        await asyncio.sleep(0)
        may_go_on.set()
        await asyncio.to_thread(has_ended.wait, 60)
        monkeypatch.setattr(server.apis.ollama.pull, "fetch", real)
        async with ollama.AsyncClient(running_server.url) as client:
            assert (await client.pull(REPO)).status == "success"
    assert len(hub.served["a-Q4_K_M.gguf"]) == 2
