"""Models that come and go: nobody waits for another's, no request is lost, and none goes under its
requests."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.request.errors import EngineError
from server.request.large_bodies import LARGE
from worlds.many_models import engine_of, several
from worlds.scripted_engine import AsgiCall
from worlds.serving import as_json, events, fault, serve, until

GIB = 1 << 30
LONG = {"prompt": "far" * LARGE, "truncate_prompt_tokens": 20}
HELLO = [{"role": "user", "content": "hello there"}]


def lines(reply: httpx.Response) -> list[str]:
    return reply.text.splitlines()


def _streamed(reply: httpx.Response) -> str:
    return "".join(each["choices"][0]["text"] for each in events(reply.text)[:-1])


# Of each API: path, fields, and what of the reply does not depend on when it was asked.
ASKS: list[tuple[str, dict[str, Any], Callable[[httpx.Response], Any]]] = [
    ("/v1/completions", {"prompt": "a tale"}, lambda x: x.json()["choices"][0]["text"]),
    ("/v1/completions", {"prompt": "of two", "stream": True}, _streamed),
    ("/v1/completions", LONG, lambda x: x.json()["choices"][0]["text"]),
    ("/v1/chat/completions", {"messages": HELLO}, lambda x: x.json()["choices"][0]["message"]),
    ("/v1/responses", {"input": "hi"}, lambda x: x.json()["output"][0]["content"][0]["text"]),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 20}, lambda x: x.json()["content"]),
    ("/api/generate", {"prompt": "cities", "stream": False}, lambda x: x.json()["response"]),
    ("/api/chat", {"messages": HELLO}, lambda x: [json.loads(y)["message"] for y in lines(x)]),
    ("/tokenize", {"prompt": "it was"}, lambda x: x.json()["tokens"]),
]


async def test_mixed_requests_are_all_answered_as_by_a_server_of_their_model_alone() -> None:
    """Also where each model is ended as soon as nothing uses it, in the midst of the others' requests."""
    alone: dict[tuple[str, int], Any] = {}
    for name in ("one", "two"):
        async with serve(engine_of(name), served_model_name=name, body_processes=0) as client:
            for at, (path, fields, read) in enumerate(ASKS):
                url, body = f"http://test{path}", {"model": name, **fields}
                alone[name, at] = read(await client.post(url, json=body))
    assert alone["one", 0] != alone["two", 0]
    async with several("one", "two", keep_alive=0) as served:

        async def ask(number: int) -> None:
            name, at = ("one", "two")[number % 2], number // 2 % len(ASKS)
            path, fields, read = ASKS[at]
            for _ in range(number % 7 * 3):
                await asyncio.sleep(0)
            reply = await served.client.post(path, json={"model": name, **fields})
            assert reply.status_code == 200, reply.text
            assert read(reply) == alone[name, at]

        await asyncio.gather(*map(ask, range(200)))
        await until(lambda: served.state("one") == served.state("two") == "not loaded")
        assert served.events.count("one has ended") == served.events.count("one is loaded") > 0


async def test_no_request_waits_for_the_loading_of_another_model() -> None:
    async with several("one", "two") as served:
        await served.complete("one")
        slow = served.launchers["two"]
        slow.gate.clear()
        waiting = [asyncio.ensure_future(served.complete("two")) for _ in range(3)]
        await until(lambda: served.state("two") == "loading")
        before = time.perf_counter()
        for _ in range(5):
            assert (await served.complete("one")).status_code == 200
        assert not any(each.done() for each in waiting)
        assert served.state("two") == "loading"
        slow.gate.set()
        assert {(await each).status_code for each in waiting} == {200}
        # Their deadlines count from when they came.
        assert all(each.arrival_time < before for each in slow.engine.requests)
        assert served.events == ["one begins", "one is loaded", "two begins", "two is loaded"]


async def test_a_model_that_nothing_uses_is_ended_and_loaded_again() -> None:
    async with several("one", "two", keep_alive=0) as served:
        first = await served.complete("one", "prompt")
        await until(lambda: served.events[-1] == "one has ended")
        assert (await served.complete("one", "prompt")).json()["choices"] == first.json()["choices"]
        assert served.events.count("one is loaded") == 2


