"""The engine's core: one synchronous step, from commands taken to events given. No asyncio, no text.

Everything a step does is a row of one forward: prompt chunks, anchors and draft nodes alike. Plain
decoding is gamma 0 on this path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from drafters.base import HiddenRows, Observation
from engine.batch import ForwardOutput, InputBatch, RequestRows, build_batch, slot_of
from engine.events import ErrorEvent, StepStats, TokenEvent
from engine.params import GenerationRequest
from engine.report import StepClock, finish_info, read_prompt_logprobs, token_event
from engine.sampling.logprobs import top_probs, top_tokens
from engine.sampling.state import RowGroup, SamplingState
from engine.schedule.request import Request
from engine.schedule.scheduler import Plan, ScheduledRequest, Scheduler
from engine.speculation.cost import CostModel
from engine.speculation.manager import Draft, DraftRound, Speculation
from engine.stats import (
    Baseline,
    RequestSpeculationStats,
    StepGauges,
    StepSeconds,
    StepShape,
    StepStatsBuilder,
    estimate_baseline,
)
from engine.verification.match import Outcome
from engine.verification.verify import verify_step
from kvpool.block_pool import BlockPool


class Runner(Protocol):
    """What the core asks of the target; ``engine.model.runner`` has the real one."""

    def forward(self, batch: InputBatch) -> ForwardOutput:
        """Keys and values of all rows are stored afterwards."""

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Copy stored rows between slots, reading all before writing any."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the model allows; ``max_model_len`` counts prompt and output tokens."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True)
class StepResult:
    """What a step has to say: events in order, and its figures (None where nothing ran)."""

    events: list[TokenEvent | ErrorEvent] = field(default_factory=list)
    stats: StepStats | None = None


@dataclass(slots=True)
class _Rows:
    """A scheduled request's part in the batch, kept from laying its rows out to reporting on them.

    ``base``: tokens committed before the step. ``first_row``: its first row among the logits;
    ``anchor_row``: its anchor's, where it samples.
    """

    request: Request
    base: int
    num_known: int
    samples: bool
    draft: Draft
    first_row: int = 0
    anchor_row: int = 0
    outcome: Outcome | None = None

    @property
    def num_prompt_rows(self) -> int:
        end = min(self.base + self.num_known, self.request.num_prompt_tokens)
        return max(0, end - self.base)


class EngineCore:
    """Owns the requests and drives pool, scheduler, drafters, model and verifier."""

    def __init__(
        self,
        runner: Runner,
        pool: BlockPool,
        scheduler: Scheduler,
        speculation: Speculation,
        cost: CostModel,
        limits: ModelLimits,
        check_integrity: bool = False,
    ) -> None:
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        self.speculation = speculation
        self.cost = cost
        self.limits = limits
        self._check_integrity = check_integrity
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._result = StepResult()
        self._prefix_counts = (0, 0)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def max_num_seqs(self) -> int:
        return self.scheduler.max_num_seqs

    # --- commands ---

    def prepare(self, params: GenerationRequest) -> Request:
        """A request ready to submit; callable from any thread. Raises RequestError."""
        limits = self.limits
        sampling = SamplingState(
            params, limits.eos_token_ids, limits.vocab_size, limits.max_model_len
        )
        return Request(params, sampling, RequestSpeculationStats(params.speculative.drafter))

    def submit(self, request: Request) -> None:
        request.arrival_order = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self.scheduler.submit(request)
        self.speculation.open(request)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request)
            finish = finish_info(request, "abort")
            self._result.events.append(TokenEvent(request_id, (), (), finish=finish))

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def take_result(self) -> StepResult:
        """What has come up since the last result."""
        result, self._result = self._result, StepResult()
        return result

    def _remove(self, request: Request) -> None:
        self.scheduler.remove(request)
        request.stats.num_failed_drafts = self.speculation.close(request)
        del self._requests[request.request_id]

    # --- one step ---

    def step(self) -> StepResult:
        """Run one step. The result also holds the events of commands since the last."""
        clock = StepClock()
        plan = self.scheduler.plan()
        if plan.scheduled:
            with clock.measure("draft"):
                round_ = self.speculation.draft(plan)
            rows, batch = self._lay_out(plan, round_)
            with clock.measure("forward"):
                logits, hidden = self.runner.forward(batch)
            with clock.measure("verify"):
                self._verify(rows, logits)
            self._commit(rows)
            with clock.measure("draft"):
                self._observe_hidden(rows, batch, hidden, round_)
                self._observe(rows, round_, logits)
            self._report(plan, rows, batch, round_, logits, clock.seconds())
        if self._check_integrity:
            self.pool.check_integrity()
        return self.take_result()

    def _lay_out(self, plan: Plan, round_: DraftRound) -> tuple[list[_Rows], InputBatch]:
        """Lease slots for drafts, shrinking them to what there is, and lay all rows out flat."""
        rows = [
            _Rows(
                each.request,
                each.request.num_computed_tokens,
                each.num_known,
                each.samples,
                self._lease(each, round_.of(each.request)),
            )
            for each in plan.scheduled
        ]
        batch = build_batch(
            [self._request_rows(each) for each in rows],
            self.pool.block_size,
            wants_hidden=any(self.speculation.wants_hidden(each.request) for each in rows),
        )
        for each, part in zip(rows, batch.requests, strict=True):
            each.first_row = part.first_logit
            each.anchor_row = part.first_logit + part.num_logits - 1 - len(each.draft.tree)
        return rows, batch

    def _lease(self, scheduled: ScheduledRequest, draft: Draft) -> Draft:
        if not draft.tree.token_ids:
            return draft
        request = scheduled.request
        known = request.num_computed_tokens + scheduled.num_known
        covered = self.pool.allocate_draft(request.request_id, known + len(draft.tree))
        room = max(0, covered - known)
        if room >= len(draft.tree):
            return draft
        return Draft(draft.proposal, draft.tree.subtree(range(room)), "no_kv")

    def _request_rows(self, rows: _Rows) -> RequestRows:
        request, tree = rows.request, rows.draft.tree
        known = request.token_ids[rows.base : rows.base + rows.num_known]
        num_logits = 1 + len(tree) if rows.samples else 0
        if request.wants_prompt_logprobs:
            num_logits = rows.num_known + len(tree)
        return RequestRows(
            token_ids=[*known, *tree.token_ids],
            num_known=rows.num_known,
            base=rows.base,
            parents=tree.parents,
            block_table=self.pool.block_table(request.request_id),
            num_logits=num_logits,
        )

    def _verify(self, rows: Sequence[_Rows], logits: torch.Tensor) -> None:
        sampling = [each for each in rows if each.samples]
        groups = [
            RowGroup(each.request.sampling, each.anchor_row, each.draft.tree) for each in sampling
        ]
        if groups:
            outcomes = verify_step(logits, groups)
            for each, outcome in zip(sampling, outcomes, strict=True):
                each.outcome = outcome

    def _commit(self, rows: Sequence[_Rows]) -> None:
        """Accepted rows become committed keys and values; the rest of the leases go back."""
        sources: list[int] = []
        targets: list[int] = []
        for each in rows:
            request, outcome = each.request, each.outcome
            accepted = outcome.path[1:] if outcome else ()
            emitted = outcome.emitted_token_ids if outcome else ()
            table = self.pool.block_table(request.request_id)
            anchor = each.base + each.num_known - 1
            for depth, row in enumerate(accepted, start=1):
                if row != depth:
                    sources.append(slot_of(table, anchor + row, self.pool.block_size))
                    targets.append(slot_of(table, anchor + depth, self.pool.block_size))
            request.commit(each.num_known + len(accepted), emitted)
            self.pool.promote(request.request_id, request.token_ids, request.num_computed_tokens)
            self.pool.free_draft(request.request_id)
        self.runner.move(sources, targets)

    def _observe_hidden(
        self,
        rows: Sequence[_Rows],
        batch: InputBatch,
        hidden: torch.Tensor | None,
        round_: DraftRound,
    ) -> None:
        if hidden is None:
            return
        seen = []
        for each, part in zip(rows, batch.requests, strict=True):
            if self.speculation.wants_hidden(each.request):
                accepted = each.outcome.path[1:] if each.outcome else ()
                anchor = part.first_row + each.num_known - 1
                kept = [*range(part.first_row, anchor + 1), *(anchor + row for row in accepted)]
                request = each.request
                seen.append(
                    HiddenRows(request.request_id, each.base, request.token_ids, hidden[kept])
                )
        self.speculation.observe_hidden(seen, round_)

    def _observe(self, rows: Sequence[_Rows], round_: DraftRound, logits: torch.Tensor) -> None:
        observations = [
            self._observation(each, each.outcome, logits)
            for each in rows
            if each.outcome is not None
        ]
        accepted = [each.outcome.num_accepted for each in rows if each.outcome is not None]
        self.speculation.observe(observations, round_, accepted)

    def _observation(self, rows: _Rows, outcome: Outcome, logits: torch.Tensor) -> Observation:
        top_token_ids, probs = self._top(rows, logits)
        return Observation(
            request_id=rows.request.request_id,
            token_ids=rows.request.token_ids,
            tree=rows.draft.tree,
            row_token_ids=outcome.row_token_ids,
            path=outcome.path,
            emitted_token_ids=outcome.emitted_token_ids,
            top_token_ids=top_token_ids,
            top_probs=probs,
        )

    def _top(
        self, rows: _Rows, logits: torch.Tensor
    ) -> tuple[list[list[int]] | None, list[list[float]] | None]:
        num_top = self.speculation.num_top_tokens(rows.request)
        if not num_top:
            return None, None
        own = range(rows.anchor_row, rows.anchor_row + 1 + len(rows.draft.tree))
        if self.speculation.wants_top_probs(rows.request):
            return top_probs(logits, own, num_top)
        return top_tokens(logits, own, num_top), None

    # --- what comes out ---

    def _report(
        self,
        plan: Plan,
        rows: Sequence[_Rows],
        batch: InputBatch,
        round_: DraftRound,
        logits: torch.Tensor,
        seconds: StepSeconds,
    ) -> None:
        """Teach the cost model, account for every request, and let the finished ones go."""
        shape = StepShape(
            num_rows=batch.num_rows,
            num_base_rows=plan.num_rows,
            num_sampling_requests=sum(each.samples for each in rows),
            num_kv_tokens=batch.num_kv_tokens,
            num_requests=len(rows),
        )
        self.cost.observe(
            shape.num_rows,
            shape.num_kv_tokens,
            shape.num_requests,
            seconds.forward + seconds.verify,
        )
        self.cost.observe_overhead(seconds.other)
        baseline = estimate_baseline(self.cost, shape, seconds.step, seconds.draft)
        builder = StepStatsBuilder()
        for each in rows:
            if each.request.wants_prompt_logprobs:
                read_prompt_logprobs(
                    each.request, each.base, each.num_known, each.first_row, logits
                )
            if each.outcome is not None:
                share = (1 + len(each.draft.tree)) / batch.num_rows
                self._account(each, each.outcome, round_, seconds, share, baseline, builder)
                self._tell(each, each.outcome, logits)
        for _ in range(round_.num_failures):
            builder.add_draft_failure()
        self._result.stats = builder.build(shape, seconds, baseline, self._gauges(plan, rows))

    def _account(
        self,
        rows: _Rows,
        outcome: Outcome,
        round_: DraftRound,
        seconds: StepSeconds,
        share: float,
        baseline: Baseline,
        builder: StepStatsBuilder,
    ) -> None:
        gamma, num_emitted = len(rows.draft.tree), len(outcome.emitted_token_ids)
        reason = rows.draft.reason
        rows.request.stats.record_step(
            gamma,
            outcome.num_accepted,
            num_emitted,
            draft_seconds=round_.share(rows.request),
            verify_seconds=share * (seconds.forward + seconds.verify),
            step_seconds=seconds.step,
            baseline_seconds=baseline.seconds(num_emitted),
            reason=reason,
        )
        drafter = rows.request.params.speculative.drafter
        builder.add_request(drafter, gamma, outcome.num_accepted, num_emitted, reason)

    def _tell(self, rows: _Rows, outcome: Outcome, logits: torch.Tensor) -> None:
        request, finish = rows.request, None
        if outcome.finish_reason is not None:
            self._remove(request)
            finish = finish_info(request, outcome.finish_reason, outcome.stop_token_id)
        event = token_event(request, outcome, rows.anchor_row, logits, finish)
        self._result.events.append(event)

    def _gauges(self, plan: Plan, rows: Sequence[_Rows]) -> StepGauges:
        queries, hits = self.pool.num_prefix_queries, self.pool.num_prefix_hits
        before, self._prefix_counts = self._prefix_counts, (queries, hits)
        return StepGauges(
            num_prompt_tokens=sum(each.num_prompt_rows for each in rows),
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_preemptions=len(plan.preempted),
            blocks=self.pool.counts(),
            prefix_cache_queries=queries - before[0],
            prefix_cache_hits=hits - before[1],
        )
