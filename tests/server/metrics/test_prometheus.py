"""Figures by our names and by vLLM's."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.request.info import StatesInfo
from engine.request.stats import StepStats
from server.metrics.prometheus import Metrics
from worlds.scraping import STEP, scrape, value
from worlds.scripted_engine import ScriptedEngine, engine_info
from worlds.serving import serve

MODEL = {"model_name": "test/scripted"}
# As Prometheus asks, for OpenMetrics first.
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
# What ``vllm bench serve``, aiperf, inference-perf and gateways' pickers read, by their sources: without
# "vllm:", and without the suffixes of series.
READ = {
    "counter": "spec_decode_num_drafts spec_decode_num_draft_tokens spec_decode_num_accepted_tokens "
    "spec_decode_num_accepted_tokens_per_pos prompt_tokens prompt_tokens_cached generation_tokens "
    "prefix_cache_hits prefix_cache_queries num_preemptions request_success",
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "histogram": "time_to_first_token_seconds e2e_request_latency_seconds "
    "request_time_per_output_token_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens "
    "request_generation_tokens",
}


@pytest.mark.parametrize("accept", ["", ACCEPT])
@pytest.mark.parametrize("kind", READ)
async def test_a_client_finds_what_it_reads(kind: str, accept: str) -> None:
    engine = ScriptedEngine()
    async with serve(engine) as client:
        engine.emit(STEP)
        reply = await client.get("http://test/metrics", headers={"accept": accept})
    parse = text_string_to_metric_families
    if accept:
        assert reply.headers["content-type"].startswith("application/openmetrics-text")
        parse = parse_openmetrics
    found = {family.name: family for family in parse(reply.text)}
    for name in READ[kind].split():
        family = found[f"vllm:{name}"]
        assert family.type == kind, name
        assert family.samples, name
        for sample in family.samples:
            assert sample.name.startswith(f"vllm:{name}")
            assert sample.labels["model_name"] == "test/scripted"


async def test_steps_are_counted(engine: ScriptedEngine, client: Any) -> None:
    engine.emit(STEP)
    engine.emit(STEP)
    seen = await scrape(client)
    for name, drafter, expected in (
        ("draft_tokens_total", "ngram", 14),
        ("draft_tokens_total", "nasd", 6),
        ("accepted_tokens_total", "ngram", 8),
        ("emitted_tokens_total", "ngram", 10),
        ("steps_total", "ngram", 6),
        ("steps_total", "nasd", 2),
        ("gamma_sum", "ngram", 14),
        ("gamma_count", "ngram", 6),
    ):
        assert value(seen, f"slipstream_spec_{name}", drafter=drafter) == expected
    at = "slipstream_spec_accepted_tokens_per_position_total"
    assert [value(seen, at, drafter="ngram", position=each) for each in "02"] == [4, 2]
    disabled = "slipstream_spec_disabled_total"
    assert value(seen, disabled, drafter="ngram", reason="too expensive") == 2
    seconds = "slipstream_step_seconds_total"
    assert [value(seen, seconds, part=each) for each in ("draft", "verify")] == [0.5, 1.0]
    assert value(seen, "slipstream_kv_blocks", state="committed") == 25
    ours = {"baseline_seconds_total": 6, "decode_seconds_total": 4, "spec_speedup_ratio": 1.5}
    ours |= {"prompt_tokens_total": 18, "generation_tokens_total": 14, "preemptions_total": 4}
    ours |= {"requests_running": 4, "requests_waiting": 1, "kv_blocks_total": 100}
    ours |= {"prefix_cache_queries_total": 32, "prefix_cache_hits_total": 16, "engine_up": 1}
    ours["spec_draft_failures_total"] = 2
    assert {name: value(seen, f"slipstream_{name}") for name in ours} == ours
    for name, expected in (
        # A draft is a request's step with gamma above 0: two of ngram's three, one of nasd's.
        ("spec_decode_num_drafts_total", 6),
        ("spec_decode_num_draft_tokens_total", 20),
        ("spec_decode_num_accepted_tokens_total", 10),
        ("prompt_tokens_total", 18 + 16),
        ("prompt_tokens_cached_total", 16),
        ("generation_tokens_total", 14),
        ("num_preemptions_total", 4),
        ("prefix_cache_queries_total", 32),
        ("prefix_cache_hits_total", 16),
        ("num_requests_running", 4),
        ("num_requests_waiting", 1),
        # Cached blocks that nobody holds are free.
        ("kv_cache_usage_perc", 0.35),
    ):
        assert value(seen, f"vllm:{name}", **MODEL) == pytest.approx(expected), name
    # Over all drafters.
    at = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(seen, at, **MODEL, position=str(each)) for each in range(3)] == [6, 2, 2]
    sizes = {"block_size": "16", "num_gpu_blocks": "100"}
    assert value(seen, "vllm:cache_config_info", **MODEL, **sizes) == 1


async def test_states_are_shown_where_layers_keep_some() -> None:
    held = {"free": 4, "seat": 2, "planned": 0, "snapshot": 4}
    async with serve(ScriptedEngine()) as client:
        assert not any("state_" in name for name, _ in await scrape(client))
        assert (await client.get("/models")).json()["data"][0]["states"] is None
    states = StatesInfo(2, 8, 1000, 512)
    engine = ScriptedEngine(info=engine_info(states=states))
    async with serve(engine) as client:
        before = await scrape(client)
        engine.emit(replace(STEP, state_slots=held, state_hits=3))
        seen = await scrape(client)
        assert (await client.get("/models")).json()["data"][0]["states"] == asdict(states)
    slots, hits = "slipstream_state_slots", "slipstream_state_hits_total"
    assert (value(before, slots, state="free"), value(before, hits)) == (10, 0)
    assert {state: value(seen, slots, state=state) for state in held} == held
    assert value(seen, hits) == 3


async def test_what_tenants_did_is_counted_under_their_names_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("tenants: [{name: a, key: ka}, {name: b, key: kb}]")
    engine = ScriptedEngine("hello")
    async with serve(engine, api_keys_file=str(file)) as client:
        body = {"prompt": "abc", "user": "b"}
        await client.post("/completions", json=body, headers={"Authorization": "Bearer ka"})
        engine.capacity = 0
        await client.post("/completions", json=body, headers={"Authorization": "Bearer kb"})
        seen = await scrape(client)
    requests = "slipstream_tenant_requests_total"
    assert value(seen, requests, tenant="a", finish_reason="stop") == 1
    assert value(seen, requests, tenant="b", finish_reason="rejected") == 1
    assert value(seen, "slipstream_tenant_tokens_total", tenant="a", kind="prompt") == 3
    assert value(seen, "slipstream_tenant_tokens_total", tenant="a", kind="written") == 11
    rejections = "slipstream_tenant_rejections_total"
    assert value(seen, rejections, tenant="b", reason="queue_full") == 1


async def test_requests_are_observed() -> None:
    engine = ScriptedEngine("hello")
    async with serve(engine) as client:
        await client.post("/completions", json={"prompt": "abc", "n": 2})
        await client.post("/completions", json={"prompt": 1})
        seen = await scrape(client)
    for name, alias, expected in (
        ("time_to_first_token_seconds", "time_to_first_token_seconds", 2 * 0.02),
        ("time_per_output_token_seconds", "request_time_per_output_token_seconds", 2 * 0.01),
        ("e2e_seconds", "e2e_request_latency_seconds", 2 * 0.12),
        ("queue_seconds", "request_queue_time_seconds", 2 * 0.01),
        ("request_inference_seconds", "request_inference_time_seconds", 2 * 0.11),
        ("request_prefill_seconds", "request_prefill_time_seconds", 2 * 0.01),
        ("request_decode_seconds", "request_decode_time_seconds", 2 * 0.1),
        ("request_prompt_tokens", "request_prompt_tokens", 6),
        ("request_generation_tokens", "request_generation_tokens", 10),
    ):
        assert value(seen, f"slipstream_{name}_sum") == pytest.approx(expected)
        assert value(seen, f"vllm:{alias}_sum", **MODEL) == pytest.approx(expected), alias
        assert value(seen, f"vllm:{alias}_count", **MODEL) == 2, alias
        assert value(seen, f"vllm:{alias}_bucket", **MODEL, le="+Inf") == 2, alias
        ours, others = (
            {dict(labels)["le"] for each, labels in seen if each == f"{series}_bucket"}
            for series in (f"slipstream_{name}", f"vllm:{alias}")
        )
        assert ours == others, alias
    assert value(seen, "slipstream_requests_total", finish_reason="stop") == 2
    rates = "slipstream_spec_request_acceptance_rate"
    assert value(seen, f"{rates}_count", drafter="ngram") == 2
    assert value(seen, f"{rates}_sum", drafter="ngram") == pytest.approx(1.4)
    assert value(seen, "slipstream_spec_request_speedup_sum", drafter="ngram") == 5
    draft = "slipstream_spec_draft_seconds_total"
    assert value(seen, draft, drafter="ngram") == pytest.approx(0.002)
    verify = "slipstream_spec_verify_seconds_total"
    assert value(seen, verify, drafter="ngram") == pytest.approx(0.018)
    http = "slipstream_http_requests_total"
    assert value(seen, http, method="POST", path="/v1/completions", status="200") == 1
    ended = "vllm:request_success_total"
    assert value(seen, ended, **MODEL, finished_reason="stop") == 2
    assert value(seen, ended, **MODEL, finished_reason="length") == 0
    # What was turned away did not finish.
    assert (ended, frozenset({**MODEL, "finished_reason": "rejected"}.items())) not in seen


async def test_rejections_are_counted_by_reason(client: Any) -> None:
    await client.post("/completions", json={"prompt": 1})
    await client.post("/completions", json={"prompt": "a" * 600})
    seen = await scrape(client)
    name = "slipstream_rejections_total"
    assert value(seen, name, reason="invalid_value") == 1
    assert value(seen, name, reason="context_length_exceeded") == 1


async def test_blocks_and_outcomes_are_told_before_the_first_request(client: Any) -> None:
    samples = await scrape(client)
    for state, number in (("free", 100), ("draft", 0), ("committed", 0), ("cached", 0)):
        assert value(samples, "slipstream_kv_blocks", state=state) == number
    # Alerts watch these.
    for outcome in ("stop", "length", "abort", "error", "rejected"):
        assert value(samples, "slipstream_requests_total", finish_reason=outcome) == 0
    assert value(samples, "slipstream_rejections_total", reason="queue_full") == 0


async def test_no_label_grows_with_requests_or_clients(engine: ScriptedEngine, client: Any) -> None:

    async def visit(client: Any, number: int) -> None:
        body = {"prompt": "a", "user": f"user-{number}", "cache_salt": f"cache_salt-{number}"}
        headers = {"x-request-id": f"id-{number}"}
        await client.post("/completions", json=body, headers=headers)
        await client.post("/completions", json=body | {f"field_{number}": 1})
        await client.post("/completions", json=body | {"model": f"model-{number}"})
        await client.get(f"/no/such/{number}")
        await client.get(f"/models/no-such-{number}")
        await client.request(f"ODD{number}", f"/no/such/{number}")
        engine.emit(STEP)

    await visit(client, 1)
    before = set(await scrape(client))
    for number in range(2, 6):
        await visit(client, number)
    after = set(await scrape(client))
    # The first scrape is an answer itself, counted in the second.
    new = {(name, labels) for name, labels in after - before if "/metrics" not in str(labels)}
    assert new == set()
    assert not any("user-" in str(key) or "cache_salt-" in str(key) for key in after)


EVENTS = {"num_kv_events": 3, "num_kv_events_dropped": 1}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # GPU memory is what a step told last.
        ([{"device_memory": {"used": 1.0, "free": 9.0}}, {}], {"gpu_memory_bytes used": 1}),
        (
            [{"device_memory": {"used": each, "free": 10.0 - each}} for each in (1.0, 3.0)],
            {"gpu_memory_bytes used": 3},
        ),
        # The speed-up forgets old steps.
        (
            [{"baseline_seconds": 1.0, "step_seconds": 1.0}] * 600
            + [{"baseline_seconds": 2.0, "step_seconds": 1.0}] * 512,
            {"spec_speedup_ratio": 2},
        ),
        # A last look at the gauges is no step.
        (
            [
                {"num_rows": 3, "num_running": 2, "blocks": {"free": 5, "committed": 3}},
                {"blocks": {"free": 8, "committed": 0}},
            ],
            {"steps_total": 1, "requests_running": 0, "kv_blocks free": 8},
        ),
        ([], {"gpu_memory_bytes used": None, "kv_events_total": 0}),
        ([EVENTS] * 2, {"kv_events_total": 6, "kv_events_dropped_total": 2}),
        (
            [
                {"offload_blocks": each, "offload_bytes": 100 * each, "offload_damaged": 1}
                | {"offload_restored_tokens": 32, "offload_dropped": 2}
                for each in (5, 3)
            ],
            {"kv_offload_blocks": 3, "kv_offload_bytes": 300, "kv_offload_damaged_total": 2}
            | {"kv_offload_restored_tokens_total": 64, "kv_offload_dropped_total": 4},
        ),
    ],
)
def test_steps_become_samples(
    steps: list[dict[str, Any]], expected: dict[str, float | None]
) -> None:
    metrics = Metrics(engine_info(), "m", lambda: True)
    for step in steps:
        metrics.observe_step(StepStats(**step))
    for sample, told in expected.items():
        name, _, label = sample.partition(" ")
        labels = {"kind" if "memory" in name else "state": label} if label else {}
        assert metrics.registry.get_sample_value(f"slipstream_{name}", labels) == told, sample