async def test_a_model_is_not_ended_under_a_stream() -> None:
    async with several("one", "two", keep_alive=0) as served:
        await served.complete("one", keep_alive=None)
        waiting = asyncio.ensure_future(served.complete("one", stream=True))
        await until(lambda: served.launchers["one"].engine is not None)
        engine = served.engine("one")
        engine.gate.clear()
        await until(lambda: bool(engine.open))
        assert (await served.client.post("/tokenize", json={"model": "one", "prompt": "x"})).json()
        await asyncio.sleep(0.01)
        assert served.state("one") == "loaded"
        engine.gate.set()
        assert (await waiting).text.endswith("data: [DONE]\n\n")
        await until(lambda: served.state("one") == "not loaded")


@pytest.mark.parametrize("path", ["/api/generate", "/api/embed"])
@pytest.mark.parametrize("padding", [0, LARGE])
async def test_ollamas_keep_alive_is_obeyed(path: str, padding: int) -> None:
    async with several("one", "two") as served:

        async def ask(**fields: Any) -> httpx.Response:
            content = json.dumps({"model": "one", "prompt": "x", "stream": False} | fields)
            if path == "/api/embed":
                content = json.dumps({"model": "one:latest", "input": "x"} | fields)
            return await served.client.post(path, content=content + " " * padding)

        async def ends() -> datetime:
            (card,) = (await served.client.get("/api/ps")).json()["models"]
            return datetime.fromisoformat(card["expires_at"])

        first = await ask(keep_alive="10m")
        assert "keep_alive" not in first.headers.get("x-slipstream-ignored", "")
        now = datetime.now(UTC)
        assert 500 < ((await ends()) - now).total_seconds() <= 600
        await ask()  # which says nothing of it
        assert ((await ends()) - now).total_seconds() < 700
        for longest in (-1, 1e12, 1e300):
            await ask(keep_alive=longest)
            assert (await ends()).year > 2200
        await ask(keep_alive="0s")
        await until(lambda: served.events[-1] == "one has ended")
        assert (await served.client.get("/api/ps")).json() == {"models": []}
        await ask()
        assert 1e5 < ((await ends()) - datetime.now(UTC)).total_seconds() < 2e6


async def test_ollamas_clients_load_and_unload() -> None:
    async with several("one", "two") as served:
        asked = {"model": "one", "keep_alive": 0}
        reply = await served.client.post("/api/generate", json=asked)
        assert reply.json()["done_reason"] == "unload"
        assert served.events == []
        reply = await served.client.post("/api/chat", json={"model": "one"})
        assert reply.json()["done_reason"] == "load"
        assert served.state("one") == "loaded"
        reply = await served.client.post("/api/chat", json=asked)
        assert reply.json()["done_reason"] == "unload"
        await until(lambda: served.events[-1] == "one has ended")


async def test_an_engine_that_dies_is_told_and_loaded_again() -> None:
    async with several("one", "two") as served:
        await served.complete("one")
        engine = served.engine("one")
        engine.break_after, engine.is_alive = 1, True
        stream = await served.complete("one", stream=True)
        assert events(stream.text)[-2]["error"]["code"] == "engine_dead"
        engine.is_alive = False
        assert served.state("one") == "not loaded"
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.client.get("/ready")).status_code == 200
        assert (await served.complete("one")).status_code == 200
        assert served.events[-3:] == ["one has ended", "one begins", "one is loaded"]


async def test_the_least_recently_used_that_is_idle_goes_for_another() -> None:
    """Part of the free memory is promised to others, and does not count."""
    names = ("one", "two", "three", "four")
    async with several(*names, free=lambda: free()) as served:

        def free() -> int:
            return 8 * GIB - sum(3 * GIB for each in served.launchers.values() if each.engine)

        for each in served.launchers.values():
            each.needed_bytes = 3 * GIB
        for name in ("one", "two", "one"):
            assert (await served.complete(name)).status_code == 200
        served.events.clear()
        assert (await served.complete("three")).status_code == 200
        assert served.events == ["two has ended", "three begins", "three is loaded"]
        served.launchers["one"].promised_bytes = 2 * GIB
        await served.complete("one")
        served.launchers["four"].needed_bytes = 4 * GIB
        served.events.clear()
        assert (await served.complete("four")).status_code == 200
        assert served.events[:2] == ["three has ended", "one has ended"]
        assert served.launchers["four"].promised == [0]


