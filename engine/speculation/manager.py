"""Speculation between the drafters and the step: proposals, grants, and what is learned from them.

A drafter that is not asked in a step, since its kind of traffic rests, is not told of the step either: it
gets all it has missed at once when it is asked again, as one long draft that was accepted, or when its
request ends. Those that keep the target's states or a window of their own are told at once, but for the
states themselves, which wait until they are needed (``hidden.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeAlias

from drafters.base import Drafter, HiddenRows, Observation, Options, hidden_layers_of
from drafters.containment import counted, guarded, succeeds
from drafters.estimator import AcceptanceEstimator
from drafters.ledger import Gain, Ledger
from drafters.tree import EMPTY
from engine.config import ShedSpeculation
from engine.request.outcome import Outcome
from engine.schedule.request import Plan, Request, ScheduledRequest
from engine.speculation.acceptance import Acceptance, new_acceptance
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
from engine.speculation.ledgers import Ledgers, Traffic
from engine.speculation.parts import Ask, Guest, Part, lay
from engine.speculation.proposing import Proposing
from kvpool.block_pool import BlockPool

if TYPE_CHECKING:
    from torch import Tensor

    from engine.transfer import Readback

NO_DRAFTER = "none"
_TOKENS_READ_PER_STEP = 1024
"""Tokens of all prompts that drafters may index per step: some milliseconds at most. A step that
computes more rows takes long enough to read as many."""


_Told: TypeAlias = tuple[ScheduledRequest, Part, Observation]


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
        self._proposing = Proposing(pool, vocab_size)
        self._granting = Granting(self._policies, cost, pool, self._shedding)
        self._drafting: set[Drafting] = set()
        """Those of all open requests."""
        self._unread: dict[Part, Request] = {}
        """Requests of which a drafter still reads the prompt, in order of arrival."""
        self._hidden = WaitingStates()
        self._unsettled: dict[str, Drafter] = {}
        """Drafters, by name, that may still write rows of requests that have left their blocks."""

    # --- a request comes and goes ---

    def open(self, request: Request) -> None:
        """Start drafting for a request, if it asked for a drafter."""
        wanted = request.params.speculative
        if wanted.draft_strategy == NO_DRAFTER:
            return
        drafter, name = self.drafters[wanted.draft_strategy], wanted.draft_strategy
        policy = self._policies[wanted.adaptive_depth]
        shape = shape_of(wanted, drafter, request.sampling.verification)
        weighs_cost = policy.weighs_cost and not wanted.min_speculative_tokens
        drafting = Drafting(*self._known(drafter, request), weighs_cost, policy, shape)
        request.drafting = drafting
        self._drafting.add(drafting)
        self._start(drafting, request, wanted.options)
        for each in _companions(drafter, bool(request.params.prediction_token_ids)):
            guest = Guest(*self._known(each, request, name), weighs_cost)
            drafting.guests.append(guest)
            self._start(guest, request, each.info.defaults())
        needs = [part.drafter.info.needs for part in drafting.parts]
        drafting.sees_all = any(each.hidden_rows or each.all_or_nothing for each in needs)

    def _known(
        self, drafter: Drafter, request: Request, host: str = ""
    ) -> tuple[Drafter, Ledger, Gain, Acceptance]:
        """Returns a drafter and what is known of it, for a new request that names it or ``host``."""
        verification = request.sampling.verification
        ledger = self._ledgers.of(drafter, host)
        gain = ledger.gain(Traffic.of(request.params, verification))
        acceptance = new_acceptance(
            self._estimator, drafter.info.name, verification, drafter.initial_acceptance
        )
        return drafter, ledger, gain, acceptance

    def _start(self, part: Part, request: Request, options: Options) -> None:
        params, request_id = request.params, request.request_id

        def start() -> None:
            part.drafter.open(request_id, request.token_ids, options, params.cache_salt)
            if params.prediction_token_ids:
                part.drafter.predict(request_id, params.prediction_token_ids)
            part.drafter.read_prompt(request_id, 0)

        part.is_open = succeeds([part], start)
        if part.is_open:
            self._unread[part] = request

    def num_usable_tokens(self, request: Request, block_ids: Sequence[int]) -> int:
        """Returns how many tokens of a cached prefix, which lies in these blocks, the request's drafter
        can build on: all, if it has none, or one that fails."""
        params, all_of_them = request.params, len(request.token_ids)
        drafting = drafting_if_any(request)
        name = params.speculative.draft_strategy
        if name == NO_DRAFTER or (drafting is not None and not drafting.is_asked):
            return all_of_them
        self._tell_hidden()
        drafter = self.drafters[name]

        def ask(drafter: Drafter) -> int:
            return drafter.num_usable_tokens(request.token_ids, block_ids, params.cache_salt)

        usable = counted(
            [] if drafting is None else [drafting], all_of_them, ask, drafter, otherwise=-1
        )
        if usable < 0:
            self._num_closed_failures += drafting is None
            return all_of_them
        for each in _companions(drafter, has_prediction=False):
            if self._ledgers.of(each, name).has_paid:
                usable = min(usable, counted([], all_of_them, ask, each, otherwise=usable))
        num_recomputed = len(block_ids) * self._pool.block_size - usable
        return usable if num_recomputed <= drafter.most_recomputed else all_of_them

    def leave_blocks(self, request: Request) -> None:
        """The request is about to give back its blocks. Its drafter has until ``settle`` to write into
        them what it still knows of the text, as far as somebody can find it there."""
        drafting = drafting_if_any(request)
        if drafting is None or not drafting.is_asked or not self._pool.enable_prefix_cache:
            self._hidden.forget(request.request_id)
            return
        self._tell_hidden()
        table = self._pool.block_table(request.request_id)
        for part in drafting.parts:
            if part.leaves_rows:
                leave = part.drafter.leave_blocks
                guarded([part], leave, request.request_id, request.token_ids, table)
                self._unsettled[part.name] = part.drafter

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
        self._hidden.forget(request.request_id)
        if drafting is None:
            return 0
        self._drafting.discard(drafting)
        drafting.policy.forget(request.request_id)
        for part in drafting.parts:
            self._unread.pop(part, None)
            part.ledger.forget(request.request_id)
            part.catch_up(request.request_id, request.token_ids)
            guarded([part], part.drafter.close, request.request_id)
        self._num_closed_failures += drafting.num_failures
        return drafting.num_failures

    @property
    def num_failures(self) -> int:
        """Failures of all drafters so far, but for guests'."""
        return self._num_closed_failures + sum(each.num_failures for each in self._drafting)

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
                self._granting.say_prices(asked, plan, self._ledgers.prompt_seconds)
                self._propose(asked, plan, readback, rate)
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
            if own.ledger not in resting or not _may_rest(each, own):
                awake.append(each)
            else:
                each.reason = "low_acceptance"
        return awake

    def _read_prompts(self, num_tokens: int) -> None:
        """Let drafters take in ``num_tokens`` more tokens of the requests that they have not read yet."""
        for part, request in list(self._unread.items()):
            if num_tokens <= 0:
                return
            read = part.drafter.read_prompt
            num_tokens -= counted([part], num_tokens, read, request.request_id, num_tokens)
            if num_tokens > 0:
                del self._unread[part]

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
        """Say what drafters want to see of the step: states in any case, the rest if they are told of it
        at once."""
        drafting = drafting_if_any(each.request)
        rests = drafting is not None and each.num_asked <= 0 and not drafting.sees_all
        if drafting is None or rests or not drafting.is_asked:
            return
        for part in drafting.parts:
            needs = part.drafter.info.needs
            if not part.is_asked:
                continue
            if needs.hidden_rows:
                each.hidden_layers = tuple(part.drafter.hidden_layers)
            if not part.is_told(each):
                continue
            each.wants_top_probs |= needs.top_probs
            if each.samples:
                ask = part.drafter.num_top_tokens
                num_top = counted([part], None, ask, each.request.request_id)
                each.num_top_tokens = max(each.num_top_tokens, min(num_top, self._vocab_size))

    # --- proposals ---

    def _chosen(self, drafting: Sequence[ScheduledRequest], plan: Plan) -> dict[str, list[Ask]]:
        """Returns by drafter what it is asked for; the others rest in this step."""
        groups: dict[str, list[Ask]] = {}
        for each in drafting:
            if each.num_asked > 0:
                own = drafting_of(each)
                groups.setdefault(own.name, []).append((each, own))
        asked: dict[str, list[Ask]] = {}
        for name, group in groups.items():
            chosen = self._ledgers.choose(group, plan)
            if chosen:
                asked[name] = [group[at] for at in chosen]
            for at in set(range(len(group))).difference(chosen):
                each = group[at][0]
                each.num_asked, each.reason = 0, "low_acceptance"
                each.max_nodes = min(each.max_nodes, self._num_forced(each.request))
        return asked

    def _propose(
        self, asked: dict[str, list[Ask]], plan: Plan, readback: Readback, rate: float
    ) -> None:
        """Have drafters draft, those with guests first: whether these are asked depends on that."""
        hosts = [each for group in asked.values() for each, _ in group if drafting_of(each).guests]
        if hosts:
            names = {drafting_of(each).name: None for each in hosts}
            first = {name: asked.pop(name) for name in names}
            self._proposing.propose(first, plan, readback, rate)
            for each, guest in self._ledgers.join(hosts, plan):
                each.shares[guest] = EMPTY
                asked.setdefault(guest.name, []).append((each, guest))
        if any(group[0][1].drafter.info.needs.hidden_rows for group in asked.values()):
            self._tell_hidden(plan)
        self._proposing.propose(asked, plan, readback, rate)
        for each in hosts:
            lay(each, drafting_of(each).shape.width)

    # --- after the forward ---

    def observe(self, plan: Plan, requests: Sequence[ScheduledRequest]) -> None:
        """Tell estimates, policies and drafters what the target said of requests that have sampled, and
        requests what their drafters took."""
        told: dict[str, list[_Told]] = {}
        with weighed(plan):
            for each in requests:
                drafting = drafting_if_any(each.request)
                if drafting is not None and drafting.is_asked:
                    for part, seen in self._learn(each, drafting, plan):
                        told.setdefault(part.name, []).append((each, part, seen))
            self._ledgers.wrote(plan, requests)
            for name, group in told.items():
                # Not retried one by one: a drafter may have learned from half of them already.
                whose = [part for _, part, _ in group]
                with timed(plan, name):
                    guarded(whose, whose[0].drafter.observe, [seen for _, _, seen in group])
        self._account(plan, told)

    def _learn(
        self, each: ScheduledRequest, drafting: Drafting, plan: Plan
    ) -> list[tuple[Part, Observation]]:
        """Policy, ledgers and estimates learn from a request's step. Returns what drafters are to hear of
        it at once, if anything."""
        request, outcome = each.request, each.outcome
        assert outcome is not None
        num_verified, num_accepted = 0, 0
        if each.draft.token_ids or each.num_asked > 0:
            drafting.see(each)
            num_verified, num_accepted = counts(each)
            drafting.has_verified |= num_verified > 0
        drafting.policy.observe(request.request_id, num_verified, num_accepted)
        self._ledgers.learn(each, drafting, plan, num_verified, num_accepted)
        drafting.has_rested |= each.num_asked <= 0 and not plan.is_plain
        # Who reads the prompt reads what is written meanwhile, too.
        is_told = drafting.is_told(each) or drafting in self._unread
        if not is_told:
            drafting.num_missed += len(outcome.emitted_token_ids)
            is_of_use = each.proposal.token_ids or drafting.acceptance.is_waiting
            if not is_of_use and not drafting.guests:
                return []
        seen = _observation(request, each, outcome)
        drafting.acceptance.observe(each.proposal, seen)
        told: list[tuple[Part, Observation]] = [(drafting, seen)] if is_told else []
        core = each.shares.get(drafting, EMPTY)
        for guest in drafting.guests:
            heard = guest.learn(each, seen, core, plan)
            if heard is not None:
                told.append((guest, heard))
            elif guest in self._unread:
                guest.catch_up(request.request_id, request.token_ids)
        return told

    def _account(self, plan: Plan, told: Mapping[str, Sequence[_Told]]) -> None:
        """Requests and the cost model hear what drafts took: their drafters' time and, of those who were
        asked, the engine's."""
        asked = {
            name: [(each, part) for each, part, _ in group if each.num_asked > 0]
            for name, group in told.items()
        }
        own = plan.speculation_seconds / max(1, sum(map(len, asked.values())))
        for name, group in told.items():
            seconds = plan.draft_seconds[name] + own * len(asked[name])
            for each, _, _ in group:
                each.draft_seconds += seconds / len(group)
            if asked[name]:
                self._ledgers.took(name, asked[name], seconds)

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
        by_drafter: dict[str, list[tuple[Part, HiddenRows]]] = {}
        for request, rows in self._hidden.take():
            reader = request.drafting.reader
            by_drafter.setdefault(reader.name, []).append((reader, rows))
        for name, group in by_drafter.items():
            whose = [part for part, _ in group]
            with nullcontext() if plan is None else timed(plan, name):
                guarded(whose, whose[0].drafter.observe_hidden, [rows for _, rows in group])


def _companions(drafter: Drafter, has_prediction: bool) -> Sequence[Drafter]:
    found = guarded([], lambda: [*drafter.companions(has_prediction)])
    return [each for each in found or () if isinstance(each, Drafter)]


def _may_rest(each: ScheduledRequest, drafting: Drafting) -> bool:
    """Returns whether the request's drafts are made only if they pay: what a grammar forces is free."""
    return drafting.weighs_cost and each.request.sampling.grammar is None


def _observation(request: Request, each: ScheduledRequest, outcome: Outcome) -> Observation:
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
    )
