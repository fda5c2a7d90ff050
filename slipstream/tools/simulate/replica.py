"""One replica: the engine's own scheduler, pool, drafting and policies around a model that is not there.

What ``EngineCore.step`` does with a forward is done here with texts that are known, and a step takes
what the engine's own cost model says of the profile's measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drafters.base import Drafter, DrafterContext
from drafters.registry import build_drafters
from engine.request.outcome import Outcome
from engine.request.params import GenerationRequest, SamplingParams, SpeculativeParams, Tenant
from engine.sampling.state import SamplingState
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.schedule.scheduler import Scheduler
from engine.speculation.cost import CostModel
from engine.speculation.manager import NO_DRAFTER, Speculation
from engine.transfer import Readback
from engine.verification.match import verify
from kvpool.block_pool import BlockPool
from slipstream.tools.simulate.drafting import MeasuredDrafter
from slipstream.tools.simulate.profile import Costs, Profile
from slipstream.tools.simulate.work import VOCAB_SIZE, Work


class SimulatedCost(CostModel):
    """The engine's cost model as measured: gamma policies ask it, and simulated time is made of it. A
    drafter's Python time here is not simulated time, so the model learns nothing from it."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(costs.steps, costs.overhead)
        self._draft_factor = costs.with_drafts
        self._drafting = costs.drafting

    def observe_draft(self, drafter: str, num_asked: int, seconds: float) -> None:
        """Ignores drafting times, which are measured already."""

    def draft_seconds(self, drafter: str, num_asked: int) -> float:  # noqa: ARG002
        return num_asked * self._drafting


@dataclass(slots=True, eq=False)
class Served:
    """A request's outcome, in seconds of the simulation's clock, None if it has not happened. A request
    whose ``first_token`` is None at the end was refused."""

    work: Work
    replica: int
    first_token: float | None = None
    end: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class Totals:
    """Sums over a replica's steps. ``num_request_steps``: requests that sampled, step by step;
    ``num_prefix_queries`` and ``num_prefix_hits`` are tokens."""

    busy_seconds: float = 0.0
    num_steps: int = 0
    num_rows: int = 0
    num_request_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


