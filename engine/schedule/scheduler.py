"""Decides which known tokens run in a step: continuous batching by the tokens each request lacks.

There are no phases. Every request has known tokens whose keys and values are not computed; each step
gives it rows until they are. A decoding request is one that lacks a single token. Plain Python, no clock,
no tensors; blocks come from the pool, and on shortage the lowest-ranked request is preempted and later
recomputed. ``FairQueue`` says which request starts next.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from engine.schedule.request import Plan, Request, ScheduledRequest
from kvpool.block_pool import BlockPool, Restoration


class BlockRows(Protocol):
    """A component that keeps its own rows under the ids of requests' blocks."""

    def num_usable_tokens(self, request: Request, block_ids: Sequence[int]) -> int:
        """Returns how many tokens of a cached prefix, which lies in these blocks, have the rows that the
        request needs."""

    def leave_blocks(self, request: Request) -> None:
        """The request is about to give back its blocks: it ends, or is preempted."""

    def settle(self) -> None:
        """Write into blocks what is still to be written there for requests that have left them."""


class NoRows:
    """The absence of such rows."""

    def num_usable_tokens(self, request: Request, block_ids: Sequence[int]) -> int:  # noqa: ARG002
        return len(request.token_ids)

    def leave_blocks(self, request: Request) -> None:
        pass

    def settle(self) -> None:
        pass


