from __future__ import annotations

from collections import Counter, deque

import pytest

from engine.request.stats import GammaChange, RequestStats
from server.reply.usage import PromptTokensDetails, Usage, merge, reply_metrics


def stats(
    gammas: dict[int, int] | None = None,
    accepted: dict[int, int] | None = None,
    num_emitted_tokens: int = 3,
    *,
    step_seconds: float = 0.05,
    baseline_seconds: float = 0.05,
    draft_seconds: float = 0.01,
    verify_seconds: float = 0.02,
    changes: tuple[GammaChange, ...] = (),
) -> RequestStats:
    return RequestStats(
        gammas=Counter({2: 2} if gammas is None else gammas),
        accepted=Counter({0: 1, 1: 1} if accepted is None else accepted),
        num_emitted_tokens=num_emitted_tokens,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
        step_seconds=step_seconds,
        baseline_seconds=baseline_seconds,
        drafter="ngram",
        gamma_changes=deque(changes),
    )


def test_counts_add_up_and_rates_are_of_the_sums() -> None:
    other = stats({0: 2, 1: 6}, {0: 2, 1: 6}, 14, changes=(GammaChange(3, 1, "load"),))
    both = merge([stats(), other])
    assert both["drafter"] == "ngram"
    assert (both["num_steps"], both["num_drafts"]) == (10, 8)
    assert (both["num_draft_tokens"], both["num_accepted_tokens"]) == (10, 7)
    assert (both["acceptance_rate"], both["tokens_per_step"], both["mean_gamma"]) == (0.7, 1.7, 1)
    assert (both["acceptance_histogram"], both["accepted_per_position"]) == ([3, 7], [7])
    assert (both["draft_ms"], both["verify_ms"]) == (20.0, 40.0)
    assert both["gamma_changes"] == [{"choice": 1, "step": 3, "gamma": 1, "reason": "load"}]


def test_the_speedup_is_total_time_without_drafts_over_total_time_taken() -> None:
    slow = stats(step_seconds=0.030, baseline_seconds=0.030)
    quick = stats(step_seconds=0.010, baseline_seconds=0.030)
    unknown = stats({}, {}, 0, step_seconds=0.0, baseline_seconds=0.0)
    assert merge([slow, quick, unknown])["estimated_speedup"] == pytest.approx(60 / 40)


def test_nothing_drafted_has_no_rates() -> None:
    merged = merge([stats({}, {}, 0, step_seconds=0.0, baseline_seconds=0.0)])
    for rate in ("acceptance_rate", "tokens_per_step", "estimated_speedup"):
        assert merged[rate] is None
    assert merged["mean_gamma"] == 0.0
    assert merged["acceptance_histogram"] == []


def used(account: RequestStats) -> Usage:
    return Usage(
        prompt_tokens=1,
        completion_tokens=1,
        total_tokens=2,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        speculative=merge([account]),
    )


def test_vllms_account_is_of_the_steps_that_had_drafts() -> None:
    """Two steps drafted nothing, and so accepted nothing; of the others one did not, either."""
    metrics = reply_metrics(used(stats({0: 2, 4: 2, 1: 1}, {0: 3, 1: 1, 4: 1}, 10)))
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": pytest.approx(1 + 5 / 3),
        "draft_acceptance_rate": pytest.approx(5 / 9),
        "acceptance_histogram": [1, 1, 0, 0, 1],
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
    }


@pytest.mark.parametrize("gammas", [{}, {0: 3}])
def test_without_drafts_there_is_no_such_account(gammas: dict[int, int]) -> None:
    assert reply_metrics(used(stats(gammas, {0: sum(gammas.values())}, 3))) is None
