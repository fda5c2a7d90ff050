"""The engine's accounts: what a step took and brought, for its requests, drafters and the whole engine.

Owned by the core, and changed on its thread alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import sub
from typing import Any, NamedTuple

from engine.batch import InputBatch
from engine.kv_events.begin import KvEvents
from engine.request.stats import SpeculativeStats, StepClock, StepStats
from engine.schedule.request import Plan, ScheduledRequest
from engine.schedule.scheduler import Scheduler
from engine.speculation.baseline import Baseline, EarlyFinishers, estimate_baseline
from engine.speculation.cost import CostModel
from engine.speculation.manager import Speculation
from kvpool.block_pool import BlockPool


class _Counts(NamedTuple):
    """Counts since the engine's start."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    draft_failures: int = 0
    offload_damaged: int = 0
    offload_dropped: int = 0
    offload_restored: int = 0


class Accounts:
    """Keeps the accounts of an engine. ``early``: requests that are done sooner than at gamma 0."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        speculation: Speculation,
        cost: CostModel,
        kv_events: KvEvents | None,
    ) -> None:
        self._pool, self._scheduler = pool, scheduler
        self._speculation, self._cost, self._kv_events = speculation, cost, kv_events
        self._counted = _Counts()
        self.early = EarlyFinishers()

    def account(
        self,
        plan: Plan,
        sampled: Sequence[ScheduledRequest],
        batch: InputBatch,
        clock: StepClock,
    ) -> dict[str, Any]:
        """Teaches the cost model what the step took, and accounts for every request that has sampled.
        Returns the step's own figures, as ``gauges`` takes them."""
        num_rows, num_kv_tokens = batch.num_rows, batch.num_kv_tokens
        num_requests, has_drafts = len(plan.scheduled), num_rows > plan.num_rows
        if not clock.took_longer:
            self._cost.observe(num_rows, num_kv_tokens, num_requests, clock.target, has_drafts)
        self._cost.observe_overhead(clock.other, batch.chosen is not None)
        seconds = clock.step - clock.draft
        if has_drafts and clock.took_longer:
            # Without drafts it would have been one of those that do not take longer than usual.
            usual = self._cost.step_seconds(num_rows, num_kv_tokens, num_requests, has_drafts)
            seconds = min(seconds, usual)
        baseline = estimate_baseline(
            self._cost,
            seconds,
            num_rows=num_rows,
            num_base_rows=plan.num_rows,
            num_sampling=plan.num_sampling,
            num_kv_tokens=num_kv_tokens,
            num_requests=num_requests,
            num_early=len(self.early),
        )
        by_drafter: dict[str, SpeculativeStats] = defaultdict(SpeculativeStats)
        for each in sampled:
            each.verify_seconds = (1 + len(each.draft)) / num_rows * clock.target
            _account(each, by_drafter, baseline, clock.step)
        num_emitted = sum(each.num_emitted_tokens for each in by_drafter.values())
        return {
            "num_rows": num_rows,
            "num_prompt_tokens": sum(each.num_prompt_tokens for each in plan.scheduled),
            "by_drafter": by_drafter,
            "draft_seconds": clock.draft,
            "forward_seconds": clock.forward,
            "verify_seconds": clock.verify,
            "other_seconds": clock.other,
            "step_seconds": clock.step,
            "baseline_seconds": baseline.batch_seconds(num_emitted),
            "num_preemptions": len(plan.preempted),
        }

    def gauges(self, **figures: Any) -> StepStats:
        """Returns the engine as it stands, and what was counted since the last look, beside a step's own
        figures."""
        pool, tiers = self._pool, self._pool.tiers
        new = self._new_counts()
        states, events = pool.states, self._kv_events
        sent, dropped = events.take_counts() if events is not None else (0, 0)
        return StepStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks=pool.counts(),
            state_slots={} if states is None else states.counts(),
            state_hits=0 if states is None else states.take_hits(),
            prefix_cache_queries=new.prefix_queries,
            prefix_cache_hits=new.prefix_hits,
            num_draft_failures=new.draft_failures,
            num_kv_events=sent,
            num_kv_events_dropped=dropped,
            offload_blocks=0 if pool.tier is None else len(pool.tier),
            offload_bytes=sum(each.num_bytes for each in tiers),
            offload_restored_tokens=new.offload_restored * pool.block_size,
            offload_damaged=new.offload_damaged,
            offload_dropped=new.offload_dropped,
            **figures,
        )

    def _new_counts(self) -> _Counts:
        """Returns what has come to the counts since they were last taken."""
        pool = self._pool
        counts = _Counts(
            prefix_queries=pool.num_prefix_queries,
            prefix_hits=pool.num_prefix_hits,
            draft_failures=self._speculation.num_failures,
            offload_damaged=sum(tier.num_damaged for tier in pool.tiers),
            offload_dropped=sum(tier.num_dropped for tier in pool.tiers),
            offload_restored=0 if pool.tier is None else pool.tier.num_restored,
        )
        before, self._counted = self._counted, counts
        return _Counts(*map(sub, counts, before))


def _account(
    each: ScheduledRequest,
    by_drafter: Mapping[str, SpeculativeStats],
    baseline: Baseline,
    step_seconds: float,
) -> None:
    """Enters a request's step into its own account, and into that of all requests with its drafter."""
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
