"""A step's figures, and ``/metrics`` as a dictionary."""

from __future__ import annotations

from collections import Counter
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from engine.request.stats import SpeculativeStats, StepStats

STEP = StepStats(
    num_rows=20,
    num_prompt_tokens=9,
    by_drafter={
        "ngram": SpeculativeStats(
            gammas=Counter({4: 1, 3: 1, 0: 1}),
            accepted=Counter({3: 1, 1: 1, 0: 1}),
            disabled=Counter({"too expensive": 1}),
            num_emitted_tokens=5,
        ),
        "nasd": SpeculativeStats(
            gammas=Counter({3: 1}), accepted=Counter({1: 1}), num_emitted_tokens=2
        ),
    },
    draft_seconds=0.25,
    forward_seconds=1.0,
    verify_seconds=0.5,
    other_seconds=0.25,
    step_seconds=2.0,
    baseline_seconds=3.0,
    num_preemptions=2,
    num_running=4,
    num_waiting=1,
    blocks={"free": 60, "draft": 10, "committed": 25, "cached": 5},
    prefix_cache_queries=16,
    prefix_cache_hits=8,
    num_draft_failures=1,
)


async def scrape(client: Any) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    reply = await client.get("http://test/metrics")
    assert reply.status_code == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def value(samples: Any, name: str, **labels: str) -> float:
    number: float = samples[name, frozenset(labels.items())]
    return number
