"""Replicas that come later adopt what /admin has changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from deploy.ray.adoption import SharedSpeculation
from server.errors import ApiError
from server.request.speculative import SpeculativeChange
from worlds.scripted_engine import ScriptedEngine
from worlds.serving import serve

ADMIN = {"authorization": "Bearer secret"}
URL = "http://test/admin/speculative"


@asynccontextmanager
async def replica(
    name: str, settings: str = "same", **more: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, SharedSpeculation]]:
    async with serve(ScriptedEngine(), admin_key="secret", body_processes=0, **more) as client:
        services = client.app.state.models.only  # type: ignore[attr-defined]
        yield client, SharedSpeculation(name, settings, services)


async def change(client: httpx.AsyncClient, **body: Any) -> None:
    reply = await client.patch(URL, json=body, headers=ADMIN)
    assert reply.status_code == 200, reply.text


async def shown(client: httpx.AsyncClient) -> Any:
    return (await client.get(URL, headers=ADMIN)).json()


async def test_a_fresh_replica_goes_by_what_was_changed() -> None:
    async with replica("a") as (old, olds), replica("b") as (new, news):
        before = await shown(new)
        assert not await news.adopt([olds.show()])
        assert await shown(new) == before
        await change(old, defaults={"draft_strategy": "nasd", "max_speculative_tokens": 5})
        await change(old, caps={"max_speculative_tokens": 7, "draft_strategies": ["nasd"]})
        assert not await news.adopt([olds.show()])
        assert await shown(new) == await shown(old) != before
        # And it tells the next one, just as it goes on from there.
        assert news.show().num_changes == olds.show().num_changes == 2
        for client in (old, new):
            await change(client, defaults={"max_speculative_tokens": 4})
        assert await shown(new) == await shown(old)


async def test_settings_that_a_change_took_away_are_gone() -> None:
    given = {"speculative": {"draft_strategy": "nasd", "max_speculative_tokens": 3}}
    async with replica("a", **given) as (old, olds), replica("b", **given) as (new, news):
        assert (await old.put(URL, json={}, headers=ADMIN)).status_code == 200
        await news.adopt([olds.show()])
        assert await shown(new) == await shown(old)
        assert (await shown(new))["set"] == {"defaults": {}, "caps": {}}


async def test_what_was_changed_more_often_is_newer() -> None:
    async with replica("a") as (old, olds), replica("b") as (new, news):
        await change(old, defaults={"draft_strategy": "nasd"})
        late = olds.show()
        await change(old, defaults={"draft_strategy": "none"})
        assert await news.adopt([late, olds.show(), news.show()])
        assert (await shown(new))["defaults"]["draft_strategy"] == "none"
        # An answer that was on its way for long takes nothing back.
        await news.adopt([late])
        assert (await shown(new))["defaults"]["draft_strategy"] == "none"


async def test_another_version_of_the_application_begins_anew() -> None:
    async with replica("a") as (old, olds), replica("b", "other") as (new, news):
        await change(old, defaults={"draft_strategy": "nasd"})
        await news.adopt([olds.show()])
        assert (await shown(new))["set"]["defaults"] == {}
        assert news.show().num_changes == 0


async def test_a_refused_change_is_none() -> None:
    async with replica("a") as (_, olds):
        unknown = SpeculativeChange.model_validate({"defaults": {"draft_strategy": "no_such"}})
        with pytest.raises(ApiError, match="draft_strategy"):
            await olds(unknown, from_built_in=False)
        assert olds.show().num_changes == 0
