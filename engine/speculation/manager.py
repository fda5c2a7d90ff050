"""Between the drafters and the step: what is proposed, what is granted, what is learned from it.

A drafter that raises costs its request the draft of that step, never the request or the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from drafters.base import (
    Drafter,
    DraftRequest,
    DraftShape,
    HiddenRows,
    Observation,
)
from drafters.estimator import AcceptanceEstimator
from drafters.tree import EMPTY, DraftTree
from engine.schedule.request import NOTHING, Draft, Request, ScheduledRequest, Wants
from engine.schedule.scheduler import Plan
from engine.speculation.acceptance import Acceptance, check_sampled, new_acceptance
from engine.speculation.cost import CostModel
from engine.speculation.gamma.controller import GammaController
from engine.speculation.gamma.policy import DraftCandidate, Traffic
from engine.stats import Reason

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Item = TypeVar("_Item", Observation, HiddenRows)

NO_DRAFTER = "none"
_TOKENS_READ_PER_STEP = 1024
"""Of prompts of all requests, by drafters that index them: some milliseconds at most. A step that
computes more rows takes long enough to read as many."""
_FAILURES_BEFORE_SILENCE = 8
"""A drafter that failed this often for a request is not asked again for it."""


class DraftSlots(Protocol):
    """The part of the pool that drafts need."""

    def allocate_draft(self, request_id: str, num_tokens: int) -> int: ...
    def block_table(self, request_id: str) -> Sequence[int]: ...


@dataclass(slots=True)
class _Drafting:
    """What the engine keeps per request that drafts."""

    drafter: Drafter
    acceptance: Acceptance
    num_failures: int = 0
    is_open: bool = True
    """False: the drafter could not start the request."""

    @property
    def is_asked(self) -> bool:
        return self.is_open and self.num_failures < _FAILURES_BEFORE_SILENCE


@dataclass(slots=True)
class DraftRound:
    """What a step's drafting took, by drafter: seconds, and the requests that share them."""

    seconds_by_drafter: dict[str, float] = field(default_factory=dict)
    num_by_drafter: dict[str, int] = field(default_factory=dict)
    num_asked: dict[str, int] = field(default_factory=dict)
    """Of these, those asked for a draft."""
    num_failures: int = 0

    def share(self, request: Request) -> float:
        """One request's share of its drafter's seconds."""
        name = request.params.speculative.drafter
        num_sharing = self.num_by_drafter.get(name, 0)
        return self.seconds_by_drafter.get(name, 0.0) / num_sharing if num_sharing else 0.0


