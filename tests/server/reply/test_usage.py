from __future__ import annotations

import pytest

from engine.events import GammaChange, SpeculativeStats
from server.reply.usage import merge


def stats(**changes: object) -> SpeculativeStats:
    values: dict[str, object] = {
        "drafter": "ngram",
        "num_steps": 2,
        "num_draft_tokens": 4,
        "num_accepted_tokens": 1,
        "num_emitted_tokens": 3,
        "mean_gamma": 2.0,
        "acceptance_histogram": (1, 1),
        "accepted_per_position": (1,),
        "estimated_speedup": 1.0,
        "draft_ms": 10.0,
        "verify_ms": 20.0,
    }
    return SpeculativeStats(**(values | changes))  # type: ignore[arg-type]


def test_counts_add_up_and_rates_are_of_the_sums() -> None:
    other = stats(
        num_steps=8,
        num_draft_tokens=6,
        num_accepted_tokens=6,
        num_emitted_tokens=14,
        mean_gamma=0.75,
        acceptance_histogram=(2, 6, 0),
        accepted_per_position=(4, 2),
        gamma_changes=(GammaChange(3, 1, "load"),),
    )
    both = merge([stats(), other])
    assert both.num_draft_tokens == 10
    assert both.acceptance_rate == 0.7
    assert both.tokens_per_step == 1.7
    assert both.mean_gamma == 1.0
    assert both.acceptance_histogram == [3, 7, 0]
    assert both.accepted_per_position == [5, 2]
    assert (both.draft_ms, both.verify_ms) == (20.0, 40.0)
    assert [move.model_dump() for move in both.gamma_changes] == [
        {"choice": 1, "step": 3, "gamma": 1, "reason": "load"}
    ]


def test_a_speedup_weighs_by_the_time_it_took() -> None:
    slow = stats(estimated_speedup=1.0, draft_ms=0.0, verify_ms=30.0)
    quick = stats(estimated_speedup=3.0, draft_ms=5.0, verify_ms=5.0)
    unknown = stats(estimated_speedup=None, verify_ms=1000.0)
    # 30 ms and 10 ms taken, 30 ms and 30 ms without drafting.
    assert merge([slow, quick, unknown]).estimated_speedup == pytest.approx(60 / 40)


def test_nothing_drafted_has_no_rates() -> None:
    idle = stats(
        num_steps=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        num_emitted_tokens=0,
        mean_gamma=0.0,
        estimated_speedup=None,
    )
    merged = merge([idle])
    assert merged.acceptance_rate is None
    assert merged.tokens_per_step is None
    assert merged.estimated_speedup is None
    assert merged.mean_gamma == 0.0
