"""Speculation changed while the server serves."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from server.request.large_bodies import LARGE
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import as_json, fault, serve

PATH = "http://test/admin/speculative"
KEY = {"authorization": "Bearer adm1n"}


async def change(client: httpx.AsyncClient, method: str = "PATCH", **body: Any) -> httpx.Response:
    return await client.request(method, PATH, json=body, headers=KEY)


async def drafts_of(client: httpx.AsyncClient, engine: ScriptedEngine, padding: int = 0) -> Any:
    """Returns the speculation of a request that says nothing of it."""
    reply = await client.post("/completions", **as_json({"prompt": "a"}, padding))
    assert reply.status_code == 200
    return engine.requests[-1].speculative


ADAPTERS = "http://test/admin/lora"
LORA = [*((each, ADAPTERS) for each in ("GET", "POST", "PUT")), ("DELETE", f"{ADAPTERS}/a")]


async def test_without_a_key_of_its_own_there_is_nothing() -> None:
    async with serve(ScriptedEngine(), api_key="adm1n") as client:
        for method, path in (*((each, PATH) for each in ("GET", "PATCH", "PUT")), *LORA):
            reply = await client.request(method, path, headers=KEY, json={})
            assert fault(reply) == (404, "not_found")


@pytest.mark.parametrize("given", [None, "Bearer s3cret", "Bearer ", "adm1n", "Bearer adm1n2"])
async def test_the_api_key_and_no_key_do_not_open_it(given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    body = {"defaults": {"draft_strategy": "none"}}
    async with serve(ScriptedEngine(), api_key="s3cret", admin_key="adm1n") as client:
        before = (await client.get(PATH, headers=KEY)).json()
        for method, path in (*((each, PATH) for each in ("GET", "PATCH", "PUT")), *LORA):
            reply = await client.request(method, path, headers=headers, json=body)
            assert reply.status_code == 401
        assert (await client.get(PATH, headers=KEY)).json() == before
        assert (await client.get("/models", headers=KEY)).status_code == 401


async def test_a_change_holds_for_requests_that_come_after_it(engine: ScriptedEngine) -> None:
    defaults = {"draft_strategy": "nasd", "adaptive_depth": "fixed", "num_speculative_tokens": 5}
    caps = {"max_speculative_tokens": 6, "draft_strategies": ["nasd"]}
    async with serve(engine, admin_key="adm1n", body_processes=1) as client:
        for padding in (0, LARGE):
            assert (await drafts_of(client, engine, padding)).draft_strategy == "ngram"
        reply = await change(client, defaults=defaults, caps=caps)
        assert reply.status_code == 200
        # The pool that reads large bodies began before the change.
        for padding in (0, LARGE):
            found = await drafts_of(client, engine, padding)
            assert {name: getattr(found, name) for name in defaults} == defaults
            for asked in ({"draft_strategy": "ngram"}, {"num_speculative_tokens": 7}):
                body = as_json({"prompt": "a", "speculative": asked}, padding)
                refused = await client.post("/completions", **body)
                assert refused.json()["error"]["param"] == f"speculative.{next(iter(asked))}"
        listed = (await client.get("/drafters")).json()
        assert [each["id"] for each in listed["data"]] == ["none", "nasd"]
        assert listed["defaults"]["draft_strategy"] == "nasd"
        assert listed["caps"]["max_speculative_tokens"] == 6
        shown = (await client.get(PATH, headers=KEY)).json()
        assert shown == reply.json()
        assert shown["defaults"] == listed["defaults"]
        assert shown["may_be_set"]["draft_strategies"] == list(engine.info.drafters)


async def test_fields_that_are_not_given_stay_and_put_forgets_them(engine: ScriptedEngine) -> None:
    speculative = {"draft_strategy": "nasd", "tree_strategy": "tree", "tree_width": 3}
    async with serve(engine, admin_key="adm1n", speculative=speculative) as client:
        assert (await change(client, defaults={"num_speculative_tokens": 4})).status_code == 200
        assert (await drafts_of(client, engine)).shape.width == 3
        # The width that was set has no place in a chain: only from the built-in values on can it go.
        refused = await change(client, defaults={"tree_strategy": "linear"})
        assert refused.json()["error"]["param"] == "defaults.tree_width"
        replaced = await change(client, "PUT", defaults={"draft_strategy": "nasd"})
        assert replaced.json()["set"] == {"defaults": {"draft_strategy": "nasd"}, "caps": {}}
        assert (await drafts_of(client, engine)).shape.width == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "defaults"),
    ({"defaults": None}, "defaults"),
    ({"defaults": {"draft_strategy": "eagle3"}}, "defaults.draft_strategy"),
    ({"defaults": {"num_speculative_tokens": 33}}, "defaults.num_speculative_tokens"),
    ({"defaults": {"num_speculative_tokens": -1}}, "defaults.num_speculative_tokens"),
    ({"defaults": {"adaptive_depth": "guess"}}, "defaults.adaptive_depth"),
    ({"defaults": {"options": {"colour": 1}}}, "defaults.options.colour"),
    ({"defaults": {"colour": 1}}, "defaults.colour"),
    ({"caps": {"draft_strategies": ["eagle3"]}}, "caps.draft_strategies"),
    ({"caps": {"max_tree_width": 0}}, "caps.max_tree_width"),
    ({"caps": {"max_tree_width": "4"}}, "caps.max_tree_width"),
    ({"caps": {"colour": 1}}, "caps.colour"),
    # Together they do not fit, so neither is taken.
    (
        {"defaults": {"max_speculative_tokens": 9}, "caps": {"max_speculative_tokens": 8}},
        "defaults.max_speculative_tokens",
    ),
    ({"colour": 1}, "colour"),
]


async def test_what_would_not_have_started_is_refused_by_name_and_changes_nothing() -> None:
    # One server for all: large bodies are read in a process that takes seconds to start.
    async with serve(ScriptedEngine(), admin_key="adm1n") as client:
        before = (await client.get(PATH, headers=KEY)).json()
        for body, param in REFUSED:
            for padding in (0, LARGE):
                reply = await client.patch(PATH, **as_json(body, padding, **KEY))
                assert fault(reply, "param") == (400, param), body
                assert reply.json()["error"]["message"].startswith(param)
            assert (await client.get(PATH, headers=KEY)).json() == before, body


async def test_a_change_shows_in_metrics_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(ScriptedEngine(), admin_key="adm1n") as client:
        assert 'draft_strategy="ngram"' in (await client.get("http://test/metrics")).text
        with caplog.at_level(logging.WARNING, logger="slipstream.admin"):
            await change(client, defaults={"draft_strategy": "none"})
            await change(client, defaults={"draft_strategy": "eagle3"})
        metrics = (await client.get("http://test/metrics")).text
    assert "slipstream_speculative_defaults_info{" in metrics
    assert 'draft_strategy="none"' in metrics
    assert "slipstream_speculative_changes_total 1.0" in metrics
    (record,) = caplog.records
    assert record.fields["defaults"] == {"draft_strategy": "none"}  # type: ignore[attr-defined]


async def test_changes_at_once_are_all_taken_whole(engine: ScriptedEngine) -> None:
    async with serve(engine, admin_key="adm1n") as client:
        pairs = [("nasd", 3), ("ngram", 4), ("sampler", 5)] * 4
        await asyncio.gather(
            *(
                change(client, defaults={"draft_strategy": name, "num_speculative_tokens": number})
                for name, number in pairs
            ),
            *(drafts_of(client, engine) for _ in range(12)),
        )
    known = {("ngram", 8), *pairs}
    found = (each.speculative for each in engine.requests)
    assert {(each.draft_strategy, each.num_speculative_tokens) for each in found} <= known
