"""The engine's core: one synchronous step, from commands taken to events given. No asyncio, no text.

Everything a step does is a row of one forward: prompt chunks, anchors and draft nodes alike. Plain
decoding is gamma 0 on this path.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from drafters.base import NORMED
from drafters.containment import is_interrupt
from engine.accounts import Accounts
from engine.batch import ForwardOutput, InputBatch, RequestRows, build_batch, slot_of
from engine.grammar.constraint import Constrain
from engine.kv_events.begin import KvEvents
from engine.request.errors import DeadlineExceededError, RanksError, RequestFailedError
from engine.request.events import ErrorEvent, StepResult, TokenEvent
from engine.request.params import GenerationRequest
from engine.request.stats import StepClock
from engine.sampling.state import SamplingState
from engine.schedule.ahead import going_on
from engine.schedule.choices import row_choices
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.schedule.scheduler import Scheduler
from engine.speculation.cost import CostModel
from engine.speculation.manager import Speculation
from engine.transfer import Readback
from engine.verification.follow import Follower
from engine.verification.pooling import pool
from engine.verification.verify import Reading, begin_reading
from kvpool.block_pool import BlockPool
from kvpool.state_slots import StateRows

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 5
"""The engine gives up after so many failed steps in a row."""
_LEAST_MASK_SECONDS = 0.005
_LEAST_SHARE = 0.0002
_GROWTH = 1.05
"""The time for masks grows by at most this factor a step: one slow forward says little of the next."""
_FATAL = (MemoryError, torch.AcceleratorError, RanksError)
"""The process's memory, the device's state or another rank is gone: every later step would break as well.
A device or an allocator that has no room for one step's tensors (``OutOfMemoryError``, ``RuntimeError``)
is not among them."""


class Runner(Protocol):
    """The target, as the core runs it; ``engine.model.runner`` has the real one."""

    def forward(self, batch: InputBatch) -> ForwardOutput:
        """Keys and values of all rows are stored afterwards."""

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Copy stored rows between slots, reading all before writing any."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Bounds that the model sets; ``max_model_len`` counts prompt and output tokens. ``constrain`` makes
    constraints of grammars, where there is a tokenizer."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    constrain: Constrain | None = None


class _Launched(NamedTuple):
    """A step that is under way, and not read yet."""

    plan: Plan
    batch: InputBatch
    output: ForwardOutput
    reading: Reading | None
    clock: StepClock
    copied: torch.Tensor | None  # drafts that the device makes, as ``begin_reading`` takes them
    drafting_seconds: float  # what the clock had counted when its rows were launched


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
        clock: Callable[[], float] = time.perf_counter,
        kv_events: KvEvents | None = None,
        hidden_layers: tuple[int, ...] = (),
        runs_ahead: bool = False,
    ) -> None:
        """``clock``: the one of requests' deadlines; seconds. ``kv_events`` hears the pool.
        ``hidden_layers``: whose states a step asks for where one of its requests reads some.
        ``runs_ahead``: forwards return before they are done, and later ones wait for them."""
        self.runner = runner
        self.pool = pool
        self.scheduler = scheduler
        self.speculation = speculation
        self.cost = cost
        self.limits = limits
        self._check_integrity = check_integrity
        self._clock = clock
        self.kv_events = kv_events
        self._hidden_layers = hidden_layers or speculation.hidden_layers
        self._chooses = runs_ahead
        self.runs_ahead = runs_ahead and pool.states is None
        if self.runs_ahead:
            cost.observe_overhead(0.0, is_hidden=True)  # as long as none was seen to take longer
        self._follower = Follower(pool.block_size)
        self._launched: _Launched | None = None
        """The step after the one that was read last, where it was launched ahead."""
        self._ended = 0.0
        self.listen: Callable[[], None] = lambda: None
        """Called before a step is planned within another: who has commands gives them now."""
        self._requests: dict[str, Request] = {}
        self._num_arrived = 0
        self._result = StepResult()
        self._accounts = Accounts(pool, scheduler, speculation, cost, kv_events)
        self.gauges = self._accounts.gauges
        self._num_failed_steps = 0
        self._mask_seconds = _LEAST_MASK_SECONDS

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    # --- commands ---

    def prepare(self, params: GenerationRequest) -> Request:
        """A request ready to submit; callable from any thread. Raises RequestError."""
        limits = self.limits
        eos, longest = limits.eos_token_ids, limits.max_model_len
        sampling = SamplingState(params, eos, limits.vocab_size, longest, limits.constrain)
        return Request(params, sampling)

    def submit(self, request: Request) -> None:
        request.arrival_order = self._num_arrived
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self.scheduler.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; its blocks are free at once. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request)
            finish = request.finish_info("abort")
            self._result.events.append(TokenEvent(request_id, (), (), finish=finish))

    def abort_all(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)

    def take_result(self) -> StepResult:
        """Returns what has come up since the last result."""
        result, self._result = self._result, StepResult()
        return result

    def _remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.scheduler.remove(request)
        self._follower.forget(request)
        request.stats.num_failed_drafts = self.speculation.close(request)
        if not self._requests:
            self._launched = None  # nobody is left whose step it is
            self.speculation.settle()  # else the next step does it, for all that have ended by then

    # --- faults ---

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request for which something broke; its blocks are free at once, and the others go on.
        Raises what ends the engine."""
        if is_interrupt(error) or isinstance(error, _FATAL):
            raise error
        logger.error("request %s failed", request.request_id, exc_info=error)
        if request.request_id in self._requests:
            self._remove(request)
        failure = RequestFailedError(f"{type(error).__name__}: {error}")
        self._result.events.append(ErrorEvent(request.request_id, failure))

    def _each(
        self, scheduled: Sequence[ScheduledRequest], work: Callable[[ScheduledRequest], None]
    ) -> list[ScheduledRequest]:
        """Do a piece of the step request by request; those for which it raises fail. Returns the rest."""
        left: list[ScheduledRequest] = []
        for each in scheduled:
            try:
                work(each)
            except BaseException as error:
                self._fail(each.request, error)
            else:
                left.append(each)
        return left

    def _fail_step(self, plan: Plan, error: BaseException) -> None:
        """Handles a step that failed as a whole, such as in its forward: all its requests fail, and the
        engine continues with the waiting ones. Raises ``error`` if continuing is useless."""
        self._num_failed_steps += 1
        self._launched = None
        if self._num_failed_steps >= MAX_FAILED_STEPS or not isinstance(error, Exception):
            raise error
        for each in plan.scheduled:
            if each.request.request_id in self._requests:
                self._fail(each.request, error)
        # Published blocks may lack what the step did not come to move; no other request holds any.
        # What the tier has was copied after steps that went well.
        self.pool.forget_blocks()
        self._tell_cache()
        self.pool.check_integrity()

    # --- one step ---

    def step(self) -> StepResult:
        """Run one step. The result also holds the events of commands since the last. Raises what the
        engine cannot survive; what breaks for one request ends that request."""
        clock = StepClock()
        self._expire()
        with clock.measure("draft"):
            self.speculation.settle()
        launched, self._launched = self._launched, None
        if launched is None or not self._alive(launched.plan):
            launched = self._begin(self.scheduler.plan(), clock)
        if launched is not None:
            self._launched = self._go_ahead(launched)
            try:
                self._finish(launched)
                self._num_failed_steps = 0
            except BaseException as error:
                self._fail_step(launched.plan, error)
        if self._check_integrity:
            self.pool.check_integrity()
        return self.take_result()

    def _share_mask_time(self) -> None:
        """The masks of a step's grammars, all together, may take as long as a forward does."""
        grammars = [each.sampling.grammar for each in self.scheduler.running]
        times = [each.time for each in grammars if each is not None]
        for each in times:
            each.begin_step(max(_LEAST_SHARE, self._mask_seconds / len(times)))

    def _expire(self) -> None:
        """End what is past its deadline, whether it waits or runs."""
        for request in self.scheduler.overdue(self._clock()):
            self._remove(request)
            error = DeadlineExceededError(request.num_output_tokens)
            self._result.events.append(ErrorEvent(request.request_id, error))

    def _begin(
        self, plan: Plan, clock: StepClock, before: _Launched | None = None
    ) -> _Launched | None:
        """Launch a step. ``before``: the step that is not read yet, where it is launched ahead. None: it
        has nothing to do, or it broke."""
        self._share_mask_time()
        for _ in plan.admitted:
            self._accounts.early.start()
        if not plan.scheduled:
            return None
        try:
            if before is None:
                with clock.measure("draft"):
                    self.speculation.draft(plan, Readback())
            batch = self._build_batch(plan)
            copied = None if before is None else self._follow(before, plan, batch)
            if self._chooses:
                batch.choices = row_choices(plan.scheduled, len(batch.logits_indices))
            with clock.measure("forward"):
                output = self.runner.forward(batch)
            drafting_seconds = clock.draft
            reading = self._begin_reading(plan, output, clock, copied)
            return _Launched(plan, batch, output, reading, clock, copied, drafting_seconds)
        except BaseException as error:
            self._fail_step(plan, error)
            return None

    def _begin_reading(
        self, plan: Plan, output: ForwardOutput, clock: StepClock, copied: torch.Tensor | None
    ) -> Reading | None:
        """None: that goes wrong for all requests at once. Raises it where drafts are still to be read."""
        try:
            waits, known = self.runs_ahead, output.tokens
            return begin_reading(plan.scheduled, output.logits, clock, waits, known, copied)
        except BaseException as error:
            if is_interrupt(error) or copied is not None:
                raise
            return None

    def _go_ahead(self, launched: _Launched) -> _Launched | None:
        """Launch the step after one that is not read yet, where the device can go on by itself."""
        tokens = None if launched.reading is None else launched.reading.tokens
        if not self.runs_ahead or tokens is None:
            return None
        self.listen()
        alive = self._alive(launched.plan)
        if len(alive) < len(self.scheduler.running):
            return None
        clock, parts = StepClock(), going_on(alive)
        plan = self.scheduler.plan_ahead(parts)
        with clock.measure("draft"):
            goes_on = plan is not None and self.speculation.draft_ahead(plan)
        if plan is not None and goes_on:
            return self._begin(plan, clock, launched)
        for each in parts:
            each.sampling.num_unseen = 0
        return None

    def _follow(self, before: _Launched, plan: Plan, batch: InputBatch) -> torch.Tensor | None:
        """Tell a batch that is launched ahead which tokens its rows have, and where they lie. Returns the
        drafts that the device makes for it, if it makes any, or may have refused some."""
        assert before.reading is not None
        tokens = before.reading.tokens
        assert tokens is not None
        requests = {each.request for each in plan.scheduled}
        parts = [each for each in before.plan.scheduled if each.request in requests]
        return self._follower.follow(parts, plan.scheduled, batch, tokens, before.copied)

    def _alive(self, plan: Plan) -> list[ScheduledRequest]:
        """Returns the parts of a step whose requests are not over: they may have ended after it was
        launched."""
        get = self._requests.get
        return [each for each in plan.scheduled if get(each.request.request_id) is each.request]

    def _finish(self, launched: _Launched) -> None:
        """Read a step, and take in what it says."""
        plan, batch, output, clock = launched.plan, launched.batch, launched.output, launched.clock
        clock.start = max(clock.start, self._ended)  # ahead: it began when the one before was over
        clock.took_longer = output.took_longer
        if output.seconds is not None:
            with clock.measure("verify"):
                device_seconds = output.seconds()
        done = self._read(launched)
        # What drafters want to see of the step.
        plan.speculation_seconds += clock.draft - launched.drafting_seconds
        if output.seconds is not None:
            clock.forward_took(device_seconds, batch.chosen is not None)
        self._mask_seconds = max(
            _LEAST_MASK_SECONDS, min(clock.forward, _GROWTH * self._mask_seconds)
        )
        states = dict(zip(batch.hidden_layers, output.hidden, strict=True))
        done = self._commit(self._pool(done, states))
        self._tell_cache()
        sampled = [each for each in done if each.outcome is not None]
        with clock.measure("draft"):
            self.speculation.observe_hidden(done, states)
            self.speculation.observe(plan, sampled)
        clock.stop()
        self._ended = time.perf_counter()
        for each in sampled:
            if each.outcome is not None and each.outcome.finish_reason is not None:
                self._remove(each.request)
        told, self._result.events = self._result.events, []
        if self.runs_ahead and self._launched is None:  # the device works while this one is told
            self.listen()
            coming = StepClock()
            with coming.measure("draft"):
                self.speculation.settle()
            self._launched = self._begin(self.scheduler.plan(), coming)
            self._tell_cache()
        later, self._result.events = self._result.events, told
        self._report(plan, sampled, batch, clock)
        self._result.events += later

    def _build_batch(self, plan: Plan) -> InputBatch:
        """All rows flat, in the order of the plan."""
        has_states = self.pool.states is not None
        for each in plan.scheduled:
            request, draft = each.request, each.draft
            num_logits = 1 + len(draft.token_ids) if each.samples else 0
            if request.wants_prompt_logprobs:
                num_logits = each.num_known + len(draft.token_ids)
            each.rows = RequestRows(
                [*each.known_token_ids, *draft.token_ids],
                each.num_known,
                each.base,
                draft.parents,
                self.pool.block_table(request.request_id),
                num_logits,
                num_unsure=each.num_unsure,
                adapter=request.adapter,
                states=self._state_rows(each) if has_states else None,
            )
        # All that anybody reads, or none: steps then are of two kinds, and so are recordings of them.
        reads_hidden = any(each.hidden_layers or each.is_pooled for each in plan.scheduled)
        return build_batch(
            [each.rows for each in plan.scheduled],
            self.pool.block_size,
            self._hidden_layers if reads_hidden else (),
        )

    def _state_rows(self, each: ScheduledRequest) -> StateRows:
        states, request = self.pool.states, each.request
        assert states is not None
        num_tokens = len(request.token_ids)
        return states.rows(request.request_id, each.num_known, len(each.draft), num_tokens)

    def _read(self, launched: _Launched) -> list[ScheduledRequest]:
        """All requests are read at once; where that goes wrong, again one by one, if the logits are still
        there. Returns those for which it was done."""
        alive, logits, clock = self._alive(launched.plan), launched.output.logits, launched.clock
        try:
            if launched.reading is not None:
                launched.reading.finish()
                return alive
        except BaseException as error:
            if is_interrupt(error) or self._launched is not None or launched.copied is not None:
                raise
        return self._each(alive, lambda each: begin_reading([each], logits, clock).finish())

    def _pool(
        self, scheduled: Sequence[ScheduledRequest], states: Mapping[int, torch.Tensor]
    ) -> list[ScheduledRequest]:
        """Feeds hidden states to pooled requests. Returns the requests that have not failed."""
        pooled = [each for each in scheduled if each.is_pooled]
        if pooled:
            done = self._each(pooled, lambda each: pool(each, states[NORMED]))
            return [each for each in scheduled if not each.is_pooled or each in done]
        return [*scheduled]

    def _commit(self, scheduled: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Accepted rows become committed keys and values; the rest of the leases go back. Returns the
        requests for which that was done."""
        moves: list[tuple[int, int]] = []
        done = self._each(scheduled, lambda each: self._commit_one(each, moves))
        self.runner.move([source for source, _ in moves], [target for _, target in moves])
        return done

    def _commit_one(self, each: ScheduledRequest, moves: list[tuple[int, int]]) -> None:
        """Adds to ``moves`` from which slots to which rows have to move."""
        request, accepted = each.request, each.accepted_rows
        # They ascend: else all lie where they belong.
        if accepted and accepted[-1] != len(accepted):
            table, size = self.pool.block_table(request.request_id), self.pool.block_size
            anchor = each.base + each.num_known - 1
            moves += (
                (slot_of(table, anchor + row, size), slot_of(table, anchor + depth, size))
                for depth, row in enumerate(accepted, start=1)
                if row != depth
            )
        emitted = each.outcome.emitted_token_ids if each.outcome else ()
        request.commit(each.num_known + len(accepted), emitted)
        if self.pool.states is not None:
            nodes = [row - 1 for row in accepted]
            self.pool.states.commit(request.request_id, each.num_known, nodes)
        self.pool.promote(request.request_id, request.token_ids, request.num_computed_tokens)
        if self._launched is None:  # else its drafts lie there
            self.pool.free_draft(request.request_id)

    def _tell_cache(self) -> None:
        """Send what the step published and evicted."""
        if self.kv_events is not None:
            self.kv_events.flush()

    def close(self) -> None:
        """The core is not used any more."""
        for tier in self.pool.tiers:
            tier.close()

    # --- what comes out ---

    def _report(
        self,
        plan: Plan,
        sampled: Sequence[ScheduledRequest],
        batch: InputBatch,
        clock: StepClock,
    ) -> None:
        """Account for every request, and let the finished ones go."""
        figures = self._accounts.account(plan, sampled, batch, clock)
        self._each(sampled, self._emit)
        self._accounts.early.step(clock.step, len(self.scheduler.running))
        self._result.stats = self._accounts.gauges(**figures)

    def _emit(self, scheduled: ScheduledRequest) -> None:
        request, outcome, finish = scheduled.request, scheduled.outcome, None
        assert outcome is not None
        if outcome.finish_reason is not None:
            if outcome.cut:
                logger.warning(
                    "request %s was cut: its grammar %s", request.request_id, outcome.cut
                )
            self._accounts.early.finish(request.stats)
            finish = request.finish_info(outcome.finish_reason, outcome.stop_token_id, outcome.cut)
        event = TokenEvent(
            request.request_id,
            outcome.emitted_token_ids,
            outcome.drafted,
            scheduled.logprobs,
            request.take_prompt_logprobs(),
            finish,
            len(scheduled.draft),
            scheduled.draft_seconds,
            scheduled.verify_seconds,
        )
        self._result.events.append(event)
