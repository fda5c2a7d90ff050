"""Spans and metrics as they arrive at a receiver of OTLP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.metrics.record import MAX_STEPS
from server.metrics.telemetry import pipeline
from server.metrics.telemetry.begin import endpoint_of
from worlds.live_server import HANG
from worlds.otlp_collector import Collector, otlp_collector, values
from worlds.scripted_engine import AsgiCall, ScriptedEngine
from worlds.serving import endless, post, serve

ROOT = Path(__file__).resolve().parents[4]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OK, ERROR, UNSET = 1, 2, 0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with otlp_collector() as found:
        yield found


def is_of_telemetry(thread: threading.Thread) -> bool:
    return thread.name.startswith("Otel") or thread.name.endswith("(shutdown)")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_tree_of_spans(collector: Collector, stream: bool) -> None:
    before = time.time_ns()
    async with serve(ScriptedEngine("abcdefg"), otlp_endpoint=collector.url) as client:
        body = {"prompt": "hi", "n": 2, "seed": 5, "temperature": 0.5, "stream": stream}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert (await client.post("/completions", json=body, headers=headers)).is_success
    request = collector.span("text_completion test/scripted")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
    assert request.status.code == UNSET
    said = values(request.attributes)
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "slipstream",
        "gen_ai.request.model": "test/scripted",
        "gen_ai.response.model": "test/scripted",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 16,
        "gen_ai.request.seed": 5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": stream,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 14,
        "gen_ai.response.finish_reasons": ["stop", "stop"],
        "http.response.status_code": 200,
        "slipstream.drafter": "ngram",
        "slipstream.num_draft_tokens": 20,
        "slipstream.num_accepted_tokens": 14,
        "slipstream.acceptance_rate": 0.7,
    }
    assert {name: said[name] for name in expected} == expected
    choices = collector.below(request)
    assert sorted(choices) == ["choice 0", "choice 1"]
    for index, choice in enumerate(choices[name] for name in sorted(choices)):
        own = values(choice.attributes)
        assert own["gen_ai.usage.cache_read.input_tokens"] == 3 + 10 * index
        phases = collector.below(choice)
        assert list(phases) == ["queue", "prefill", "decode"]
        queue, prefill, decode = phases.values()
        lengths = [each.end_time_unix_nano - each.start_time_unix_nano for each in phases.values()]
        assert lengths == pytest.approx([0.01e9, 0.01e9, 0.1e9], abs=1000)
        assert before <= choice.start_time_unix_nano == queue.start_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
        assert decode.end_time_unix_nano == choice.end_time_unix_nano
        steps = [values(event.attributes) for event in decode.events]
        assert [each["slipstream.num_tokens"] for each in steps] == [1, 3, 2, 1]
        assert [each["slipstream.draft.num_tokens"] for each in steps] == [1, 3, 2, 1]
        assert [each["slipstream.verify.num_accepted_tokens"] for each in steps] == [0, 2, 1, 0]
        assert [each["slipstream.draft_seconds"] for each in steps] == [0.0, 0.001, 0.002, 0.003]
        assert [each["slipstream.verify_seconds"] for each in steps] == [0.01] * 4
    assert all(each["service.name"] == "slipstream" for each in collector.resources)


async def test_a_span_names_the_adapter(collector: Collector) -> None:
    engine = ScriptedEngine("a")
    await engine.load_adapter("mine", "/adapters/mine")
    async with serve(engine, otlp_endpoint=collector.url) as client:
        assert (await client.post("/completions", json={"prompt": "a", "model": "mine"})).is_success
    said = values(collector.span("text_completion mine").attributes)
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "mine"


async def test_only_the_first_steps_are_told_one_by_one(collector: Collector) -> None:
    async with serve(endless(), otlp_endpoint=collector.url) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
        assert (await client.post("/chat/completions", json=body)).is_success
    choice = collector.below(collector.span("chat test/scripted"))["choice 0"]
    assert values(choice.attributes)["slipstream.num_steps"] == 200
    assert len(collector.below(choice)["decode"].events) == MAX_STEPS


async def test_a_client_that_leaves_is_seen(collector: Collector) -> None:
    engine = endless()
    async with serve(engine, otlp_endpoint=collector.url) as client:
        body = {"prompt": "a", "stream": True, "max_tokens": 400}
        async with AsgiCall(client.app, "/v1/completions", body) as call:  # type: ignore[attr-defined]
            for _ in range(3):
                await call.messages.get()
            await call.hang_up()
    request = collector.span("text_completion test/scripted")
    assert request.status.code == ERROR
    assert values(request.attributes)["error.type"] == "client_disconnected"
    choice = collector.below(request)["choice 0"]
    assert values(choice.attributes)["gen_ai.response.finish_reasons"] == ["abort"]
    assert choice.events
    written = sum(values(each.attributes)["slipstream.num_tokens"] for each in choice.events)
    assert values(choice.attributes)["gen_ai.usage.output_tokens"] == written > 0
    assert values(request.attributes)["gen_ai.usage.output_tokens"] == written
    # Drafts are known of choices that came to an end.
    assert "slipstream.num_draft_tokens" not in values(request.attributes)
    assert collector.below(choice) == {}


async def test_refusals_and_faults_are_told_apart(collector: Collector) -> None:
    engine = ScriptedEngine()
    async with serve(engine, otlp_endpoint=collector.url, api_key="k") as client:
        client.headers["authorization"] = "Bearer k"
        await client.post("/completions", json={"prompt": "the-prompt-text", "n": 0})
        engine.capacity = 0
        await client.post("/completions", json={"prompt": "the-prompt-text"})
        engine.capacity, engine.break_after = 9, 2
        await client.post("/completions", json={"prompt": "the-prompt-text"})
        await client.post("/completions", json={"prompt": "the-prompt-text", "stream": True})
        client.headers["authorization"] = "Bearer the-wrong-key"
        await client.post("/completions", json={"prompt": "the-prompt-text"})
        await client.get("/models")
    requests = [each for each in collector.spans if each.name.startswith("text_completion")]
    found = [(values(each.attributes).get("error.type"), each.status.code) for each in requests]
    assert found == [
        *(("400", UNSET), ("429", UNSET), ("503", ERROR)),
        *(("request_failed", ERROR), ("401", UNSET)),
    ]
    (point,) = collector.points("gen_ai.server.request.duration", **{"error.type": "429"})
    assert point.count == 1
    assert "gen_ai.client.token.usage" not in collector.metrics
    assert not any("the-" in str(each) for each in collector.spans)


async def test_metrics_have_the_conventions_names_and_add_up(collector: Collector) -> None:
    async with serve(ScriptedEngine("abc"), otlp_endpoint=collector.url) as client:
        for _ in range(3):
            await client.post("/completions", json={"prompt": "hi", "n": 2})
        await client.post("/chat/completions", json={"messages": [{"role": "user", "content": ""}]})
    of = {"gen_ai.operation.name": "text_completion", "gen_ai.response.model": "test/scripted"}
    (duration,) = collector.points("gen_ai.server.request.duration", **of)
    (first,) = collector.points("gen_ai.server.time_to_first_token", **of)
    (each,) = collector.points("gen_ai.server.time_per_output_token", **of)
    assert (duration.count, first.count, each.count) == (3, 6, 6)
    assert first.sum == pytest.approx(6 * 0.02)
    assert each.sum == pytest.approx(6 * 0.1 / 10)
    assert collector.metrics["gen_ai.server.time_to_first_token"].unit == "s"
    for kind, total in (("input", 6), ("output", 18)):
        usage = {"gen_ai.token.type": kind, **of}
        (tokens,) = collector.points("gen_ai.client.token.usage", **usage)
        assert (tokens.count, tokens.sum) == (3, total)
    assert len(collector.metrics["gen_ai.server.request.duration"].histogram.data_points) == 2


async def traced(collector: Collector, parent: str) -> None:
    """Sends a request whose caller has this trace."""
    async with serve(ScriptedEngine(), otlp_endpoint=collector.url) as client:
        headers = {"traceparent": parent}
        assert (await client.post("/completions", json={"prompt": "a"}, headers=headers)).is_success


@pytest.mark.parametrize(
    "given", ["", "00-0-0-0", f"00-{'0' * 32}-{PARENT}-01", f"zz-{TRACE}-{PARENT}-01", "x" * 9000]
)
async def test_an_unsound_traceparent_begins_a_trace(collector: Collector, given: str) -> None:
    await traced(collector, given)
    request = collector.span("text_completion test/scripted")
    assert request.parent_span_id == b""
    assert any(request.trace_id)


async def test_a_trace_that_is_not_sampled_is_not_sent(collector: Collector) -> None:
    await traced(collector, f"00-{TRACE}-{PARENT}-00")
    assert collector.spans == []
    assert "gen_ai.server.request.duration" in collector.metrics


async def test_a_collector_that_is_not_there_costs_nothing_but_its_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "CLOSE_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    before = {*threading.enumerate()}
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with serve(ScriptedEngine("abc"), otlp_endpoint=url) as client:
            reply = await client.post("/completions", json={"prompt": "a"})
            assert reply.json()["choices"][0]["text"] == "abc"
    # Those that still try draw random pauses, which hypothesis forbids while it makes examples.
    trying = [each for each in {*threading.enumerate()} - before if is_of_telemetry(each)]
    for each in trying:
        await asyncio.to_thread(each.join, HANG)
        assert not each.is_alive()


async def test_the_environment_says_where_to_and_who(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-own=yes")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    await post("/completions", {"prompt": "a"}, ScriptedEngine())
    assert collector.spans
    assert collector.metrics == {}
    assert collector.headers[0]["x-own"] == "yes"
    assert {each["service.name"] for each in collector.resources} == {"mine"}


BOTH = {"EXPORTER_OTLP_ENDPOINT": "http://b", "EXPORTER_OTLP_TRACES_ENDPOINT": "http://c"}


@pytest.mark.parametrize(
    ("endpoint", "variables", "traces", "metrics"),
    [
        (None, {}, None, None),
        ("http://a/", {}, "http://a/v1/traces", "http://a/v1/metrics"),
        (None, {"EXPORTER_OTLP_ENDPOINT": "http://b"}, "http://b/v1/traces", "http://b/v1/metrics"),
        ("http://a", BOTH, "http://a/v1/traces", "http://a/v1/metrics"),
        (None, {"EXPORTER_OTLP_METRICS_ENDPOINT": "http://c/own"}, None, "http://c/own"),
        ("http://a", {"TRACES_EXPORTER": "none"}, None, "http://a/v1/metrics"),
        ("http://a", {"SDK_DISABLED": "true"}, None, None),
    ],
)
def test_the_flag_comes_before_the_variables(
    monkeypatch: pytest.MonkeyPatch,
    endpoint: str | None,
    variables: dict[str, str],
    traces: str | None,
    metrics: str | None,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_{name}", value)
    assert endpoint_of("traces", endpoint) == traces
    assert endpoint_of("metrics", endpoint) == metrics


def test_where_it_is_off_nothing_is_imported_and_where_it_is_missing_the_start_says_so() -> None:
    code = (
        "import sys, server.serve, server.workers.child\n"
        "from slipstream.cli import main\n"
        "assert not any(name.startswith('opentelemetry.sdk') for name in sys.modules)\n"
        "assert not any(name.startswith('opentelemetry.exporter') for name in sys.modules)\n"
        "sys.modules['opentelemetry.exporter'] = None\n"
        "sys.exit(main(['serve', 'bundled', '--otlp-endpoint', 'http://127.0.0.1:4318']))\n"
    )
    environment: dict[str, Any] = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 2, result.stderr
    needs = "needs OpenTelemetry: pip install -e '.[otel]'"
    *_, last = result.stderr.splitlines()
    assert last == f"slipstream: otlp_endpoint: sending spans and metrics {needs}"
