"""What a step did for a request, in the accounts that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping

from engine.request.stats import SpeculativeStats
from engine.schedule.request import ScheduledRequest
from engine.speculation.baseline import Baseline


def account(
    each: ScheduledRequest,
    by_drafter: Mapping[str, SpeculativeStats],
    baseline: Baseline,
    step_seconds: float,
) -> None:
    """Into the request's own account, and that of all requests with its drafter."""
    stats, outcome = each.request.stats, each.outcome
    assert outcome is not None
    gamma, num_emitted = len(each.draft), len(outcome.emitted_token_ids)
    stats.note_gamma(gamma, each.reason)
    recorded = (
        gamma,
        outcome.num_accepted,
        num_emitted,
        each.reason,
        each.draft_seconds,
        each.verify_seconds,
        step_seconds,
        baseline.seconds(num_emitted),
        int(outcome.stop_token_id is not None),
    )
    stats.record(*recorded)
    by_drafter[stats.drafter].record(*recorded)