async def test_what_holds_the_memory_is_said_where_nothing_can_go() -> None:
    async with several("one", "two", free=lambda: GIB) as served:
        served.launchers["two"].needed_bytes = 3 * GIB
        await served.complete("one")
        engine = served.engine("one")
        engine.gate.clear()
        running = asyncio.ensure_future(served.complete("one"))
        await until(lambda: bool(engine.open))
        refused = await served.complete("two")
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["message"] == (
            "There is no room for the model 'two', which takes 3.0 GiB: 'one' has requests running."
        )
        engine.gate.set()
        assert (await running).status_code == 200
        assert (await served.complete("two")).status_code == 200
        assert served.state("one") == "not loaded"


async def test_a_model_too_large_for_an_estimate_is_tried_where_nothing_else_is_loaded() -> None:
    async with several("one", "two", free=lambda: GIB) as served:
        served.launchers["one"].needed_bytes = 3 * GIB
        assert (await served.complete("one")).status_code == 200


async def test_so_many_models_are_loaded_at_a_time() -> None:
    async with several("one", "two", max_loaded_models=1) as served:
        replies = await asyncio.gather(*(served.complete("one") for _ in range(3)))
        assert {each.status_code for each in replies} == {200}
        served.launchers["two"].gate.clear()
        loading = asyncio.ensure_future(served.complete("two"))
        await until(lambda: served.state("two") == "loading")
        refused = await served.complete("one")
        assert refused.status_code == 503
        assert "beside 1 (max_loaded_models): 'two' is being loaded" in refused.text
        served.launchers["two"].gate.set()
        assert (await loading).status_code == 200
        assert served.state("one") == "not loaded"


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
async def test_unknown_and_missing_models_are_refused_and_nothing_is_loaded(path: str) -> None:
    async with several("one", "two") as served:
        unknown = await served.client.post(path, json={"model": "three", "prompt": "x"})
        assert unknown.status_code == 404
        assert "serves 'one', 'two'" in unknown.text
        missing = await served.client.post(path, json={"prompt": "x"})
        assert missing.status_code == 400
        assert "model: is missing" in missing.text
        large = as_json({"model": "three", "prompt": "x"}, LARGE)
        assert (await served.client.post(path, **large)).status_code == 404
        large["content"] = large["content"][: -LARGE - 1] * 999
        broken = await served.client.post(path, **large)
        assert broken.status_code == 400
        assert "not valid JSON" in broken.text
        assert served.events == []


async def test_a_tag_is_part_of_a_name_for_ollamas_clients_alone() -> None:
    async with several("one", "two") as served:
        body = {"model": "two:latest", "prompt": "x", "stream": False}
        reply = await served.client.post("/api/generate", json=body)
        assert reply.json()["response"].startswith("two")
        assert (await served.complete("two:latest")).status_code == 404


async def test_requests_that_wait_for_a_model_are_told_when_the_server_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with several("one", "two") as served:
        await served.complete("one")
        served.launchers["two"].gate.clear()
        waiting = [asyncio.ensure_future(served.complete("two")) for _ in range(3)]
        await until(lambda: served.state("two") == "loading")
        await served.table.drain()
        for each in waiting:
            assert (await each).json()["error"]["code"] == "shutting_down"
        assert (await served.complete("one")).json()["error"]["code"] == "shutting_down"
        assert "two is loaded" not in served.events
        assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_all_who_wait_are_told_of_a_failure_and_the_next_tries_anew() -> None:
    async with several("one", "two") as served:
        launcher = served.launchers["two"]
        launcher.fault = EngineError("/secret/path has no weights")
        launcher.gate.clear()
        waiting = [asyncio.ensure_future(served.complete("two")) for _ in range(3)]
        await until(lambda: served.state("two") == "loading")
        launcher.gate.set()
        for each in waiting:
            reply = await each
            assert fault(reply) == (503, "model_not_loaded")
            assert "secret" not in reply.text
        launcher.fault = None
        assert (await served.complete("two")).status_code == 200


async def test_a_load_has_its_time() -> None:
    async with several("one", "two", load_timeout=0.01) as served:
        served.launchers["two"].gate.clear()
        reply = await served.complete("two")
        assert fault(reply) == (503, "model_not_loaded")
        assert "too long" in reply.text
        assert served.state("two") == "not loaded"


