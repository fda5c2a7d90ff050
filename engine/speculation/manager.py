"""Between the drafters and the step: what is proposed, what is granted, what is learned from it.

A drafter that raises, tries to end the program or gives back what it may not costs its request the draft
of that step, never the request or the engine.

A drafter that nobody asks in a step, since its kind of traffic rests, is not told of the step either: it
gets all it has missed at once when it is asked again, as one long draft that was accepted, or when its
request ends. Those that keep the target's states or a window of their own are told at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from drafters.base import (
    Drafter,
    DrafterInfo,
    DraftRequest,
    DraftShape,
    HiddenRows,
    Observation,
)
from drafters.checks import check_token_ids, count_of, is_interrupt
from drafters.estimator import AcceptanceEstimator
from drafters.tree import EMPTY, DraftTree, chain
from engine.params import SpeculativeParams
from engine.schedule.request import NOTHING, Draft, Request, ScheduledRequest, Wants
from engine.schedule.scheduler import Plan
from engine.speculation.acceptance import Acceptance, check_sampled, new_acceptance
from engine.speculation.constrained import constrained, num_forced
from engine.speculation.cost import CostModel
from engine.speculation.gamma.controller import GammaController
from engine.speculation.gamma.policy import DraftCandidate, Traffic
from engine.speculation.shedding import Shedding
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


class Waits(Protocol):
    """The part of a ``Readback`` that is no drafter's."""

    @property
    def num_added(self) -> int: ...
    def fetch(self) -> None: ...


@dataclass(slots=True)
class _Drafting:
    """What the engine keeps per request that drafts."""

    drafter: Drafter
    info: DrafterInfo
    acceptance: Acceptance
    num_failures: int = 0
    is_open: bool = True
    """False: the drafter could not start the request."""
    num_missed: int = 0
    """Tokens at the end of the text that the drafter was not told of yet."""

    @property
    def is_asked(self) -> bool:
        return self.is_open and self.num_failures < _FAILURES_BEFORE_SILENCE

    @property
    def can_wait(self) -> bool:
        """For what was written in steps without its drafts."""
        needs = self.info.needs
        return not (
            needs.hidden_rows or needs.draft_slots or needs.draft_model or needs.all_or_nothing
        )


@dataclass(slots=True)
class _Turn:
    """A request's turn to draft: how many nodes and how much depth make sense, and what is proposed.
    ``num_asked``: of these nodes, how many its drafter is asked for. ``params``: the request's own, or
    what is left of them while others wait; ``is_shed``: then it does without its drafter."""

    scheduled: ScheduledRequest
    drafting: _Drafting
    max_nodes: int
    depth: int
    num_asked: int
    params: SpeculativeParams
    is_shed: bool = False
    tree: DraftTree = EMPTY

    @property
    def request(self) -> Request:
        return self.scheduled.request


@dataclass(slots=True)
class _Proposal:
    """What a drafter was asked by these turns, and what ends it. ``waits``: for the device.
    ``seconds``: that it took to begin."""

    name: str
    turns: Sequence[_Turn]
    asks: Sequence[DraftRequest]
    finish: Callable[[], list[DraftTree]]
    waits: bool
    seconds: float