class Scheduler:
    """Owns the waiting and the running requests, these in rank order."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_chunk: int,
        rows: BlockRows = NoRows(),  # noqa: B008  (has no state)
    ) -> None:
        self.pool = pool
        self._rows = rows
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefill_chunk = prefill_chunk
        self.waiting = FairQueue()
        self.running: list[Request] = []
        self._next_deadline = math.inf

    def submit(self, request: Request) -> None:
        self.waiting.push(request)
        self._next_deadline = min(self._next_deadline, request.deadline)

    def remove(self, request: Request) -> None:
        """Take out a request for good, wherever it is, and free its blocks."""
        if request.is_running:
            self.running.remove(request)
            self._free(request)
            self.waiting.charge(request)
            request.is_running = False
        else:
            self.waiting.remove(request)
        if not self.running and not len(self.waiting):
            self.waiting.forget()

    def overdue(self, now: float) -> list[Request]:
        """Those whose deadline has passed, waiting or running; to be removed before the next plan."""
        if now < self._next_deadline:
            return []
        due = [request for request in self.requests() if request.deadline <= now]
        left = (each.deadline for each in self.requests() if each.deadline > now)
        self._next_deadline = min(left, default=math.inf)
        return due

    def requests(self) -> Iterable[Request]:
        yield from self.running
        yield from self.waiting

    def plan(self) -> Plan:
        """Rows for this step; every scheduled row has its slot allocated."""
        plan = Plan()
        for request in self.running:
            self.waiting.charge(request)
        self._admit(plan)
        resting = self._resting()
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running):
            request = self.running[index]
            if request in resting:
                index += 1
                continue
            # Each request after it keeps at least a row, so long prompts do not stall decoding.
            behind = len(self.running) - index - 1
            num_known = min(request.num_new_tokens, self.prefill_chunk, budget - behind)
            if not self._allocate(request, num_known, plan):
                break
            plan.scheduled.append(ScheduledRequest(request, num_known))
            budget -= num_known
            index += 1
        plan.num_rows = self.max_num_batched_tokens - budget
        plan.spare_rows = budget
        plan.num_waiting = len(self.waiting)
        return plan

    def plan_ahead(self, parts: Sequence[ScheduledRequest]) -> Plan | None:
        """Rows for a step that is launched before the tokens of the one before are read: one for the
        request of each of its ``parts``, all that run and go on. None: it has to wait, since somebody may
        start or blocks are short."""
        first = self.waiting.first()
        if first is not None:
            is_full = len(self.running) >= self.max_num_seqs
            if not is_full or first.params.priority < self.running[-1].params.priority:
                return None
        if not parts:
            return None
        plan = Plan(num_rows=len(parts), num_waiting=len(self.waiting), is_ahead=True)
        plan.spare_rows = self.max_num_batched_tokens - plan.num_rows
        for request, draft in ((each.request, each.draft) for each in parts):
            request.sampling.num_unseen = 1 + len(draft)
            each = ScheduledRequest(request, 1)
            if not self.pool.allocate(request.request_id, each.base + 1):
                return None
            plan.scheduled.append(each)
        for each in plan.scheduled:
            self.waiting.charge(each.request)
        return plan

    def _resting(self) -> set[Request]:
        """Running requests that sit out the step, since their grammars' masks have taken more than their
        share; never all."""
        resting = {each for each in self.running if each.owed_mask_seconds > 0}
        if len(resting) == len(self.running):
            resting -= {min(resting, key=lambda each: each.owed_mask_seconds, default=None)}
        return resting

    def _allocate(self, request: Request, num_known: int, plan: Plan) -> bool:
        """Slots for the rows, preempting from the back of the ranks. False: it preempted itself."""
        while not self.pool.allocate(request.request_id, request.num_computed_tokens + num_known):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: Plan) -> None:
        self.running.remove(victim)
        self._free(victim)
        if self.pool.tier is not None:
            # Before its blocks are copied to the tier, and before others come from there in their place.
            self._rows.settle()
        victim.preempt()
        self.waiting.push(victim)
        plan.preempted.append(victim)

    def _free(self, request: Request) -> None:
        self._rows.leave_blocks(request)
        self.pool.free(request.request_id)

    def _admit(self, plan: Plan) -> None:
        """Start waiting requests in turn while seats and blocks last; no request overtakes the one whose
        turn it is. A better priority takes the seat or the blocks of a worse one."""
        while (request := self.waiting.first()) is not None:
            if not self._has_room(request):
                last = self.running[-1]  # an engine that runs nothing has room
                if request.params.priority >= last.params.priority:
                    return
                self._preempt(last, plan)
                continue
            if not self._is_restored(request):
                return
            self.waiting.start(request)
            is_new = request.first_scheduled_time is None
            if is_new:
                plan.admitted.append(request)
            num_cached = self.pool.open(
                request.request_id,
                request.token_ids,
                request.params.cache_salt,
                request.max_cached_tokens(),
                is_new,
                partial(self._rows.num_usable_tokens, request),
            )
            request.start(num_cached)
            bisect.insort(self.running, request, key=lambda each: each.rank)

    def _is_restored(self, request: Request) -> bool:
        """Whether all of its text that can come back into memory is there. A step brings a part."""
        if self.pool.tier is None:
            return True
        if request.restoration is None:
            salt, most = request.params.cache_salt, request.max_cached_tokens()
            request.restoration = Restoration(request.token_ids, salt, most)
        return self.pool.restore(request.restoration)

    def _has_room(self, request: Request) -> bool:
        """Admission asks for blocks for all known tokens, lest a prompt be preempted half-way. That is
        enough whatever part of a cached prefix is of use."""
        needed = -(-len(request.token_ids) // self.block_size)
        promised = sum(
            -(-r.num_new_tokens // self.block_size) for r in self.running if r.num_new_tokens > 1
        )
        return (
            len(self.running) < self.max_num_seqs and needed + promised <= self.pool.num_available
        ) or not self.running


class FairQueue:
    """The queue of waiting requests: priorities first, then tenants by service received.

    Each tenant has a counter of tokens served, prompts and outputs, over its weight; among the tenants
    waiting in the best priority, the one with the smallest counter goes first (virtual token counters,
    arXiv 2401.00588). Within a tenant and a priority, first come is first served.

    Between two tenants that wait all along, tokens over weight differ by no more than what one tenant
    can have running at a time, over its weight: the one that was started last had the smallest counter
    then. A tenant that returns is levelled with the waiting ones, so that no tenant saves up time.

    ``charge`` keeps the counters; the queue itself looks at no clock and no blocks.
    """

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._served: dict[str, float] = {}
        self._last_started = ""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Goes by priority and tenant; the first request is the one whose turn it is."""
        return iter(sorted(self._waiting, key=self._turn))

    def push(self, request: Request) -> None:
        """A request that came in, or lost its blocks."""
        self._level_with_others(request.params.tenant.name)
        self._waiting.append(request)

    def first(self) -> Request | None:
        return min(self._waiting, key=self._turn, default=None)

    def start(self, request: Request) -> None:
        """The request waits no more, since it runs."""
        self.remove(request)
        self._last_started = request.params.tenant.name
        self.charge(request)

    def remove(self, request: Request) -> None:
        self._waiting.remove(request)

    def charge(self, request: Request) -> None:
        """The tenant pays for those of the request's tokens that it did not pay for yet: its prompt once
        it starts, then what is written. Recomputing costs no tenant anything."""
        num_new = len(request.token_ids) - request.num_charged_tokens
        if num_new:
            tenant = request.params.tenant
            self._served[tenant.name] = self._of(tenant.name) + num_new / tenant.weight
            request.num_charged_tokens += num_new

    def forget(self) -> None:
        """Resets the counters, as no request waits or runs: all tenants begin anew as equals."""
        self._served.clear()

    def _of(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def _turn(self, request: Request) -> tuple[int, float, int]:
        priority, order = request.rank
        return priority, self._of(request.params.tenant.name), order

    def _level_with_others(self, tenant: str) -> None:
        waiting = {each.params.tenant.name for each in self._waiting}
        if tenant not in waiting:
            least = min(map(self._of, waiting), default=self._of(self._last_started))
            self._served[tenant] = max(self._of(tenant), least)