async def test_who_leaves_is_given_up_and_the_load_goes_on() -> None:
    async with several("one", "two", keep_alive=0) as served:
        launcher = served.launchers["one"]
        launcher.gate.clear()
        body = {"model": "one", "prompt": "x"}
        async with AsgiCall(served.app, "/v1/completions", body) as call:
            await until(lambda: served.state("one") == "loading")
            await call.hang_up()
        assert served.state("one") == "loading"
        launcher.gate.set()
        await until(lambda: served.events[-1] == "one has ended")  # since nothing uses it
        assert served.events == ["one begins", "one is loaded", "one has ended"]


async def test_lists_have_all_models_and_their_states() -> None:
    async with several("one", "two") as served:
        assert (await served.client.get("/ready")).status_code == 200
        await served.complete("two")
        cards = (await served.client.get("/v1/models")).json()["data"]
        states = {each["id"]: each["state"] for each in cards}
        assert states == {"one": "not loaded", "two": "loaded"}
        assert [each["max_model_len"] for each in cards] == [None, 512]
        assert (await served.client.get("/v1/models/one")).json() == cards[0]
        anthropic = {"anthropic-version": "2023-06-01"}
        listed = (await served.client.get("/v1/models", headers=anthropic)).json()
        assert (listed["first_id"], listed["last_id"]) == ("one", "two")
        tags = (await served.client.get("/api/tags")).json()["models"]
        assert [each["name"] for each in tags] == ["one:latest", "two:latest"]
        assert [each["size"] > 0 for each in tags] == [True, True]
        running = (await served.client.get("/api/ps")).json()["models"]
        assert [each["name"] for each in running] == ["two:latest"]
        assert served.events == ["two begins", "two is loaded"]


async def test_an_adapters_name_chooses_its_model() -> None:
    async with several("one", "two", admin_key="secret") as served:
        admin = {"authorization": "Bearer secret"}
        asked = {"name": "tuned", "path": "/adapters/tuned"}
        url = "/admin/lora"
        assert (await served.client.post(url, json=asked, headers=admin)).status_code == 400
        loaded = await served.client.post(f"{url}?model=two", json=asked, headers=admin)
        assert loaded.status_code == 200, loaded.text
        taken = await served.client.post(f"{url}?model=one", json=asked, headers=admin)
        assert "is called that" in taken.text
        reply = await served.complete("tuned")
        assert reply.json()["choices"][0]["text"].startswith("two")


async def test_each_model_has_a_label_in_one_set_of_metrics() -> None:
    async with several("one", "two", "three") as served:
        for name in ("one", "two", "two"):
            await served.complete(name)
        await served.complete("four")
        text = (await served.client.get("/metrics")).text
        found = {each.name: each for each in text_string_to_metric_families(text)}
        assert text.count("# TYPE slipstream_requests_total ") == 1
        assert _figures(found["slipstream_model_loaded"]) == {"one": 1, "two": 1, "three": 0}
        assert _figures(found["slipstream_model_loads"]) == {"one": 1, "two": 1}
        stopped = {
            each.labels["model"]: each.value
            for each in found["slipstream_requests"].samples
            if each.labels.get("finish_reason") == "stop" and each.name.endswith("total")
        }
        assert stopped == {"one": 1, "two": 2}
        assert _figures(found["slipstream_engine_up"]) == {"one": 1, "two": 1}
        statuses = {each.labels["status"] for each in found["slipstream_http_requests"].samples}
        assert statuses == {"200", "404"}
        rejected = found["slipstream_rejections"].samples
        assert {each.labels["reason"] for each in rejected} == {"model_not_found"}


def _figures(family: Any) -> dict[str, float]:
    found = [each for each in family.samples if not each.name.endswith("_created")]
    return {each.labels["model"]: each.value for each in found}


async def test_a_stored_response_is_gone_on_from_by_another_model() -> None:
    async with several("one", "two") as served:
        first = await served.client.post("/v1/responses", json={"model": "one", "input": "hi"})
        more = {"model": "two", "input": "on", "previous_response_id": first.json()["id"]}
        second = await served.client.post("/v1/responses", json=more)
        assert second.status_code == 200
        assert (await served.client.get(f"/v1/responses/{first.json()['id']}")).status_code == 200
        assert served.state("one") == "loaded"


async def test_drafters_are_those_of_the_model_asked_for() -> None:
    async with several("one", "two") as served:
        assert (await served.client.get("/v1/drafters")).status_code == 400
        found = await served.client.get("/v1/drafters?model=two")
        assert found.json()["object"] == "list"
        assert served.events == ["two begins", "two is loaded"]