class Speculation:
    """Owns the drafters, the acceptance estimates and the gamma controller."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        cost: CostModel,
        vocab_size: int,
        max_num_nodes: int,
        slots: DraftSlots,
    ) -> None:
        self.drafters = drafters
        self._slots = slots
        self._cost = cost
        self._vocab_size = vocab_size
        self._max_num_nodes = max_num_nodes
        self._estimator = AcceptanceEstimator()
        self._gamma = GammaController(cost)
        self._drafting: dict[str, _Drafting] = {}
        self._unread: dict[str, _Drafting] = {}
        """Those whose drafter still reads their text, first come first."""

    def open(self, request: Request) -> None:
        """Start drafting for a request, if it asked for a drafter."""
        wanted = request.params.speculative
        if wanted.drafter == NO_DRAFTER:
            return
        drafter = self.drafters[wanted.drafter]
        acceptance = new_acceptance(self._estimator, wanted.drafter, request.sampling.verification)
        drafting = _Drafting(drafter, acceptance)
        self._drafting[request.request_id] = drafting
        self._gamma.open(request.request_id, wanted, _traffic(request))
        try:
            drafter.open(
                request.request_id, request.token_ids, wanted.options, request.params.cache_salt
            )
            if wanted.reference_token_ids:
                drafter.predict(request.request_id, wanted.reference_token_ids)
            drafter.read_prompt(request.request_id, 0)
        except Exception:
            logger.exception("drafter %s could not start a request", wanted.drafter)
            drafting.num_failures += 1
            drafting.is_open = False
        else:
            self._unread[request.request_id] = drafting

    def close(self, request: Request) -> int:
        """Forget a request; returns how often its drafter failed it, here included."""
        drafting = self._drafting.pop(request.request_id, None)
        self._unread.pop(request.request_id, None)
        self._gamma.forget(request.request_id)
        if drafting is None:
            return 0
        self._guarded(drafting, lambda: drafting.drafter.close(request.request_id))
        return drafting.num_failures

    def draft(self, plan: Plan) -> DraftRound:
        """Give every request that samples in this step its draft, as far as the policies grant it and
        there are blocks to lease, and say what its drafter wants to see."""
        for request in plan.admitted:
            self.open(request)
        self._read_prompts(max(_TOKENS_READ_PER_STEP, plan.num_rows))
        round_ = DraftRound()
        turns = [each for each in plan.scheduled if self._takes_turn(each)]
        if turns:
            self._draft(turns, plan, round_)
        for each in plan.scheduled:
            each.wants = self._wants(each)
        return round_

    def _read_prompts(self, num_tokens: int) -> None:
        """Let drafters take in ``num_tokens`` more tokens of the requests that they have not read yet."""
        for request_id, drafting in list(self._unread.items()):
            if num_tokens <= 0:
                return
            read = partial(drafting.drafter.read_prompt, request_id, num_tokens)
            num_tokens -= self._guarded(drafting, read) or 0
            if num_tokens > 0:
                del self._unread[request_id]

    def _draft(self, turns: Sequence[ScheduledRequest], plan: Plan, round_: DraftRound) -> None:
        limits = [self._limits(each.request) for each in turns]
        num_kv_tokens = sum(each.base for each in plan.scheduled)
        num_requests = len(plan.scheduled)
        num_sampling = sum(each.samples for each in plan.scheduled)
        plain_seconds = self._cost.step_seconds(plan.num_rows, num_kv_tokens, num_requests)
        proposals = self._propose(turns, limits, round_, num_sampling / plain_seconds)
        candidates = [
            self._candidate(each.request, tree, limit)
            for each, tree, limit in zip(turns, proposals, limits, strict=True)
        ]
        grants = self._gamma.grant(
            candidates,
            num_base_rows=plan.num_rows,
            num_sampling_requests=num_sampling,
            num_kv_tokens=num_kv_tokens,
            num_requests=num_requests,
            num_spare_rows=plan.spare_rows,
        )
        for each, tree in zip(turns, proposals, strict=True):
            grant = grants[each.request.request_id]
            nodes = [node for node in grant.nodes if node < len(tree)]
            reason: Reason = "" if 0 < len(tree) == len(nodes) else grant.reason
            room = self._lease(each.request, len(nodes))
            if room < len(nodes):
                nodes, reason = nodes[:room], "no_kv"
            each.draft = Draft(tree, tree.subtree(nodes), reason)

    def _lease(self, request: Request, num_nodes: int) -> int:
        """Slots for draft nodes after the request's tokens; returns for how many there is room."""
        if not num_nodes:
            return 0
        num_known = len(request.token_ids)
        covered = self._slots.allocate_draft(request.request_id, num_known + num_nodes)
        return max(0, min(num_nodes, covered - num_known))

    def _wants(self, scheduled: ScheduledRequest) -> Wants:
        drafting = self._drafting.get(scheduled.request.request_id)
        if drafting is None or not drafting.is_asked:
            return NOTHING
        drafter, request_id = drafting.drafter, scheduled.request.request_id
        needs, num_top = drafter.info.needs, 0
        if scheduled.samples:
            num_top = self._guarded(drafting, lambda: drafter.num_top_tokens(request_id)) or 0
        return Wants(needs.hidden_rows, min(num_top, self._vocab_size), needs.top_probs)

    def observe(
        self, seen: Sequence[tuple[ScheduledRequest, Observation]], round_: DraftRound
    ) -> None:
        """Tell estimates, policies and drafters what the target said."""
        by_drafter: dict[str, list[Observation]] = {}
        for scheduled, observation in seen:
            drafting = self._drafting.get(observation.request_id)
            if drafting is None or not drafting.is_asked:
                continue
            assert scheduled.outcome is not None
            drafting.acceptance.observe(scheduled.draft.proposal, observation)
            # What was verified, which a shortage of blocks may have made less than the grant.
            num_verified, num_accepted = len(observation.tree), scheduled.outcome.num_accepted
            self._gamma.observe(observation.request_id, num_verified, num_accepted)
            by_drafter.setdefault(drafting.drafter.info.name, []).append(observation)
        for name, group in by_drafter.items():
            start = time.perf_counter()
            round_.num_failures += self._each_or_all(group, self.drafters[name].observe)
            spent = time.perf_counter() - start
            total = round_.seconds_by_drafter.get(name, 0.0) + spent
            round_.seconds_by_drafter[name] = total
            round_.num_by_drafter[name] = len(group)
            num_asked = min(round_.num_asked.get(name, 0), len(group))
            self._cost.observe_draft(name, len(group), total, num_asked)

    def observe_hidden(self, rows: Sequence[HiddenRows], round_: DraftRound) -> None:
        """Hand newly committed rows' hidden states to the drafters that read them."""
        by_drafter: dict[str, list[HiddenRows]] = {}
        for each in rows:
            name = self._drafting[each.request_id].drafter.info.name
            by_drafter.setdefault(name, []).append(each)
        for name, group in by_drafter.items():
            drafter = self.drafters[name]
            round_.num_failures += self._each_or_all(group, drafter.observe_hidden)

    def _takes_turn(self, scheduled: ScheduledRequest) -> bool:
        drafting = self._drafting.get(scheduled.request.request_id)
        return scheduled.samples and drafting is not None and drafting.is_asked

    def _limits(self, request: Request) -> tuple[int, int]:
        """Nodes and depth that make sense: the target writes the last token itself."""
        depth = min(request.params.speculative.shape.depth, request.num_tokens_left - 1)
        wanted = self._gamma.num_to_propose(request.request_id, request.params.speculative)
        return (min(wanted, self._max_num_nodes) if depth > 0 else 0), max(depth, 0)

    def _candidate(
        self, request: Request, tree: DraftTree, limits: tuple[int, int]
    ) -> DraftCandidate:
        drafting = self._drafting[request.request_id]
        tree = drafting.acceptance.granted_from(tree, min(limits))
        return DraftCandidate(
            request.request_id,
            drafting.drafter.info.name,
            request.params.speculative,
            tree,
            drafting.acceptance.survivals(tree),
            limits[0],
            all_or_nothing=drafting.drafter.info.needs.all_or_nothing,
        )

    def _propose(
        self,
        turns: Sequence[ScheduledRequest],
        limits: Sequence[tuple[int, int]],
        round_: DraftRound,
        plain_rate: float,
    ) -> list[DraftTree]:
        trees = [EMPTY] * len(turns)
        by_drafter: dict[str, list[int]] = {}
        for index, (each, (num_nodes, _)) in enumerate(zip(turns, limits, strict=True)):
            if num_nodes > 0:
                name = self._drafting[each.request.request_id].drafter.info.name
                by_drafter.setdefault(name, []).append(index)
        for name, indices in by_drafter.items():
            start = time.perf_counter()
            round_.num_asked[name] = len(indices)
            asks = [
                self._ask(turns[index].request, *limits[index], plain_rate) for index in indices
            ]
            for index, tree in zip(indices, self._ask_all(name, asks, round_), strict=True):
                trees[index] = tree
            round_.seconds_by_drafter[name] = time.perf_counter() - start
        return trees

    def _ask(self, request: Request, num_nodes: int, depth: int, plain_rate: float) -> DraftRequest:
        drafting = self._drafting[request.request_id]
        if drafting.drafter.info.needs.draft_slots:
            num_nodes = self._lease(request, num_nodes)
        return DraftRequest(
            request.request_id,
            request.token_ids,
            num_nodes,
            DraftShape(request.params.speculative.shape.width, depth),
            request.sampling.draft_sampling(),
            request.num_computed_tokens,
            self._slots.block_table(request.request_id),
            plain_rate if self._gamma.weighs_cost(request.params.speculative) else 0.0,
        )

    def _ask_all(
        self, name: str, asks: Sequence[DraftRequest], round_: DraftRound
    ) -> list[DraftTree]:
        """All at once, since drafters with a model batch; one by one if that goes wrong."""
        drafter = self.drafters[name]
        try:
            return self._checked(drafter.propose(asks), asks)
        except Exception:
            if len(asks) == 1:
                return [self._failed(asks[0], round_)]
        trees: list[DraftTree] = []
        for ask in asks:
            try:
                trees += self._checked(drafter.propose([ask]), [ask])
            except Exception:
                trees.append(self._failed(ask, round_))
        return trees

    def _failed(self, ask: DraftRequest, round_: DraftRound) -> DraftTree:
        drafting = self._drafting[ask.request_id]
        drafting.num_failures += 1
        round_.num_failures += 1
        logger.exception("drafter %s failed to propose", drafting.drafter.info.name)
        return EMPTY

    def _checked(self, trees: list[DraftTree], asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Drafters may come from outside: a malformed tree must not reach the model."""
        for tree, ask in zip(trees, asks, strict=True):
            tree.validate()
            if not tree.token_ids:
                continue
            if not {int}.issuperset(map(type, (*tree.token_ids, *tree.parents, *tree.features))):
                raise ValueError("a proposed tree holds something else than integers")
            if len(tree) > ask.max_nodes:
                raise ValueError(f"{len(tree)} nodes proposed where {ask.max_nodes} were allowed")
            if max(tree.token_ids) >= self._vocab_size or min(tree.token_ids) < 0:
                raise ValueError("a proposed token is not in the vocabulary")
            if max(tree.depths()) > ask.shape.depth:
                raise ValueError(f"a proposed path is deeper than {ask.shape.depth}")
            check_sampled(tree, ask.sampling.verification, self._vocab_size)
        return trees

    def _each_or_all(self, items: Sequence[_Item], call: Callable[[Sequence[_Item]], None]) -> int:
        """Hand over all at once; on failure count it against each request. Returns failures.

        Not retried one by one: a drafter may have learned from half of them already.
        """
        try:
            call(items)
        except Exception:
            logger.exception("a drafter failed to observe")
            for item in items:
                self._drafting[item.request_id].num_failures += 1
            return len(items)
        return 0

    def _guarded(self, drafting: _Drafting, call: Callable[[], _Result]) -> _Result | None:
        try:
            return call()
        except Exception:
            drafting.num_failures += 1
            logger.exception("drafter %s failed", drafting.drafter.info.name)
            return None


def _traffic(request: Request) -> Traffic:
    params = request.params
    return Traffic.of(
        params.speculative.drafter,
        params.cache_salt,
        request.sampling.verification,
        params.sampling.temperature,
        request.num_prompt_tokens,
    )
