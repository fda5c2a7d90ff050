"""Adapters: chosen by a request's model, listed, and loaded and unloaded by the operator."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from engine.request.errors import AdapterError
from server.request.large_bodies import LARGE
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import as_json, events, fault, serve

PATH = "http://test/admin/lora"
KEY = {"authorization": "Bearer adm1n"}


async def load(client: httpx.AsyncClient, name: str, method: str = "POST") -> httpx.Response:
    body = {"name": name, "path": f"/adapters/{name}"}
    return await client.request(method, PATH, json=body, headers=KEY)


async def ask(client: httpx.AsyncClient, model: str | None, **fields: Any) -> httpx.Response:
    return await client.post("/completions", json={"prompt": "a", "model": model, **fields})


async def test_the_model_field_chooses_and_the_reply_says_so(engine: ScriptedEngine) -> None:
    async with serve(engine, admin_key="adm1n") as client:
        base = (await client.get("/models")).json()["data"][0]["id"]
        assert (await ask(client, "mine")).status_code == 404
        assert (await load(client, "mine")).status_code == 200
        for model, adapter in (("mine", "mine"), (base, None), (None, None)):
            reply = await ask(client, model)
            assert reply.json()["model"] == (adapter or base)
            assert engine.requests[-1].adapter == adapter
        streamed = await ask(client, "mine", stream=True)
        assert {each["model"] for each in events(streamed.text)[:-1]} == {"mine"}
        chat = {"model": "mine", "messages": [{"role": "user", "content": "a"}]}
        assert (await client.post("/chat/completions", json=chat)).json()["model"] == "mine"
        asked = {"model": "mine", "input": "a"}
        assert (await client.post("/responses", json=asked)).json()["model"] == "mine"
        assert engine.requests[-1].adapter == "mine"
        tokens = await client.post("http://test/tokenize", json={"prompt": "a", "model": "mine"})
        assert tokens.status_code == 200
        own, mine = [(await ask(client, each)).json() for each in (None, "mine")]
        assert mine["system_fingerprint"] == own["system_fingerprint"] + "_" + ("0f" * 5)


async def test_large_bodies_know_of_adapters_that_came_after_their_process() -> None:
    engine = ScriptedEngine()
    async with serve(engine, admin_key="adm1n", body_processes=1) as client:
        body = as_json({"prompt": "a", "model": "mine"}, LARGE)
        for status in (404, 200, 404):
            reply = await client.post("/completions", **body)
            assert reply.status_code == status, reply.text
            if status == 200:
                await client.delete(PATH + "/mine", headers=KEY)
            else:
                await load(client, "mine")
        assert engine.requests[-1].adapter == "mine"


async def test_models_list_adapters_with_their_parent() -> None:
    async with serve(ScriptedEngine(), admin_key="adm1n") as client:
        (base,) = (await client.get("/models")).json()["data"]
        await load(client, "org/mine")
        found = (await client.get("/models")).json()["data"]
        assert [each["id"] for each in found] == [base["id"], "org/mine"]
        card = (await client.get("/models/org/mine")).json()
        assert card == found[1]
        assert card["parent"] == card["root"] == base["id"]
        assert card["lora"]["rank"] == 8
        assert "/adapters" not in json.dumps(card)
        refused = (await client.get("/models/other")).json()["error"]
        assert refused["message"].endswith(f"This server serves '{base['id']}', 'org/mine'.")


async def test_the_operator_loads_replaces_and_unloads(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(ScriptedEngine(), admin_key="adm1n") as client:
        base = (await client.get("/models")).json()["data"][0]["id"]
        with caplog.at_level(logging.WARNING, "slipstream.admin"):
            shown = (await load(client, "mine")).json()
        assert shown["path"] == "/adapters/mine"
        assert "an adapter was loaded" in caplog.text
        assert (await client.get(PATH, headers=KEY)).json()["data"] == [shown]
        for name in ("mine", base):
            assert fault(await load(client, name), "param") == (400, "name")
        assert (await load(client, "mine", "PUT")).status_code == 200
        assert (await load(client, base, "PUT")).status_code == 400
        assert "slipstream_lora_adapters 1.0" in (await client.get("http://test/metrics")).text
        gone = await client.delete(PATH + "/mine", headers=KEY)
        assert gone.json()["object"] == "adapter.deleted"
        again = await client.delete(PATH + "/mine", headers=KEY)
        assert fault(again) == (404, "model_not_found")
        assert (await client.get(PATH, headers=KEY)).json()["data"] == []
        assert "slipstream_lora_adapters 0.0" in (await client.get("http://test/metrics")).text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "name"),
        ({"name": "a"}, "path"),
        ({"name": "", "path": "/a"}, "name"),
        ({"name": 3, "path": "/a"}, "name"),
        ({"name": "a b", "path": "/a"}, "name"),
        ({"name": "a", "path": "/a", "rank": 3}, "rank"),
    ],
)
async def test_bodies_that_say_too_little_or_too_much(body: Any, param: str) -> None:
    async with serve(ScriptedEngine(), admin_key="adm1n") as client:
        reply = await client.post(PATH, json=body, headers=KEY)
        assert fault(reply, "param") == (400, param)


async def test_a_damaged_adapter_is_a_400_with_the_reason(engine: ScriptedEngine) -> None:
    engine.refused_adapter = AdapterError("/adapters/mine: use_dora is set, which is not served")
    async with serve(engine, admin_key="adm1n") as client:
        reply = await load(client, "mine")
        assert reply.status_code == 400
        assert "use_dora is set" in reply.json()["error"]["message"]
        assert (await client.get(PATH, headers=KEY)).json()["data"] == []
