"""Speculation between the drafters and the step: proposals, grants, and what is learned from them.

A drafter that is not asked in a step, since its kind of traffic rests, is not told of the step either: it
gets all it has missed at once when it is asked again, as one long draft that was accepted, or when its
request ends. Those that keep the target's states or a window of their own are told at once, but for the
states themselves, which wait until they are needed (``hidden.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from drafters.base import Drafter, HiddenRows, Observation, hidden_layers_of
from drafters.containment import count_of, counted, guarded, succeeds
from drafters.estimator import AcceptanceEstimator
from engine.config import ShedSpeculation
from engine.request.outcome import Outcome
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.acceptance import new_acceptance
from engine.speculation.constrained import constrain, counts
from engine.speculation.cost import CostModel
from engine.speculation.drafting import (
    Drafting,
    drafting_if_any,
    drafting_of,
    shape_of,
    timed,
    weighed,
)
from engine.speculation.gamma.policy import registered_policies
from engine.speculation.granting import Granting, Shedding
from engine.speculation.hidden import WaitingStates
from engine.speculation.ledgers import Ledgers
from engine.speculation.proposing import Proposing
from kvpool.block_pool import BlockPool

if TYPE_CHECKING:
    from torch import Tensor

    from engine.transfer import Readback

NO_DRAFTER = "none"
_TOKENS_READ_PER_STEP = 1024
"""Tokens of all prompts that drafters may index per step: some milliseconds at most. A step that
computes more rows takes long enough to read as many."""


class Speculation:
    """Owns the drafters, the acceptance estimates and the gamma policies. ``shed``: which drafts yield
    from ``shed_queue`` waiting requests on."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        cost: CostModel,
        vocab_size: int,
        max_num_nodes: int,
        pool: BlockPool,
        shed: ShedSpeculation = "never",
        shed_queue: int = 1,
    ) -> None:
        self.drafters = drafters
        self.hidden_layers = hidden_layers_of(drafters.values())
        """The layers whose hidden states any drafter reads."""
        self.max_num_nodes = max_num_nodes
        self._num_closed_failures = 0
        self._pool = pool
        self._vocab_size = vocab_size
        self._estimator = AcceptanceEstimator()
        self._ledgers = Ledgers(cost)
        self._policies = {kind.name: kind(cost) for kind in registered_policies()}
        self._shedding = Shedding(shed, shed_queue)
        self._proposing = Proposing(drafters, pool, vocab_size)
        self._granting = Granting(self._policies, cost, pool, self._shedding)
        self._drafting: dict[str, Drafting] = {}
        """The requests that draft, by id."""
        self._unread: dict[str, Drafting] = {}
        """Requests whose drafter still reads the prompt, in order of arrival."""
        self._hidden = WaitingStates()
        self._unsettled: dict[str, Drafter] = {}
        """Drafters, by name, that may still write rows of requests that have left their blocks."""
        for each in drafters.values():
            if each.fetches_hidden:
                each.fetch_hidden = self._tell_hidden

    def _reads_hidden(self, name: str) -> bool:
        """Returns whether a drafter is given hidden states before it is asked."""
        drafter = self.drafters[name]
        return drafter.info.needs.hidden_rows and not drafter.fetches_hidden

    # --- a request comes and goes ---

    def open(self, request: Request) -> None:
        """Start drafting for a request, if it asked for a drafter."""
        params, request_id = request.params, request.request_id
        wanted = params.speculative
        if wanted.draft_strategy == NO_DRAFTER:
            return
        drafter, policy = (
            self.drafters[wanted.draft_strategy],
            self._policies[wanted.adaptive_depth],
        )
        acceptance = new_acceptance(
            self._estimator, wanted.draft_strategy, request.sampling.verification
        )
        is_whole = drafter.info.needs.all_or_nothing
        gain = self._ledgers.gain(wanted.draft_strategy, is_whole, request)
        shape = shape_of(wanted, drafter, request.sampling.verification)
        drafting = Drafting(drafter, gain, policy, acceptance, shape)
        request.drafting = self._drafting[request_id] = drafting
        drafting.weighs_cost = policy.weighs_cost and not wanted.min_speculative_tokens

        def start() -> None:
            drafter.open(request_id, request.token_ids, wanted.options, params.cache_salt)
            if params.prediction_token_ids:
                drafter.predict(request_id, params.prediction_token_ids)
            drafter.read_prompt(request_id, 0)

        drafting.is_open = succeeds([drafting], start)
        if drafting.is_open:
            self._unread[request_id] = drafting

    def num_usable_tokens(self, request: Request, block_ids: Sequence[int]) -> int:
        """Returns how many tokens of a cached prefix, which lies in these blocks, the request's drafter
        can build on: all, if it has none, or one that fails."""
        params, all_of_them = request.params, len(request.token_ids)
        drafting = drafting_if_any(request)
        name = params.speculative.draft_strategy
        if name == NO_DRAFTER or (drafting is not None and not drafting.is_asked):
            return all_of_them
        self._tell_hidden()

        def ask() -> int:
            found = self.drafters[name].num_usable_tokens(
                request.token_ids, block_ids, params.cache_salt
            )
            return count_of(found, all_of_them)

        usable = guarded([] if drafting is None else [drafting], ask)
        if usable is None:
            self._num_closed_failures += drafting is None
            return all_of_them
        num_recomputed = len(block_ids) * self._pool.block_size - usable
        return usable if num_recomputed <= self.drafters[name].most_recomputed else all_of_them

    def leave_blocks(self, request: Request) -> None:
        """The request is about to give back its blocks. Its drafter has until ``settle`` to write into
        them what it still knows of the text, as far as somebody can find it there."""
        drafting = drafting_if_any(request)
        if drafting is None or not drafting.is_asked or not self._pool.enable_prefix_cache:
            self._hidden.forget(request.request_id)
            return
        self._tell_hidden()
        table = self._pool.block_table(request.request_id)
        leave = drafting.drafter.leave_blocks
        guarded([drafting], leave, request.request_id, request.token_ids, table)
        self._unsettled[drafting.name] = drafting.drafter

    def settle(self) -> None:
        """Let drafters write what they were to write. To be called before requests are admitted, which
        may find it, and before others draft, who may have the blocks."""
        while self._unsettled:
            _, drafter = self._unsettled.popitem()
            if not succeeds([], drafter.settle):
                self._num_closed_failures += 1

    def close(self, request: Request) -> int:
        """Forget a request; returns how often its drafter failed it, here included."""
        drafting, request.drafting = drafting_if_any(request), None
        self._drafting.pop(request.request_id, None)
        self._unread.pop(request.request_id, None)
        self._hidden.forget(request.request_id)
        if drafting is None:
            return 0
        drafting.policy.forget(request.request_id)
        self._ledgers.forget(drafting.name, request.request_id)
        drafting.catch_up(request.request_id, request.token_ids)
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

    def draft_ahead(self, plan: Plan) -> bool:
        """Says for a step that is launched before the one before was read how long its drafts are, which
        the device makes. False: it has to wait, since the host makes one."""
        if self._unread:
            self._read_prompts(_TOKENS_READ_PER_STEP)
        awake = self._awake(plan) if self._drafting else []
        if not all(drafting_of(each).is_copied(each) for each in awake):
            return False
        with weighed(plan):
            drafting = [each for each in awake if self._bound(each, plan.num_waiting)]
            if drafting:
                self._ledgers.begin_step(plan)
                self._chosen(drafting, plan)
                drafting = [each for each in drafting if each.num_asked > 0]
                for each in drafting:
                    drafting_of(each).foresee(each)
                self._grant(drafting, plan)
        return all(each.draft for each in drafting)

    def draft(self, plan: Plan, readback: Readback) -> None:
        """Give every request that samples in this step its draft, as far as the policies grant it and
        there are blocks to lease, and say what its drafter wants to see. ``readback``: for what drafters
        read of a device; it is fetched once."""
        self.settle()
        for request in plan.admitted:
            self.open(request)
        if self._unread:
            self._read_prompts(max(_TOKENS_READ_PER_STEP, plan.num_rows))
        if not self._drafting:
            return
        with weighed(plan):
            drafting = [each for each in self._awake(plan) if self._bound(each, plan.num_waiting)]
            if drafting:
                rate = self._ledgers.begin_step(plan)
                asked = self._chosen(drafting, plan)
                if any(map(self._reads_hidden, asked)):
                    self._tell_hidden(plan)
                self._proposing.propose(asked, plan, readback, rate)
                drafting = [each for each in drafting if each.max_nodes > 0]
                constrain(drafting)
                self._grant(drafting, plan)
            for each in plan.scheduled:
                self._want(each)

    def _grant(self, drafting: Sequence[ScheduledRequest], plan: Plan) -> None:
        self._granting.grant(drafting, plan, self._ledgers.prompt_seconds)
        self._ledgers.granted(plan)

    def _awake(self, plan: Plan) -> list[ScheduledRequest]:
        """Returns the requests that may get a draft, but for those that rest for some steps: they cost
        next to nothing."""
        able = [
            (each, own)
            for each in plan.scheduled
            if each.samples and (own := drafting_if_any(each.request)) is not None
        ]
        # A window that misses a step has to be filled again.
        may_miss = (_may_rest(each, own) and not own.is_whole for each, own in able)
        if self._ledgers.wants_plain(plan) and all(may_miss):
            plan.is_plain = True
            for each, _ in able:
                each.reason = "policy"
            return []
        weighing = (own for _, own in able if own.weighs_cost)
        resting = self._ledgers.rest(weighing, plan.num_sampling)
        if not resting:
            return [each for each, _ in able]
        awake = []
        for each, own in able:
            if own.name not in resting or not _may_rest(each, own):
                awake.append(each)
            else:
                each.reason = "low_acceptance"
        return awake

    def _read_prompts(self, num_tokens: int) -> None:
        """Let drafters take in ``num_tokens`` more tokens of the requests that they have not read yet."""
        for request_id, drafting in list(self._unread.items()):
            if num_tokens <= 0:
                return
            read = drafting.drafter.read_prompt
            num_tokens -= counted([drafting], num_tokens, read, request_id, num_tokens)
            if num_tokens > 0:
                del self._unread[request_id]

    def _bound(self, each: ScheduledRequest, num_waiting: int) -> bool:
        """Say how many draft nodes make sense, and how many of them to ask the drafter for. False where
        nothing can come of it, so that a request that rests costs next to nothing. The target writes the
        last token itself, so the depth stays below the tokens left."""
        request = each.request
        drafting = drafting_if_any(request)
        if not each.samples or drafting is None or not drafting.is_asked:
            return False
        wanted, policy = request.params.speculative, drafting.policy
        num_nodes = policy.num_to_propose(request.request_id, wanted)
        if num_nodes <= 0:
            each.reason = policy.bound
        elif self._shedding.sheds(num_waiting, policy.weighs_cost):
            each.reason, num_nodes = "shed", 0
        grammar = request.sampling.grammar
        if num_nodes <= 0 and grammar is None:
            return False
        most = self.max_num_nodes
        if grammar is not None:
            most = min(most, grammar.time.num_affordable_drafts)
            if most < num_nodes:
                each.reason = "masks"
            if most <= 0:
                return False
        each.max_depth = min(
            drafting.shape.depth, request.num_tokens_left - request.sampling.num_unseen - 1
        )
        if each.max_depth <= 0:
            each.reason = each.reason or "client_cap"
            return False
        each.num_asked = min(num_nodes, most)
        each.max_nodes = min(max(each.num_asked, self._num_forced(request)), most)
        return True

    @staticmethod
    def _num_forced(request: Request) -> int:
        """Returns how many nodes a grammar forces: these are worth their rows whether or not the drafter
        rests or yields."""
        grammar, wanted = request.sampling.grammar, request.params.speculative
        cap = max(wanted.num_speculative_tokens, wanted.max_speculative_tokens)
        return 0 if grammar is None else min(len(grammar.forced()), cap)

    def _want(self, each: ScheduledRequest) -> None:
        """Say what the drafter wants to see of the step: states in any case, the rest if it is told of
        it at once."""
        drafting = drafting_if_any(each.request)
        if drafting is None or not drafting.is_asked:
            return
        needs = drafting.drafter.info.needs
        if needs.hidden_rows:
            each.hidden_layers = tuple(drafting.drafter.hidden_layers)
        if not drafting.is_told(each):
            return
        each.wants_top_probs = needs.top_probs
        if each.samples:
            ask = drafting.drafter.num_top_tokens
            num_top = counted([drafting], None, ask, each.request.request_id)
            each.num_top_tokens = min(num_top, self._vocab_size)

    # --- proposals ---

    def _chosen(
        self, drafting: Sequence[ScheduledRequest], plan: Plan
    ) -> dict[str, list[ScheduledRequest]]:
        """Returns by drafter whom it is asked for; the others rest in this step."""
        groups: dict[str, list[tuple[ScheduledRequest, Drafting]]] = {}
        for each in drafting:
            if each.num_asked > 0:
                own = drafting_of(each)
                groups.setdefault(own.name, []).append((each, own))
        asked: dict[str, list[ScheduledRequest]] = {}
        for name, group in groups.items():
            chosen = self._ledgers.choose(name, group, plan)
            if chosen:
                asked[name] = [group[at][0] for at in chosen]
            for at in set(range(len(group))).difference(chosen):
                each = group[at][0]
                each.num_asked, each.reason = 0, "low_acceptance"
                each.max_nodes = min(each.max_nodes, self._num_forced(each.request))
        return asked

    # --- grants ---

    # --- after the forward ---

    def observe(self, plan: Plan, requests: Sequence[ScheduledRequest]) -> None:
        """Tell estimates, policies and drafters what the target said of requests that have sampled, and
        requests what their drafters took."""
        by_drafter: dict[str, list[tuple[ScheduledRequest, Observation]]] = {}
        with weighed(plan):
            for each in requests:
                drafting = drafting_if_any(each.request)
                if drafting is not None and drafting.is_asked:
                    seen = self._learn(each, drafting, plan)
                    if seen is not None:
                        by_drafter.setdefault(drafting.name, []).append((each, seen))
            self._ledgers.wrote(plan, requests)
            for name, told in by_drafter.items():
                # Not retried one by one: a drafter may have learned from half of them already.
                whose = [drafting_of(each) for each, _ in told]
                with timed(plan, name):
                    guarded(whose, self.drafters[name].observe, [seen for _, seen in told])
        self._account(plan, by_drafter)

    def _learn(self, each: ScheduledRequest, drafting: Drafting, plan: Plan) -> Observation | None:
        """Policy, ledger and estimates learn from a request's step. Returns what its drafter is to hear
        of it at once, if anything."""
        request, outcome = each.request, each.outcome
        assert outcome is not None
        drafting.see(each)
        num_verified, num_accepted = counts(each)
        drafting.policy.observe(request.request_id, num_verified, num_accepted)
        self._ledgers.learn(each, drafting, plan, num_verified, num_accepted)
        drafting.has_verified |= num_verified > 0
        drafting.has_rested |= each.num_asked <= 0 and not plan.is_plain
        # Who reads the prompt reads what is written meanwhile, too.
        is_told = drafting.is_told(each) or request.request_id in self._unread
        if not is_told:
            drafting.num_missed += len(outcome.emitted_token_ids)
            if not each.proposal.token_ids and not drafting.acceptance.is_waiting:
                return None
        row_tokens = drafting.row_tokens / max(1, num_verified)
        seen = _observation(request, each, outcome, row_tokens)
        drafting.acceptance.observe(each.proposal, seen)
        return seen if is_told else None

    def _account(
        self, plan: Plan, by_drafter: Mapping[str, Sequence[tuple[ScheduledRequest, Observation]]]
    ) -> None:
        """Requests and the cost model hear what drafts took: their drafters' time and, of those who were
        asked, the engine's."""
        asked = {
            name: [drafting_of(each) for each, _ in told if each.num_asked > 0]
            for name, told in by_drafter.items()
        }
        own = plan.speculation_seconds / max(1, sum(map(len, asked.values())))
        for name, told in by_drafter.items():
            seconds = plan.draft_seconds[name] + own * len(asked[name])
            for each, _ in told:
                each.draft_seconds = seconds / len(told)
            if asked[name]:
                # A drafter may time itself by another clock than the engine's.
                weighed = self.drafters[name].weighed_seconds
                self._ledgers.took(name, asked[name], max(0.0, seconds - weighed))

    def observe_hidden(
        self, requests: Sequence[ScheduledRequest], states: Mapping[int, Tensor]
    ) -> None:
        """Keep the hidden states of newly committed tokens for the drafters that read them. ``states``:
        those of the step's rows, ``[num_rows, hidden_size]`` by layer."""
        self._hidden.add(requests, states)
        if self._hidden.are_many:
            self._tell_hidden()

    def _tell_hidden(self, plan: Plan | None = None) -> None:
        """Hand the states that wait to the drafters. ``plan``: of the step for whose drafts it is done,
        and to whose price it belongs."""
        by_drafter: dict[str, list[HiddenRows]] = {}
        for each in self._hidden.take():
            by_drafter.setdefault(self._drafting[each.request_id].name, []).append(each)
        for name, group in by_drafter.items():
            whose = [self._drafting[each.request_id] for each in group]
            with nullcontext() if plan is None else timed(plan, name):
                guarded(whose, self.drafters[name].observe_hidden, group)


def _may_rest(each: ScheduledRequest, drafting: Drafting) -> bool:
    """Returns whether the request's drafts are made only if they pay: what a grammar forces is free."""
    return drafting.weighs_cost and each.request.sampling.grammar is None


def _observation(
    request: Request, each: ScheduledRequest, outcome: Outcome, row_tokens: float
) -> Observation:
    return Observation(
        request.request_id,
        request.token_ids,
        each.draft,
        outcome.row_token_ids,
        outcome.path,
        outcome.emitted_token_ids,
        each.top_token_ids,
        each.top_probs,
        each.top_logits,
        row_tokens,
    )
