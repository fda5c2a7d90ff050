"""The ingress under Ray Serve, in front of replicas in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.ray.exchange import too_many_waiting
from engine.request.errors import EngineDeadError
from worlds.gathered_replicas import Fleet, fleet
from worlds.scripted_engine import AsgiCall, ScriptedEngine
from worlds.serving import endless, events, fault, until

ADMIN = {"authorization": "Bearer secret"}


@pytest.fixture
async def found() -> AsyncIterator[Fleet]:
    async with fleet(ScriptedEngine(), ScriptedEngine()) as made:
        yield made


def body(prompt: str = "once", **more: Any) -> dict[str, Any]:
    return {"model": "test/scripted", "prompt": prompt, "max_tokens": 64, "seed": 1} | more


def texts(stream: str) -> str:
    return "".join(
        choice["text"]
        for each in events(stream)
        if each != "[DONE]" and "error" not in each
        for choice in each["choices"]
    )


def text_of(reply: httpx.Response, stream: bool) -> str:
    """The text of OpenAI's completion, or of Ollama's lines."""
    if reply.text.startswith('{"model"'):
        return "".join(json.loads(line)["response"] for line in reply.text.splitlines())
    text: str = texts(reply.text) if stream else reply.json()["choices"][0]["text"]
    return text


async def first_asked(found: Fleet, path: str = "/v1/completions") -> str:
    """The replica that such a request belongs to."""
    await found.client.post(path, json={"prompt": "once"})
    (name,) = found.replicas.asked
    found.replicas.asked.clear()
    return name


async def own_figures(found: Fleet) -> dict[str, float]:
    """The ingress's samples, by name and what else tells them apart."""
    reply = await found.client.get("/metrics")
    prefix = "slipstream_gateway_"
    return {
        " ".join([each.name.removeprefix(prefix), *told_by]): each.value
        for family in text_string_to_metric_families(reply.text)
        for each in family.samples
        if each.name.startswith(prefix)
        for told_by in [[value for label, value in each.labels.items() if label != "ingress"]]
    }


async def test_everything_of_a_replica_is_there(found: Fleet) -> None:
    whole = await found.client.post("/v1/completions", json=body())
    assert whole.json()["choices"][0]["text"] == "hello world"
    assert "x-request-id" not in whole.headers  # Serve's proxy adds it
    stream = await found.client.post("/v1/completions", json=body(stream=True))
    assert texts(stream.text) == "hello world"
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert (await found.client.get("/v1/models")).json()["data"][0]["id"] == "test/scripted"
    refused = await found.client.post("/v1/completions", json=body(max_tokens="x"))
    assert fault(refused, "param") == (400, "max_tokens")
    long = await found.client.post("/v1/completions", json=body("x" * 5000))
    assert fault(long) == (413, "body_too_large")
    assert (await found.client.get("/nothing")).status_code == 404

    async def endless_body() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1000

    long = await found.client.post("/v1/completions", content=endless_body())
    assert fault(long) == (413, "body_too_large")


async def test_what_begins_alike_goes_to_one_replica(found: Fleet) -> None:
    beginning = "a system's prompt of more than the sixty-four characters that count here; "
    for number in range(6):
        await found.client.post("/v1/completions", json=body(f"{beginning}{number}"))
    assert len(set(found.replicas.asked)) == 1
    for number in range(20):
        await found.client.post("/v1/completions", json=body(f"{number} {beginning}"))
    assert set(found.replicas.asked) == {"a", "b"}


async def test_a_kept_response_is_found_wherever_it_is(found: Fleet) -> None:
    for number in range(8):  # of either replica
        made = await found.client.post("/v1/responses", json={"input": f"{number}"})
        path = f"/v1/responses/{made.json()['id']}"
        assert (await found.client.get(path)).json() == made.json()
        assert (await found.client.delete(path)).json()["deleted"]
        assert (await found.client.get(path)).status_code == 404
    assert set(found.replicas.asked) == {"a", "b"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [0, 1])
async def test_a_request_that_wrote_nothing_is_done_by_another(
    found: Fleet, stream: bool, messages: int
) -> None:
    name = await first_asked(found)
    found.replicas.lives[name] = messages  # its end comes before or after the answer's head
    reply = await found.client.post("/v1/completions", json=body(stream=stream))
    assert reply.status_code == 200
    assert text_of(reply, stream) == "hello world"
    assert found.replicas.asked == [name, *({"a", "b"} - {name})]
    assert not any(engine.open for engine in found.engines.values())
    figures = await own_figures(found)
    assert (figures["requests_redone_total"], figures["requests_total home"]) == (1, 2)
    assert figures["errors_total replica_lost"] == figures["streams_lost_total"] == 0


