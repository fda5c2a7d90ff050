"""The engine's ledgers, one for each drafter, and for each as whose guest it is asked: which requests are
asked in a step, by what drafts of their kind of traffic have brought.

Granting decides after a draft is made, when its price is already paid. What counts is what was
accepted, less the tokens that the batch could have written while the draft's rows were verified,
against the time that the call takes. Drafts whose rows are there for later steps (the window of
Lookahead, the guesses of Jacobi) are granted whole or not at all: there, the rows of the last draft are
weighed at the price of this step's, and a trial lasts for as many steps as a window needs before it
yields n-grams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from drafters.base import Drafter
from drafters.ledger import Hope, Ledger
from engine.request.params import GenerationRequest
from engine.schedule.request import Plan, ScheduledRequest
from engine.speculation.cost import CostModel
from engine.speculation.drafting import Drafting, drafting_of
from engine.speculation.parts import Ask, Part, able_guests

_TRIAL_STEPS_OF_WINDOWS = 6
_MOST_BEHIND = 64
"""Calls without a draft in which a model is believed to take in a text."""
_LEAST_DRAFTED = 16
"""Steps with drafts before one without."""
_PLAIN_SHARE = 0.002
"""Steps without drafts cost no more than this part of what is written."""


class Traffic(NamedTuple):
    """A kind of request: what drafting brings is remembered for each. ``cache_salt`` names the tenant, so
    that nothing remembered of one steers another. ``heat`` and ``length`` are buckets of temperature and
    of the prompt's length."""

    cache_salt: str = ""
    verification: str = "match"
    heat: int = 0
    length: int = 0

    @classmethod
    def of(cls, params: GenerationRequest, verification: str) -> Traffic:
        """Buckets: greedy, up to 0.5, up to 0.85, above; lengths by powers of four. ``verification``: of
        what is sampled (a greedy request is always matched)."""
        return cls(
            params.cache_salt,
            verification,
            sum(params.sampling.temperature > edge for edge in (0.0, 0.5, 0.85)),
            len(params.prompt_token_ids).bit_length() // 2,
        )


@dataclass(slots=True)
class _Drafted:
    """Steps with drafts since the last one without, the tokens that they wrote, and how many of these
    would not have been written in the same time without drafts."""

    steps: int = 0
    tokens: float = 0.0
    gained: float = 0.0