@dataclass(slots=True)
class DraftRound:
    """What a step's drafting took, by drafter: seconds, and the requests that share them."""

    seconds_by_drafter: dict[str, float] = field(default_factory=dict)
    num_by_drafter: dict[str, int] = field(default_factory=dict)
    asked: dict[str, set[str]] = field(default_factory=dict)
    """Of these, those asked for a draft, by id."""
    num_failures: int = 0

    def share(self, request: Request) -> float:
        """One request's share of its drafter's seconds."""
        name = request.params.speculative.draft_strategy
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
        shedding: Shedding = Shedding(),  # noqa: B008  (frozen)
    ) -> None:
        self.drafters = drafters
        self._slots = slots
        self._cost = cost
        self._shedding = shedding
        self._vocab_size = vocab_size
        self.max_num_nodes = max_num_nodes
        self._estimator = AcceptanceEstimator()
        self._gamma = GammaController(cost)
        self._drafting: dict[str, _Drafting] = {}
        self._unread: dict[str, _Drafting] = {}
        """Those whose drafter still reads their text, first come first."""

    def open(self, request: Request) -> None:
        """Start drafting for a request, if it asked for a drafter."""
        wanted = request.params.speculative
        if wanted.draft_strategy == NO_DRAFTER:
            return
        drafter = self.drafters[wanted.draft_strategy]
        acceptance = new_acceptance(
            self._estimator, wanted.draft_strategy, request.sampling.verification
        )
        drafting = _Drafting(drafter, drafter.info, acceptance)
        self._drafting[request.request_id] = drafting
        self._gamma.open(request.request_id, wanted, _traffic(request))
        try:
            drafter.open(
                request.request_id, request.token_ids, wanted.options, request.params.cache_salt
            )
            if request.params.prediction_token_ids:
                drafter.predict(request.request_id, request.params.prediction_token_ids)
            drafter.read_prompt(request.request_id, 0)
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("drafter %s could not start a request", wanted.draft_strategy)
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
        self._catch_up(request, drafting)
        self._guarded(drafting, drafting.drafter.close, request.request_id)
        return drafting.num_failures

    def draft(self, plan: Plan, readback: Waits) -> DraftRound:
        """Give every request that samples in this step its draft, as far as the policies grant it and
        there are blocks to lease, and say what its drafter wants to see. ``readback``: for what drafters
        read of a device; it is fetched once."""
        for request in plan.admitted:
            self.open(request)
        if self._unread:
            self._read_prompts(max(_TOKENS_READ_PER_STEP, plan.num_rows))
        round_ = DraftRound()
        found = [self._turn(each, plan.num_waiting) for each in plan.scheduled]
        turns = [turn for turn in found if turn is not None]
        if turns:
            self._draft(turns, plan, round_, readback)
        for each in plan.scheduled:
            drafting = self._drafting.get(each.request.request_id)
            if (
                drafting is not None
                and drafting.is_asked
                and not self._waits(drafting, each, round_)
            ):
                each.wants = self._wants(each, drafting)
        return round_

    def _waits(self, drafting: _Drafting, scheduled: ScheduledRequest, round_: DraftRound) -> bool:
        """Whether the drafter may be told of this step later."""
        asked = round_.asked.get(drafting.info.name, ())
        return drafting.can_wait and scheduled.request.request_id not in asked

    def _catch_up(self, request: Request, drafting: _Drafting) -> None:
        """Tell a drafter what it has missed."""
        num_missed, drafting.num_missed = drafting.num_missed, 0
        if not num_missed or not drafting.is_asked:
            return
        missed = request.token_ids[-num_missed:]
        seen = Observation(
            request.request_id,
            request.token_ids,
            chain(missed[:-1]),
            missed,
            range(num_missed),
            missed,
        )
        self._guarded(drafting, drafting.drafter.observe, [seen])

    def _read_prompts(self, num_tokens: int) -> None:
        """Let drafters take in ``num_tokens`` more tokens of the requests that they have not read yet."""
        for request_id, drafting in list(self._unread.items()):
            if num_tokens <= 0:
                return
            read = drafting.drafter.read_prompt
            num_read = self._counted(drafting, num_tokens, read, request_id, num_tokens)
            num_tokens -= num_read
            if num_tokens > 0:
                del self._unread[request_id]

    def _turn(self, scheduled: ScheduledRequest, num_waiting: int) -> _Turn | None:
        """The target writes the last token itself, so the depth stays below the tokens left."""
        request = scheduled.request
        drafting = self._drafting.get(request.request_id)
        if not scheduled.samples or drafting is None or not drafting.is_asked:
            return None
        wanted = request.params.speculative
        depth = min(wanted.shape.depth, request.num_tokens_left - 1)
        num_nodes = self._gamma.num_to_propose(request.request_id, wanted)
        params = self._shedding.params(wanted, num_waiting)
        if depth <= 0:
            return _Turn(scheduled, drafting, 0, 0, 0, params)
        weighs_cost = self._gamma.weighs_cost(wanted)
        is_shed = num_nodes > 0 and self._shedding.is_shed(num_waiting, weighs_cost)
        num_asked = 0 if is_shed else min(num_nodes, self.max_num_nodes)
        if request.sampling.grammar is None:
            return _Turn(scheduled, drafting, num_asked, depth, num_asked, params, is_shed)
        # What is forced is worth its rows whether or not the drafter rests or yields.
        num_free = min(len(request.sampling.grammar.forced()), _most_nodes(wanted))
        max_nodes = min(max(num_asked, num_free), self.max_num_nodes)
        return _Turn(scheduled, drafting, max_nodes, depth, num_asked, params, is_shed)

    def _draft(
        self, turns: Sequence[_Turn], plan: Plan, round_: DraftRound, readback: Waits
    ) -> None:
        num_kv_tokens = sum(each.base for each in plan.scheduled)
        num_requests = len(plan.scheduled)
        num_sampling = sum(each.samples for each in plan.scheduled)
        plain_seconds = self._cost.step_seconds(plan.num_rows, num_kv_tokens, num_requests)
        self._propose(turns, round_, num_sampling / plain_seconds, readback)
        _constrain(turns)
        grants = self._gamma.grant(
            [self._candidate(turn) for turn in turns],
            num_base_rows=plan.num_rows,
            num_sampling_requests=num_sampling,
            num_kv_tokens=num_kv_tokens,
            num_requests=num_requests,
            num_spare_rows=plan.spare_rows,
        )
        for turn in turns:
            request, tree = turn.request, turn.tree
            grant, num_offered = grants[request.request_id], len(tree.token_ids)
            nodes = grant.nodes
            if nodes and nodes[-1] >= num_offered:  # policies may see more than there is
                nodes = [node for node in nodes if node < num_offered]
            reason: Reason = "" if 0 < num_offered == len(nodes) else grant.reason
            if turn.is_shed:
                reason = "shed"
            room = self._lease(request, len(nodes))
            if room < len(nodes):
                nodes, reason = nodes[:room], "no_kv"
            turn.scheduled.draft = Draft(tree, tree.subtree(nodes), reason)

    def _lease(self, request: Request, num_nodes: int) -> int:
        """Slots for draft nodes after the request's tokens; returns for how many there is room."""
        if not num_nodes:
            return 0
        num_known = len(request.token_ids)
        covered = self._slots.allocate_draft(request.request_id, num_known + num_nodes)
        return max(0, min(num_nodes, covered - num_known))

    def _wants(self, scheduled: ScheduledRequest, drafting: _Drafting) -> Wants:
        needs, num_top = drafting.info.needs, 0
        if scheduled.samples:
            ask = drafting.drafter.num_top_tokens
            num_top = self._counted(drafting, None, ask, scheduled.request.request_id)
        if not num_top and not needs.hidden_rows:
            return NOTHING
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
            self._observe_gamma(observation, scheduled.outcome.num_accepted)
            if self._waits(drafting, scheduled, round_):
                drafting.num_missed += len(observation.emitted_token_ids)
                continue
            by_drafter.setdefault(drafting.info.name, []).append(observation)
        for name, group in by_drafter.items():
            start = time.perf_counter()
            round_.num_failures += self._each_or_all(group, self.drafters[name].observe)
            spent = time.perf_counter() - start
            total = round_.seconds_by_drafter.get(name, 0.0) + spent
            round_.seconds_by_drafter[name] = total
            round_.num_by_drafter[name] = len(group)
            num_asked = min(len(round_.asked.get(name, ())), len(group))
            self._cost.observe_draft(name, len(group), total, num_asked)

    def _observe_gamma(self, seen: Observation, num_accepted: int) -> None:
        """What was verified, which a shortage of blocks may have made less than the grant; without what
        a grammar forced, which says nothing of the drafter."""
        num_verified = len(seen.tree.token_ids)
        forced = num_forced(seen.tree, range(num_verified))
        if forced:
            num_verified -= forced
            num_accepted -= num_forced(seen.tree, [row - 1 for row in seen.path[1:]])
        self._gamma.observe(seen.request_id, num_verified, num_accepted)

    def observe_hidden(self, rows: Sequence[HiddenRows], round_: DraftRound) -> None:
        """Hand newly committed rows' hidden states to the drafters that read them."""
        by_drafter: dict[str, list[HiddenRows]] = {}
        for each in rows:
            name = self._drafting[each.request_id].info.name
            by_drafter.setdefault(name, []).append(each)
        for name, group in by_drafter.items():
            drafter = self.drafters[name]
            round_.num_failures += self._each_or_all(group, drafter.observe_hidden)

    def _candidate(self, turn: _Turn) -> DraftCandidate:
        request, drafting = turn.request, turn.drafting
        tree = drafting.acceptance.granted_from(turn.tree, min(turn.max_nodes, turn.depth))
        return DraftCandidate(
            request.request_id,
            drafting.info.name,
            turn.params,
            tree,
            drafting.acceptance.survivals(tree) if tree.token_ids else (),
            turn.max_nodes,
            all_or_nothing=drafting.info.needs.all_or_nothing,
            is_asked=turn.num_asked > 0,
        )

    def _propose(
        self, turns: Sequence[_Turn], round_: DraftRound, plain_rate: float, readback: Waits
    ) -> None:
        """Put the trees that the drafters propose into the turns."""
        by_drafter: dict[str, list[_Turn]] = {}
        for turn in turns:
            if turn.num_asked > 0:
                by_drafter.setdefault(turn.drafting.info.name, []).append(turn)
        proposals = [
            self._begin(name, group, plain_rate, readback) for name, group in by_drafter.items()
        ]
        waiting = [each for each in proposals if each.waits]
        waited = self._fetch(readback) / len(waiting) if waiting else 0.0
        for each in proposals:
            start = time.perf_counter()
            name = each.name
            round_.asked[name] = {turn.request.request_id for turn in each.turns}
            for turn, tree in zip(each.turns, self._finish(each, round_), strict=True):
                turn.tree = tree
            spent = each.seconds + time.perf_counter() - start
            round_.seconds_by_drafter[name] = spent + (waited if each.waits else 0.0)

    def _begin(
        self, name: str, turns: Sequence[_Turn], plain_rate: float, readback: Waits
    ) -> _Proposal:
        """Ask a drafter for all its requests at once, since those with a model batch."""
        for turn in turns:
            self._catch_up(turn.request, turn.drafting)
        start, num_before = time.perf_counter(), readback.num_added
        asks = [self._ask(turn, plain_rate) for turn in turns]
        try:
            finish = self.drafters[name].begin(asks, readback)
        except BaseException as error:
            if is_interrupt(error):
                raise
            finish = _raising(error)
        seconds = time.perf_counter() - start
        return _Proposal(name, turns, asks, finish, readback.num_added > num_before, seconds)

    def _fetch(self, readback: Waits) -> float:
        """What all drafters wait for, at once: the seconds that it took."""
        start = time.perf_counter()
        try:
            readback.fetch()
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("what drafters wait for does not come")
        return time.perf_counter() - start

    def _ask(self, turn: _Turn, plain_rate: float) -> DraftRequest:
        request, num_nodes = turn.request, turn.num_asked
        wanted = request.params.speculative
        if turn.drafting.info.needs.draft_slots:
            num_nodes = self._lease(request, num_nodes)
        shape = wanted.shape
        if turn.depth != shape.depth:
            shape = DraftShape(shape.width, turn.depth)
        return DraftRequest(
            request.request_id,
            request.token_ids,
            num_nodes,
            shape,
            request.sampling.draft_sampling(),
            request.num_computed_tokens,
            self._slots.block_table(request.request_id),
            plain_rate if self._gamma.weighs_cost(wanted) else 0.0,
        )

    def _finish(self, proposal: _Proposal, round_: DraftRound) -> list[DraftTree]:
        """All at once; one by one if that goes wrong."""
        asks, drafter = proposal.asks, self.drafters[proposal.name]
        try:
            return self._checked(proposal.finish(), asks)
        except BaseException as error:
            if is_interrupt(error):
                raise
            if len(asks) == 1:
                return [self._failed(asks[0], round_)]
        trees: list[DraftTree] = []
        for ask in asks:
            try:
                trees += self._checked(drafter.propose([ask]), [ask])
            except BaseException as error:
                if is_interrupt(error):
                    raise
                trees.append(self._failed(ask, round_))
        return trees

    def _failed(self, ask: DraftRequest, round_: DraftRound) -> DraftTree:
        drafting = self._drafting[ask.request_id]
        drafting.num_failures += 1
        round_.num_failures += 1
        logger.exception("drafter %s failed to propose", drafting.info.name)
        return EMPTY

    def _checked(self, trees: list[DraftTree], asks: Sequence[DraftRequest]) -> list[DraftTree]:
        """Drafters may come from outside: a malformed tree must not reach the model."""
        if not isinstance(trees, list | tuple):  # a generator would be used up here
            raise TypeError(f"propose returned a {type(trees).__name__}, not a list of trees")
        for tree, ask in zip(trees, asks, strict=True):
            if not isinstance(tree, DraftTree):
                raise TypeError(f"a {type(tree).__name__} was proposed, not a DraftTree")
            tree.validate()
            token_ids = tree.token_ids
            if not token_ids:
                continue
            if len(token_ids) > ask.max_nodes:
                raise ValueError(
                    f"{len(token_ids)} nodes proposed where {ask.max_nodes} were allowed"
                )
            check_token_ids(token_ids, self._vocab_size)
            if tree.deepest() > ask.shape.depth:
                raise ValueError(f"a proposed path is deeper than {ask.shape.depth}")
            check_sampled(tree, ask.sampling.verification, self._vocab_size)
        return trees

    def _each_or_all(self, items: Sequence[_Item], call: Callable[[Sequence[_Item]], None]) -> int:
        """Hand over all at once; on failure count it against each request. Returns failures.

        Not retried one by one: a drafter may have learned from half of them already.
        """
        try:
            call(items)
        except BaseException as error:
            if is_interrupt(error):
                raise
            logger.exception("a drafter failed to observe")
            for item in items:
                self._drafting[item.request_id].num_failures += 1
            return len(items)
        return 0

    def _guarded(
        self, drafting: _Drafting, call: Callable[..., _Result], *args: object
    ) -> _Result | None:
        try:
            return call(*args)
        except BaseException as error:
            if is_interrupt(error):
                raise
            drafting.num_failures += 1
            logger.exception("drafter %s failed", drafting.info.name)
            return None

    def _counted(
        self, drafting: _Drafting, most: int | None, call: Callable[..., object], *args: object
    ) -> int:
        """What ``call`` gives back, where that is a number up to ``most``; else it has failed, for 0."""
        return self._guarded(drafting, lambda: count_of(call(*args), most)) or 0


def _raising(error: BaseException) -> Callable[[], list[DraftTree]]:
    def finish() -> list[DraftTree]:
        raise error

    return finish


def _constrain(turns: Sequence[_Turn]) -> None:
    """Make the proposals of requests with a grammar what it leaves of them."""
    for turn in turns:
        grammar = turn.request.sampling.grammar
        if grammar is not None and turn.max_nodes > 0:
            verification = turn.request.sampling.verification
            try:
                turn.tree = constrained(
                    turn.tree, grammar, turn.max_nodes, turn.depth, verification
                )
            except Exception:
                # One that gave up does so again where rows are masked: for its request alone.
                turn.tree = EMPTY


def _most_nodes(wanted: SpeculativeParams) -> int:
    """That a request's policy may ever grant."""
    return max(wanted.num_speculative_tokens, wanted.max_speculative_tokens)


def _traffic(request: Request) -> Traffic:
    params = request.params
    return Traffic.of(
        params.speculative.draft_strategy,
        params.cache_salt,
        request.sampling.verification,
        params.sampling.temperature,
        request.num_prompt_tokens,
    )
