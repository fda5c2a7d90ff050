"""Speculation between the drafters and the step: proposals, grants, and what is learned from them.

A drafter that is not asked in a step, since its kind of traffic rests, is not told of the step either: it
gets all it has missed at once when it is asked again, as one long draft that was accepted, or when its
request ends. Those that keep the target's states or a window of their own are told at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from drafters.base import Drafter, DraftRequest, DraftShape, HiddenRows, Observation
from drafters.estimator import AcceptanceEstimator
from drafters.tree import EMPTY, DraftTree
from engine.request.params import SpeculativeParams
from engine.schedule.request import Request, ScheduledRequest
from engine.schedule.scheduler import Plan
from engine.speculation.acceptance import new_acceptance
from engine.speculation.checks import check_trees
from engine.speculation.constrained import constrained, num_forced
from engine.speculation.contained import Drafting, guarded
from engine.speculation.cost import CostModel
from engine.speculation.gamma.controller import GammaController
from engine.speculation.gamma.policy import DraftCandidate, Grant, Load, Traffic
from engine.speculation.shedding import Shedding
from kvpool.block_pool import BlockPool

if TYPE_CHECKING:
    from engine.transfer import Readback

NO_DRAFTER = "none"
_TOKENS_READ_PER_STEP = 1024
"""Tokens of all prompts that drafters may index per step: some milliseconds at most. A step that
computes more rows takes long enough to read as many."""


@dataclass(slots=True)
class _Proposal:
    """A call of a drafter for these requests. ``finish`` ends it; None: it could not begin.
    ``waits``: for the device. ``seconds``: that it took to begin."""

    name: str
    requests: Sequence[ScheduledRequest]
    asks: Sequence[DraftRequest]
    finish: Callable[[], list[DraftTree]] | None
    waits: bool
    seconds: float


class Speculation:
    """Owns the drafters, the acceptance estimates and the gamma controller."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        cost: CostModel,
        vocab_size: int,
        max_num_nodes: int,
        pool: BlockPool,
        shedding: Shedding = Shedding(),  # noqa: B008  (frozen)
    ) -> None:
        self.drafters = drafters
        self.max_num_nodes = max_num_nodes
        self._num_closed_failures = 0
        self._pool = pool
        self._cost = cost
        self._shedding = shedding
        self._vocab_size = vocab_size
        self._estimator = AcceptanceEstimator()
        self._gamma = GammaController(cost)
        self._drafting: dict[str, Drafting] = {}
        self._unread: dict[str, Drafting] = {}
        """Those whose drafter still reads their text, first come first."""

    # --- a request comes and goes ---

    def open(self, request: Request) -> None:
        """Start drafting for a request, if it asked for a drafter."""
        wanted, request_id = request.params.speculative, request.request_id
        if wanted.draft_strategy == NO_DRAFTER:
            return
        drafter = self.drafters[wanted.draft_strategy]
        acceptance = new_acceptance(
            self._estimator, wanted.draft_strategy, request.sampling.verification
        )
        drafting = self._drafting[request_id] = Drafting(drafter, acceptance)
        self._gamma.open(request_id, wanted, Traffic.of(request))

        def start() -> bool:
            drafter.open(request_id, request.token_ids, wanted.options, request.params.cache_salt)
            if request.params.prediction_token_ids:
                drafter.predict(request_id, request.params.prediction_token_ids)
            drafter.read_prompt(request_id, 0)
            return True

        drafting.is_open = guarded([drafting], start) or False
        if drafting.is_open:
            self._unread[request_id] = drafting

    def close(self, request: Request) -> int:
        """Forget a request; returns how often its drafter failed it, here included."""
        drafting = self._drafting.pop(request.request_id, None)
        self._unread.pop(request.request_id, None)
        if drafting is None:
            return 0
        self._gamma.forget(request.request_id, request.params.speculative)
        drafting.catch_up(request)
        guarded([drafting], drafting.drafter.close, request.request_id)
        self._num_closed_failures += drafting.num_failures
        return drafting.num_failures

    @property
    def num_failures(self) -> int:
        """Failures of all drafters so far."""
        return self._num_closed_failures + sum(
            each.num_failures for each in self._drafting.values()
        )

    # --- before the forward ---

    def draft(self, plan: Plan, readback: Readback) -> None:
        """Give every request that samples in this step its draft, as far as the policies grant it and
        there are blocks to lease, and say what its drafter wants to see. ``readback``: for what drafters
        read of a device; it is fetched once."""
        for request in plan.admitted:
            self.open(request)
        if self._unread:
            self._read_prompts(max(_TOKENS_READ_PER_STEP, plan.num_rows))
        drafting = [each for each in plan.scheduled if self._bound(each, plan.num_waiting)]
        if drafting:
            self._propose(drafting, plan, readback)
            _constrain(drafting)
            self._grant(drafting, plan)
        for each in plan.scheduled:
            self._want(each)

    def _read_prompts(self, num_tokens: int) -> None:
        """Let drafters take in ``num_tokens`` more tokens of the requests that they have not read yet."""
        for request_id, drafting in list(self._unread.items()):
            if num_tokens <= 0:
                return
            read = drafting.drafter.read_prompt
            num_tokens -= drafting.counted(num_tokens, read, request_id, num_tokens)
            if num_tokens > 0:
                del self._unread[request_id]

    def _bound(self, each: ScheduledRequest, num_waiting: int) -> bool:
        """Say how many draft nodes make sense, and how many of them to ask the drafter for. False where
        the request does not draft. The target writes the last token itself, so the depth stays below the
        tokens left."""
        request = each.request
        drafting = self._drafting.get(request.request_id)
        if not each.samples or drafting is None or not drafting.is_asked:
            return False
        wanted = request.params.speculative
        num_nodes = self._gamma.num_to_propose(request.request_id, wanted)
        each.max_depth = min(wanted.shape.depth, request.num_tokens_left - 1)
        if each.max_depth <= 0:
            return True
        weighs_cost = self._gamma.weighs_cost(wanted)
        if num_nodes > 0 and self._shedding.is_shed(num_waiting, weighs_cost):
            each.reason, num_nodes = "shed", 0
        each.max_nodes = each.num_asked = min(num_nodes, self.max_num_nodes)
        if request.sampling.grammar is not None:
            # What is forced is worth its rows whether or not the drafter rests or yields.
            num_free = min(len(request.sampling.grammar.forced()), _most_nodes(wanted))
            each.max_nodes = min(max(each.num_asked, num_free), self.max_num_nodes)
        return True

    def _want(self, each: ScheduledRequest) -> None:
        """Say what the drafter wants to see of the step, if it is told of it at once."""
        drafting = self._drafting.get(each.request.request_id)
        if drafting is None or not drafting.is_asked or not drafting.is_told(each):
            return
        needs = drafting.drafter.info.needs
        each.wants_hidden, each.wants_top_probs = needs.hidden_rows, needs.top_probs
        if each.samples:
            ask = drafting.drafter.num_top_tokens
            num_top = drafting.counted(None, ask, each.request.request_id)
            each.num_top_tokens = min(num_top, self._vocab_size)

    # --- proposals ---

    def _propose(
        self, drafting: Sequence[ScheduledRequest], plan: Plan, readback: Readback
    ) -> None:
        """Have drafters propose. Each is asked for all its requests at once, since those with a model
        batch; all begin before what they read of the device is fetched, once."""
        plain_seconds = self._cost.step_seconds(
            plan.num_rows, plan.num_context_tokens, len(plan.scheduled)
        )
        rate = plan.num_sampling / plain_seconds
        by_drafter: dict[str, list[ScheduledRequest]] = {}
        for each in drafting:
            if each.num_asked > 0:
                name = self._drafting[each.request.request_id].name
                by_drafter.setdefault(name, []).append(each)
        proposals = [self._begin(name, group, rate, readback) for name, group in by_drafter.items()]
        num_waiting = sum(proposal.waits for proposal in proposals)
        waited = self._fetch(readback) / num_waiting if num_waiting else 0.0
        for proposal in proposals:
            seconds = proposal.seconds + self._finish(proposal)
            plan.draft_seconds[proposal.name] = seconds + (waited if proposal.waits else 0.0)

    def _begin(
        self,
        name: str,
        requests: Sequence[ScheduledRequest],
        plain_rate: float,
        readback: Readback,
    ) -> _Proposal:
        """``plain_rate``: tokens per second that the step would write without drafts."""
        for each in requests:
            self._drafting[each.request.request_id].catch_up(each.request)
        drafter, start, num_before = self.drafters[name], time.perf_counter(), readback.num_added
        asks = [self._ask(each, drafter, plain_rate) for each in requests]
        finish = guarded(self._blamed(requests), drafter.begin, asks, readback)
        waits = readback.num_added > num_before
        return _Proposal(name, requests, asks, finish, waits, time.perf_counter() - start)

    def _fetch(self, readback: Readback) -> float:
        """Returns the seconds that it took."""
        start = time.perf_counter()
        guarded([], readback.fetch)
        return time.perf_counter() - start

    def _ask(self, each: ScheduledRequest, drafter: Drafter, plain_rate: float) -> DraftRequest:
        request, num_nodes = each.request, each.num_asked
        wanted = request.params.speculative
        if drafter.info.needs.draft_slots:
            num_nodes = self._lease(request, num_nodes)
        shape = wanted.shape
        if each.max_depth != shape.depth:
            shape = DraftShape(shape.width, each.max_depth)
        return DraftRequest(
            request.request_id,
            request.token_ids,
            num_nodes,
            shape,
            request.sampling.draft_sampling(),
            request.num_computed_tokens,
            self._pool.block_table(request.request_id),
            plain_rate if self._gamma.weighs_cost(wanted) else 0.0,
        )

    def _finish(self, proposal: _Proposal) -> float:
        """Take the trees of all requests at once; one by one if that goes wrong. Returns the seconds that
        it took."""
        start = time.perf_counter()
        requests, asks, finish = proposal.requests, proposal.asks, proposal.finish
        trees = None if finish is None else self._checked(requests, finish, asks)
        if trees is None and len(asks) > 1:
            propose = self.drafters[proposal.name].propose
            alone = [
                self._checked([each], partial(propose, [ask]), [ask])
                for each, ask in zip(requests, asks, strict=True)
            ]
            trees = [found[0] if found else EMPTY for found in alone]
        if trees is not None:
            for each, tree in zip(requests, trees, strict=True):
                each.proposal = tree
        return time.perf_counter() - start

    def _checked(
        self,
        requests: Sequence[ScheduledRequest],
        propose: Callable[[], list[DraftTree]],
        asks: Sequence[DraftRequest],
    ) -> Sequence[DraftTree] | None:
        """The trees that ``propose`` gives back; None where something is wrong with them."""
        return guarded(
            self._blamed(requests), lambda: check_trees(propose(), asks, self._vocab_size)
        )

    def _blamed(self, requests: Sequence[ScheduledRequest]) -> list[Drafting]:
        """Whose failure it is if a drafter fails for all of these: of several, they are asked again one
        by one."""
        if len(requests) > 1:
            return []
        return [self._drafting[requests[0].request.request_id]]

    # --- grants ---

    def _grant(self, drafting: Sequence[ScheduledRequest], plan: Plan) -> None:
        load = Load(
            plan.num_rows,
            plan.spare_rows,
            plan.num_sampling,
            float(plan.num_sampling),
            plan.num_context_tokens,
            len(plan.scheduled),
        )
        candidates = [self._candidate(each, plan.num_waiting) for each in drafting]
        for each, grant in zip(drafting, self._gamma.grant(candidates, load), strict=True):
            self._take(each, grant)

    def _candidate(self, each: ScheduledRequest, num_waiting: int) -> DraftCandidate:
        request = each.request
        drafting, wanted = self._drafting[request.request_id], request.params.speculative
        num_nodes = max(0, min(each.max_nodes, each.max_depth))
        tree = drafting.acceptance.granted_from(each.proposal, num_nodes)
        return DraftCandidate(
            request.request_id,
            drafting.name,
            self._shedding.params(wanted, num_waiting),
            tree,
            drafting.acceptance.survivals(tree) if tree.token_ids else (),
            each.max_nodes,
            all_or_nothing=drafting.drafter.info.needs.all_or_nothing,
            is_asked=each.num_asked > 0,
        )

    def _take(self, each: ScheduledRequest, grant: Grant) -> None:
        """The part of a proposal that is granted, as far as there are blocks to lease, is the draft."""
        nodes, num_offered = grant.nodes, len(each.proposal)
        if nodes and nodes[-1] >= num_offered:  # policies may see more than there is
            nodes = [node for node in nodes if node < num_offered]
        if each.reason != "shed":
            each.reason = "" if 0 < num_offered == len(nodes) else grant.reason
        room = self._lease(each.request, len(nodes))
        if room < len(nodes):
            nodes, each.reason = nodes[:room], "no_kv"
        each.draft = each.proposal.subtree(nodes)

    def _lease(self, request: Request, num_nodes: int) -> int:
        """Slots for draft nodes after the request's tokens; returns for how many there is room."""
        if not num_nodes:
            return 0
        num_known = len(request.token_ids)
        covered = self._pool.allocate_draft(request.request_id, num_known + num_nodes)
        return max(0, min(num_nodes, covered - num_known))

    # --- after the forward ---

    def observe(self, plan: Plan, requests: Sequence[ScheduledRequest]) -> None:
        """Tell estimates, policies and drafters what the target said of requests that have sampled, and
        requests what their drafters took."""
        by_drafter: dict[str, list[tuple[ScheduledRequest, Observation]]] = {}
        for each in requests:
            drafting = self._drafting.get(each.request.request_id)
            if drafting is None or not drafting.is_asked:
                continue
            seen = _observation(each)
            drafting.acceptance.observe(each.proposal, seen)
            self._observe_gamma(each)
            if drafting.is_told(each):
                by_drafter.setdefault(drafting.name, []).append((each, seen))
            else:
                drafting.num_missed += len(seen.emitted_token_ids)
        for name, told in by_drafter.items():
            start = time.perf_counter()
            # Not retried one by one: a drafter may have learned from half of them already.
            whose = [self._drafting[seen.request_id] for _, seen in told]
            guarded(whose, self.drafters[name].observe, [seen for _, seen in told])
            seconds = plan.draft_seconds.get(name, 0.0) + time.perf_counter() - start
            for each, _ in told:
                each.draft_seconds = seconds / len(told)
            num_asked = sum(each.num_asked > 0 for each, _ in told)
            self._cost.observe_draft(name, len(told), seconds, num_asked)

    def _observe_gamma(self, each: ScheduledRequest) -> None:
        """Tell the policy what was verified, which a shortage of blocks may have made less than the
        grant; without what a grammar forced, which says nothing of the drafter."""
        outcome, draft = each.outcome, each.draft
        assert outcome is not None
        num_verified, num_accepted = len(draft), outcome.num_accepted
        forced = num_forced(draft, range(num_verified))
        if forced:
            num_verified -= forced
            num_accepted -= num_forced(draft, [row - 1 for row in outcome.path[1:]])
        request = each.request
        self._gamma.observe(
            request.request_id, request.params.speculative, num_verified, num_accepted
        )

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Hand newly committed rows' hidden states to the drafters that read them."""
        by_drafter: dict[str, list[HiddenRows]] = {}
        for each in rows:
            by_drafter.setdefault(self._drafting[each.request_id].name, []).append(each)
        for name, group in by_drafter.items():
            whose = [self._drafting[each.request_id] for each in group]
            guarded(whose, self.drafters[name].observe_hidden, group)


def _observation(each: ScheduledRequest) -> Observation:
    request, outcome = each.request, each.outcome
    assert outcome is not None
    return Observation(
        request.request_id,
        request.token_ids,
        each.draft,
        outcome.row_token_ids,
        outcome.path,
        outcome.emitted_token_ids,
        each.top_token_ids,
        each.top_probs,
    )


def _constrain(drafting: Sequence[ScheduledRequest]) -> None:
    """Make the proposals of requests with a grammar what it leaves of them."""
    for each in drafting:
        sampling = each.request.sampling
        if sampling.grammar is None or each.max_nodes <= 0:
            continue
        try:
            each.proposal = constrained(
                each.proposal,
                sampling.grammar,
                each.max_nodes,
                each.max_depth,
                sampling.verification,
            )
        except Exception:
            # One that gave up does so again where rows are masked: for its request alone.
            each.proposal = EMPTY


def _most_nodes(wanted: SpeculativeParams) -> int:
    """That a request's policy may ever grant."""
    return max(wanted.num_speculative_tokens, wanted.max_speculative_tokens)