class Replica:
    """An engine with an external clock: ``begin`` a step, let its seconds pass, ``end`` it."""

    def __init__(
        self, number: int, profile: Profile, cost: SimulatedCost, speculative: SpeculativeParams
    ) -> None:
        """Raises ValueError and DrafterUnavailableError for a drafter that texts are not enough for."""
        config = profile.engine
        assert config.num_blocks is not None
        self.number = number
        self.totals = Totals()
        self._works: dict[str, Work] = {}
        self._served: dict[str, Served] = {}
        self._cost = cost
        self._costs = profile.costs
        self._speculative = speculative
        self._max_tokens = config.num_blocks * config.block_size
        self._max_open = config.max_num_seqs + config.max_num_waiting
        self._pool = BlockPool(config.num_blocks, config.block_size, config.enable_prefix_cache)
        self._scheduler = Scheduler(
            self._pool,
            config.block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.prefill_chunk,
        )
        shed_queue = config.shed_queue or max(1, config.max_num_waiting // 2)
        self._speculation = Speculation(
            self._drafters(profile, speculative.draft_strategy),
            cost,
            VOCAB_SIZE,
            config.max_num_nodes,
            self._pool,
            config.shed_speculation,
            shed_queue,
        )
        self._plan: Plan | None = None
        self._num_arrived = 0

    def _drafters(self, profile: Profile, name: str) -> Mapping[str, Drafter]:
        if name == NO_DRAFTER:
            return {}
        if name == MeasuredDrafter.info.name:
            return {name: MeasuredDrafter(self._works, profile.kinds)}
        return build_drafters([name], DrafterContext(VOCAB_SIZE))

    @property
    def num_open(self) -> int:
        return len(self._served)

    @property
    def is_busy(self) -> bool:
        """Whether a step is under way."""
        return self._plan is not None

    def submit(self, served: Served) -> bool:
        """Queue a request; False, and nothing done, where there is no place for it or it never fits."""
        work = served.work
        num_tokens = len(work.prompt_token_ids) + len(work.completion_token_ids)
        if self.num_open >= self._max_open or num_tokens > self._max_tokens:
            return False
        request_id = str(self._num_arrived)
        params = GenerationRequest(
            request_id,
            tuple(work.prompt_token_ids),
            SamplingParams(max_tokens=len(work.completion_token_ids), temperature=0.0),
            self._speculative,
            cache_salt=work.tenant,
            tenant=Tenant(work.tenant),
        )
        sampling = SamplingState(params, (), VOCAB_SIZE, self._max_tokens)
        request = Request(params, sampling, self._num_arrived)
        self._num_arrived += 1
        self._works[request_id], self._served[request_id] = work, served
        self._scheduler.submit(request)
        return True

    def begin(self) -> float:
        """Plan a step of what is open, which must be something, and draft for it; its seconds."""
        plan = self._plan = self._scheduler.plan()
        self._speculation.draft(plan, Readback())
        num_drafts = num_tokens = num_sampling = 0
        for each in plan.scheduled:
            gamma = len(each.draft)
            num_drafts += gamma
            num_tokens += each.base + each.num_known + gamma
            num_sampling += each.samples
        num_rows = plan.num_rows + num_drafts
        seconds = self._cost.step_seconds(
            num_rows, num_tokens, len(plan.scheduled), has_drafts=num_drafts > 0
        )
        num_asked = sum(each.num_asked > 0 for each in plan.scheduled)
        seconds += self._cost.draft_seconds(self._speculative.draft_strategy, num_asked)
        seconds += num_sampling * self._costs.per_request
        self.totals.num_steps += 1
        self.totals.num_rows += num_rows
        self.totals.num_request_steps += num_sampling
        self.totals.num_draft_tokens += num_drafts
        for request in plan.admitted:
            self._served[request.request_id].num_cached_tokens = request.num_cached_tokens
        return seconds

    def end(self, now: float, seconds: float) -> list[Served]:
        """The step is over at ``now``, and took ``seconds``. Returns the requests that ended."""
        plan, self._plan = self._plan, None
        assert plan is not None
        self.totals.busy_seconds += seconds
        for each in plan.scheduled:
            self._commit(each)
        sampling = [each for each in plan.scheduled if each.outcome is not None]
        self._speculation.observe(plan, sampling)
        ended = []
        for each in sampling:
            assert each.outcome is not None
            served = self._served[each.request.request_id]
            if served.first_token is None:
                served.first_token = now
            if each.outcome.finish_reason is not None:
                served.end = now
                served.num_preemptions = each.request.num_preemptions
                ended.append(served)
                self._remove(each.request)
        self.totals.num_prefix_queries = self._pool.num_prefix_queries
        self.totals.num_prefix_hits = self._pool.num_prefix_hits
        return ended

    def _commit(self, each: ScheduledRequest) -> None:
        """As ``EngineCore`` does, without keys and values to move."""
        request = each.request
        emitted: tuple[int, ...] = ()
        if each.samples:
            each.outcome = self._verified(each)
            emitted = each.outcome.emitted_token_ids
            self.totals.num_accepted_tokens += each.outcome.num_accepted
            self.totals.num_emitted_tokens += len(emitted)
        request.commit(each.num_known + len(each.accepted_rows), emitted)
        self._pool.promote(request.request_id, request.token_ids, request.num_computed_tokens)
        self._pool.free_draft(request.request_id)

    def _verified(self, each: ScheduledRequest) -> Outcome:
        """The target writes the text that is known: at a node, the token of the node's place."""
        request = each.request
        text = self._works[request.request_id].completion_token_ids
        start = request.num_output_tokens
        places = (start, *(start + depth for depth in each.draft.depths()))
        return verify(each, [text[place] if place < len(text) else 0 for place in places])

    def _remove(self, request: Request) -> None:
        self._scheduler.remove(request)
        self._speculation.close(request)
        del self._works[request.request_id], self._served[request.request_id]