@pytest.mark.parametrize("who", ["ingress", "replica"])
async def test_a_stream_that_has_begun_ends_with_an_error_and_is_counted_once(
    found: Fleet, who: str
) -> None:
    name = await first_asked(found)
    engine = found.engines[name]
    if who == "ingress":
        found.replicas.lives[name] = 3  # the head, and two events
    else:
        engine.break_after, engine.error = 2, EngineDeadError("the engine died")
    reply = await found.client.post("/v1/completions", json=body(stream=True))
    *written, error, done = events(reply.text)
    assert "".join(each["choices"][0]["text"] for each in written) == "hello world"[:4]
    code = "replica_lost" if who == "ingress" else "engine_dead"
    assert (error["error"]["code"], done) == (code, "[DONE]")
    assert found.replicas.asked == [name]
    await until(lambda: not engine.open)
    figures = await own_figures(found)
    assert figures["streams_lost_total"] == 1
    assert figures["requests_redone_total"] == figures["errors_total replica_lost"] == 0


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 64}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 64}),
    ],
)
async def test_an_error_among_events_with_names_has_one_and_its_apis_shape(
    found: Fleet, path: str, asked: dict[str, Any]
) -> None:
    found.replicas.lives = {"a": 4, "b": 4}
    reply = await found.client.post(path, json=asked | {"stream": True})
    *written, last = reply.text.removesuffix("\n\n").split("\n\n")
    name, data = last.split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["type"] == "error"
    assert (error if "sequence_number" in error else error["error"])["code"] == "replica_lost"
    if path == "/v1/responses":
        numbers = [json.loads(each.split("data: ")[1])["sequence_number"] for each in written]
        assert [*numbers, error["sequence_number"]] == list(range(len(numbers) + 1))
        return
    assert written[0].startswith("event: message_start\n")
    found.replicas.lives = {"a": 0, "b": 0}
    reply = await found.client.post(path, json=asked)
    assert (reply.status_code, reply.json()["type"]) == (503, "error")
    assert reply.json()["error"]["code"] == "replica_lost"


@pytest.mark.parametrize("stream", [False, True])
async def test_where_nobody_is_left_it_says_so(found: Fleet, stream: bool) -> None:
    found.replicas.lives = {"a": 0, "b": 0}
    reply = await found.client.post("/v1/completions", json=body(stream=stream))
    assert fault(reply) == (503, "replica_lost")
    assert reply.headers["retry-after"] == "1"
    assert len(found.replicas.asked) == 3
    figures = await own_figures(found)
    assert (figures["errors_total replica_lost"], figures["streams_lost_total"]) == (1, 0)
    for path in ("/health", "/ready"):
        assert (await found.client.get(path)).status_code == 503


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_whose_engine_has_died_is_passed_over(
    found: Fleet, path: str, stream: bool
) -> None:
    dead = found.engines[await first_asked(found, path)]
    dead.break_after, dead.error = 0, EngineDeadError("the engine died")
    reply = await found.client.post(path, json={"prompt": "once", "stream": stream})
    assert (reply.status_code, text_of(reply, stream)) == (200, "hello world")
    assert (await own_figures(found))["requests_redone_total"] == 1
    dead.is_alive = False
    assert (await found.client.get("/health")).status_code == 200
    for engine in found.engines.values():
        engine.is_alive = False
    reply = await found.client.post("/v1/completions", json=body(stream=stream))
    assert fault(reply) == (503, "replica_lost")
    assert (await found.client.get("/health")).json() == {"status": "dead"}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 64}),
        ("/api/generate", {"prompt": "x"}),
    ],
)
async def test_a_stream_that_its_replica_ends_is_counted_in_every_shape(
    found: Fleet, path: str, asked: dict[str, Any]
) -> None:
    for engine in found.engines.values():
        engine.break_after, engine.error = 2, EngineDeadError("the engine died")
    reply = await found.client.post(path, json=asked | {"stream": True})
    assert "The engine has stopped" in reply.text
    assert (await own_figures(found))["streams_lost_total"] == 1


async def test_a_stream_that_waited_hears_of_the_next_replicas_refusal(found: Fleet) -> None:
    name = await first_asked(found)
    (other,) = {"a", "b"} - {name}
    found.replicas.lives[name] = 1  # its head only
    found.engines[other].capacity = 0
    reply = await found.client.post("/v1/completions", json=body(stream=True))
    assert reply.status_code == 200
    error, done = events(reply.text)
    assert (error["error"]["code"], done) == ("queue_full", "[DONE]")


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(too_many_waiting(), 429, "queue_full"), (KeyError("own"), 500, "internal_error")],
)
async def test_what_stops_a_request_on_its_way_is_answered(
    found: Fleet, refusal: Exception, status: int, code: str
) -> None:
    found.replicas.refusal = refusal
    reply = await found.client.post("/v1/completions", json=body(stream=True))
    assert fault(reply) == (status, code)
    assert "own" not in reply.text
    assert (await own_figures(found))[f"errors_total {code}"] == 1