class Ledgers:
    """Those of an engine's drafters, by their names and their hosts'."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._ledgers: dict[tuple[str, str], Ledger] = {}
        self._plain_seconds = self.prompt_seconds = self._rate = 0.0
        """Seconds of the step without drafts, those of its prompts among them, and tokens per second
        without either."""
        self._row_tokens = 0.0
        """Tokens that are not written while a row is verified, if each request drafts one."""
        self._drafted = _Drafted()

    def of(self, drafter: Drafter, host: str = "") -> Ledger:
        """Returns the ledger of a drafter that requests name, or that is asked beside ``host``."""
        name, is_whole = drafter.info.name, drafter.info.needs.all_or_nothing
        ledger = self._ledgers.get((name, host))
        if ledger is None:
            seconds = partial(self._cost.draft_seconds, name)
            ledger = Ledger(seconds, _TRIAL_STEPS_OF_WINDOWS if is_whole else 1)
            self._ledgers[name, host] = ledger
        return ledger

    def took(self, drafter: str, asked: Sequence[Ask], seconds: float) -> None:
        """A call of the drafter for these took so long."""
        rested = {part.ledger for _, part in asked if part.has_rested}
        for ledger in rested:
            ledger.took(len(asked), seconds)
        if not rested:
            self._cost.observe_draft(drafter, len(asked), seconds)
        for each, part in asked:
            # A model that drafted nothing has not taken in all that it missed, or never can.
            may_lack = part.drafter.info.needs.draft_slots and part.num_behind < _MOST_BEHIND
            is_behind = part.has_rested and may_lack and not part.draft_in(each)
            part.num_behind = part.num_behind + 1 if is_behind else 0
            part.has_rested = is_behind

    def begin_step(self, plan: Plan) -> float:
        """Returns what the step would write per second without drafts and prompts: while these
        are read little is written, but a token that is written meanwhile saves no more than others do."""
        self._plain_seconds = self._seconds(plan, 0)
        context, number = plan.num_context_tokens, len(plan.scheduled)
        seconds = self._cost.step_seconds(plan.num_sampling, context, number)
        self.prompt_seconds = max(0.0, self._plain_seconds - seconds)
        self._rate = plan.num_sampling / (self._plain_seconds - self.prompt_seconds)
        self._row_tokens = self._tokens(plan, plan.num_sampling) / plan.num_sampling
        return self._rate

    def _seconds(self, plan: Plan, num_drafts: int) -> float:
        seconds = self._cost.step_seconds(
            plan.num_rows + num_drafts, plan.num_context_tokens, len(plan.scheduled), num_drafts > 0
        )
        # Drafts that the device makes do not wait for the host.
        return seconds - self._cost.waiting_seconds * (plan.is_ahead and num_drafts > 0)

    def _tokens(self, plan: Plan, num_drafts: int) -> float:
        """Returns the tokens that are not written while so many drafts are verified."""
        # Steps with drafts may be believed to be the faster ones.
        return self._rate * max(0.0, self._seconds(plan, num_drafts) - self._plain_seconds)

    def rest(self, drafting: Iterable[Drafting], num_sampling: int) -> set[Ledger]:
        """Returns the ledgers of drafters that nobody is asked for in this step. ``drafting``: of all
        requests that weigh what a draft costs, among ``num_sampling`` that get a token."""
        counts = Counter(each.ledger for each in drafting)
        return {
            ledger
            for ledger, number in counts.items()
            if ledger.rests(number, num_sampling - number)
        }

    def wants_plain(self, plan: Plan) -> bool:
        """Returns whether the step is to have no drafts. All gains are measured against such steps,
        and where drafts always seem to pay there are none: a cost model that was misled while the machine
        was slow would never see that it is wrong."""
        seen = self._drafted
        may_cost = _PLAIN_SHARE * seen.tokens * seen.steps
        is_due = seen.steps >= _LEAST_DRAFTED and seen.gained <= may_cost
        return is_due and plan.num_rows == plan.num_sampling

    def wrote(self, plan: Plan, requests: Sequence[ScheduledRequest]) -> None:
        """The step was read; ``requests``: those that have sampled."""
        num_drafts, seen = sum(len(each.draft) for each in plan.scheduled), self._drafted
        if num_drafts:
            num_accepted = sum(each.outcome.num_accepted for each in requests if each.outcome)
            seen.steps, seen.tokens = seen.steps + 1, seen.tokens + len(requests) + num_accepted
            seen.gained += num_accepted - num_drafts * plan.row_tokens
        elif seen.steps and plan.num_rows == plan.num_sampling:
            self._drafted = _Drafted()

    def choose(self, group: Sequence[Ask], plan: Plan) -> list[int]:
        """Returns the indices of those of one ledger that are to be asked."""
        return group[0][1].ledger.choose([self._hope(*each, plan) for each in group])

    def join(self, hosts: Sequence[ScheduledRequest], plan: Plan) -> list[Ask]:
        """Returns which guests are to be asked for requests whose hosts have drafted."""
        able: dict[Ledger, list[Ask]] = {}
        for each in hosts:
            host = drafting_of(each)
            for ask in able_guests(each, host, host.guests):
                able.setdefault(ask[1].ledger, []).append(ask)
        return [group[at] for group in able.values() for at in self.choose(group, plan)]

    def _hope(self, each: ScheduledRequest, part: Part, plan: Plan) -> Hope:
        rows, row_tokens = 0.0, self._row_tokens
        if not part.weighs_cost:
            return Hope(0.0, 0.0)
        if part.drafter.info.needs.all_or_nothing:
            rows, row_tokens = self._tokens(plan, part.num_whole), 0.0
        gain = part.gain.expect(part.num_free, row_tokens) - rows
        rows = max(rows, part.row_tokens)
        return Hope(gain, self._rate, rows, each.request.request_id, part.has_rested)

    def granted(self, plan: Plan) -> None:
        """The drafts of the step are those that it verifies."""
        num_drafts = sum(len(each.draft) for each in plan.scheduled)
        if num_drafts:
            plan.row_tokens = self._tokens(plan, num_drafts) / num_drafts
        elif (waiting := self._cost.waiting_seconds) and not plan.is_ahead:
            num_asked = sum(each.num_asked > 0 for each in plan.scheduled)
            plan.waiting_tokens = self._rate * waiting / max(1, num_asked)

    def learn(
        self,
        each: ScheduledRequest,
        drafting: Drafting,
        plan: Plan,
        num_verified: int,
        num_accepted: int,
    ) -> None:
        """A request's part of the step was verified. The next one may be planned already."""
        assert each.outcome is not None
        drafting.ledger.wrote(len(each.outcome.emitted_token_ids))
        if each.num_asked <= 0:
            return
        if drafting.is_whole:
            drafting.num_whole = num_verified or drafting.num_whole
            if num_verified:
                drafting.gain.observe(num_accepted)
            return
        drafting.row_tokens = num_verified * plan.row_tokens
        drafting.gain.observe(num_accepted - drafting.row_tokens - plan.waiting_tokens)
