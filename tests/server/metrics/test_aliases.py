"""What bench clients and schedulers read of ``/metrics`` by vLLM's names."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.request.stats import StepStats
from server.metrics.prometheus import Metrics
from worlds.scraping import STEP, scrape, value
from worlds.scripted_engine import ScriptedEngine, engine_info
from worlds.serving import Connect

pytestmark = pytest.mark.anyio

MODEL = {"model_name": "test/scripted"}
# As Prometheus asks, for OpenMetrics first.
ACCEPT = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
# What ``vllm bench serve``, aiperf, inference-perf and gateways' pickers read, by their sources: without
# "vllm:", and without the suffixes of series.
READ = {
    "counter": (
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "num_preemptions",
        "request_success",
    ),
    "gauge": (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
    ),
    "histogram": (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_time_per_output_token_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ),
}


@pytest.mark.parametrize("accept", ["", ACCEPT])
@pytest.mark.parametrize("kind", READ)
def test_a_client_finds_what_it_reads(kind: str, accept: str) -> None:
    metrics = Metrics(engine_info(), "test/scripted", lambda: True)
    metrics.observe_step(STEP)
    content, content_type = metrics.exposition(accept)
    parse = text_string_to_metric_families
    if accept:
        assert content_type.startswith("application/openmetrics-text")
        parse = parse_openmetrics
    found = {family.name: family for family in parse(content.decode())}
    for name in READ[kind]:
        family = found[f"vllm:{name}"]
        assert family.type == kind, name
        assert family.samples, name
        for sample in family.samples:
            assert sample.name.startswith(f"vllm:{name}")
            assert sample.labels["model_name"] == "test/scripted"


async def test_steps_move_them(connect: Connect) -> None:
    engine = ScriptedEngine()
    async with connect(engine) as client:
        engine.emit(STEP)
        engine.emit(STEP)
        seen = await scrape(client)
    for name, expected in (
        # A draft is a request's step with gamma above 0: two of ngram's three, one of nasd's.
        ("spec_decode_num_drafts_total", 6),
        ("spec_decode_num_draft_tokens_total", 20),
        ("spec_decode_num_accepted_tokens_total", 8),
        ("prompt_tokens_total", 18 + 16),
        ("prompt_tokens_cached_total", 16),
        ("generation_tokens_total", 12),
        ("num_preemptions_total", 4),
        ("prefix_cache_queries_total", 32),
        ("prefix_cache_hits_total", 16),
        ("num_requests_running", 4),
        ("num_requests_waiting", 1),
        # Cached blocks that nobody holds are free.
        ("kv_cache_usage_perc", 0.35),
    ):
        assert value(seen, f"vllm:{name}", **MODEL) == pytest.approx(expected), name
    at = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(seen, at, **MODEL, position=str(each)) for each in range(3)] == [4, 2, 2]
    sizes = {"block_size": "16", "num_gpu_blocks": "100"}
    assert value(seen, "vllm:cache_config_info", **MODEL, **sizes) == 1


async def test_positions_are_summed_over_drafters() -> None:
    metrics = Metrics(engine_info(), "m", lambda: True)
    both = {"ngram": STEP.by_drafter["ngram"], "suffix": STEP.by_drafter["ngram"]}
    metrics.observe_step(replace(STEP, by_drafter=both))
    content = metrics.exposition("")[0].decode()
    prefix = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines = [line for line in content.splitlines() if line.startswith(prefix)]
    assert lines == [
        f'{prefix}{{model_name="m",position="{at}"}} {count}'
        for at, count in enumerate(["4.0", "2.0", "2.0"])
    ]


async def test_requests_move_them(connect: Connect) -> None:
    async with connect(ScriptedEngine("hello")) as client:
        await client.post("/completions", json={"prompt": "abc", "n": 2})
        await client.post("/completions", json={"prompt": 1})
        seen = await scrape(client)
    for name, expected in (
        ("time_to_first_token_seconds", 2 * 0.02),
        ("request_time_per_output_token_seconds", 2 * 0.01),
        ("e2e_request_latency_seconds", 2 * 0.12),
        ("request_queue_time_seconds", 2 * 0.01),
        ("request_inference_time_seconds", 2 * 0.11),
        ("request_prefill_time_seconds", 2 * 0.01),
        ("request_decode_time_seconds", 2 * 0.1),
        ("request_prompt_tokens", 6),
        ("request_generation_tokens", 10),
    ):
        assert value(seen, f"vllm:{name}_sum", **MODEL) == pytest.approx(expected), name
        assert value(seen, f"vllm:{name}_count", **MODEL) == 2, name
        assert value(seen, f"vllm:{name}_bucket", **MODEL, le="+Inf") == 2, name
    ended = "vllm:request_success_total"
    assert value(seen, ended, **MODEL, finished_reason="stop") == 2
    assert value(seen, ended, **MODEL, finished_reason="length") == 0
    # What was turned away did not finish.
    assert (ended, frozenset({**MODEL, "finished_reason": "rejected"}.items())) not in seen


def test_a_histogram_has_the_buckets_of_its_figure() -> None:
    metrics = Metrics(engine_info(), "m", lambda: True)
    metrics.observe_step(StepStats())
    families = text_string_to_metric_families(metrics.exposition("")[0].decode())
    found = {family.name: family for family in families}

    def buckets(name: str) -> list[str]:
        samples = found[name].samples
        return [each.labels["le"] for each in samples if each.name.endswith("_bucket")]

    aliased = buckets("vllm:e2e_request_latency_seconds")
    assert aliased == buckets("slipstream_e2e_seconds")
    assert aliased[-1] == "+Inf"