async def test_a_client_who_leaves_ends_its_request() -> None:
    engines = endless(), endless()
    async with fleet(*engines) as found:
        async with AsgiCall(found.app, "/v1/completions", body(stream=True)) as call:
            for _ in range(3):
                await call.messages.get()
            assert sum(len(each.open) for each in engines) == 1
            await call.hang_up()
        await until(lambda: not any(each.open for each in engines))
        assert sum(len(each.closed_early) for each in engines) == 1


# Prometheus would rather have OpenMetrics.
@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0"])
async def test_metrics_are_of_all_replicas(found: Fleet, accept: str) -> None:
    name = await first_asked(found)
    reply = await found.client.get("/metrics", headers={"accept": accept})
    types = [line.split()[2] for line in reply.text.splitlines() if line.startswith("# TYPE")]
    # The ingress's own figures come after those of the replicas.
    assert len(types) == len(set(types))
    families = {each.name: each for each in text_string_to_metric_families(reply.text)}
    served = {
        each.labels["replica"]: each.value
        for each in families["slipstream_requests"].samples
        if each.name.endswith("_total") and each.labels["finish_reason"] == "stop"
    }
    assert served[name] == 1
    assert sum(served.values()) == 1
    up = families["slipstream_engine_up"]
    assert {each.labels["replica"]: each.value for each in up.samples} == {"a": 1, "b": 1}
    assert up.type == "gauge"
    for family in families.values():
        is_own = family.name.startswith("slipstream_gateway_")
        for each in family.samples:
            assert is_own or each.labels["replica"] in ("a", "b")
            assert each.labels.get("ingress") == ("front" if is_own else None)


async def test_where_requests_went_is_counted(found: Fleet) -> None:
    name = await first_asked(found)
    await found.client.post("/v1/completions", json=body(stream=True))
    await found.client.get("/v1/models")
    found.replicas.loads = {name: 50}
    await found.client.post("/v1/completions", json=body())
    figures = await own_figures(found)
    routes = {each: figures[f"requests_total {each}"] for each in ("home", "spilled", "unkeyed")}
    assert routes == {"home": 2, "spilled": 1, "unkeyed": 1}
    assert figures["requests_redone_total"] == figures["streams_lost_total"] == 0
    assert figures["queue_seconds_count"] == 4
    assert figures["requests_waiting"] == 0
    assert {figures[f"requests_open {each}"] for each in "ab"} == {0}


async def test_what_is_open_at_a_replica_that_leaves_is_shown() -> None:
    engines = endless(), endless()
    async with fleet(*engines) as found:
        async with AsgiCall(found.app, "/v1/completions", body(stream=True)) as call:
            await call.messages.get()
            (name,) = found.replicas.asked
            (other,) = {"a", "b"} - {name}
            figures = await own_figures(found)
            assert figures[f"requests_open {name}"] == 1
            assert figures[f"replica_leaving {name}"] == 0
            found.replicas.lives[name] = 0  # no answer to what all are asked; what is open goes on
            figures = await own_figures(found)
            assert figures[f"requests_open {name}"] == figures[f"replica_leaving {name}"] == 1
            assert figures[f"replica_leaving {other}"] == 0
            await call.hang_up()
        await until(lambda: not any(each.open for each in engines))
        figures = await own_figures(found)
        assert f"requests_open {name}" not in figures


async def test_a_change_is_made_in_all_replicas() -> None:
    async with fleet(ScriptedEngine(), ScriptedEngine(), admin_key="secret") as found:
        change = {"defaults": {"draft_strategy": "nasd"}}
        refused = await found.client.patch("/admin/speculative", json=change)
        assert refused.status_code == 401
        done = await found.client.patch("/admin/speculative", json=change, headers=ADMIN)
        assert done.json()["defaults"]["draft_strategy"] == "nasd"
        for app in found.replicas.apps.values():
            assert app.state.models.only.resolver.defaults.draft_strategy == "nasd"
        found.replicas.lives = {"a": 0, "b": 0}
        lost = await found.client.patch("/admin/speculative", json=change, headers=ADMIN)
        assert fault(lost) == (503, "not_adopted")
        assert (await own_figures(found))["errors_total not_adopted"] == 1


async def test_guards_hold_behind_a_prefix() -> None:
    async with fleet(ScriptedEngine(), ScriptedEngine(), api_key="secret") as found:
        transport = httpx.ASGITransport(app=found.app, root_path="/some/where")
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            reply = await client.post("/some/where/v1/completions", json=body())
            assert reply.status_code == 401
            headers = {"authorization": "Bearer secret"}
            reply = await client.post("/some/where/v1/completions", json=body(), headers=headers)
            assert reply.json()["choices"][0]["text"] == "hello world"
