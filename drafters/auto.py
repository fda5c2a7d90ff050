"""``auto``: asks every drafter that costs no forward, and drafts what they together think likeliest.

Members are the drafters that need nothing of the engine but token ids and top tokens, those of other
distributions among them, and beside them what the target nearly said last (``last_top.py``). Whether a
member is right is learned from the text that comes, whether its proposal was used or not, so choosing
costs no step of the target. Two things are learned: how likely a member's node is, by its feature
(``RequestAcceptance``), and which members to believe, by exponential weights under full information, as
in HedgeSpec (Liu et al., arXiv 2510.20064). Members that proposed nothing keep their weight (Freund et
al., STOC 1997).

The members' trees are laid over each other; a node's worth is the highest weighted survival that any of
them gives it. Members are asked in the order of their weights. Those that do not earn the time they take
sleep (``standing.py``), all but the best: they are neither asked nor told, and hear of what they missed
when they are tried, or when the request ends. For a chain nobody is asked any more once one of them fills
it with tokens that are as good as certain.

Where cost is not weighed nobody sleeps: for a tree all members propose, for a chain a member that of late
added nothing is left out but in every ``_ASKED_EVERY``-th step.

Besides, it takes one head, a drafter that reads the target's hidden states. It is the very drafter that
requests may name: ``auto`` opens its own requests in it under their ids and hands on what it is to know
of them, asked or not. After the members it is asked, once for all requests for which it is expected to
pay (``ledger.py``), and its drafts are laid over theirs as one more member's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from drafters.base import (
    REGISTERED,
    Drafter,
    DrafterContext,
    DrafterInfo,
    DrafterNeeds,
    DrafterUnavailableError,
    DraftRequest,
    HiddenRows,
    NewRequest,
    Observation,
    drafter,
)
from drafters.estimator import AcceptanceEstimator, RequestAcceptance
from drafters.last_top import LastTopDrafter
from drafters.ledger import Hope, Ledger, expected_tokens
from drafters.members import (
    FAILURES_BEFORE_SILENCE,
    HeadMember,
    Member,
    MemberStates,
    counted,
    rate,
    tried,
)
from drafters.overlay import Overlay, alone
from drafters.standing import Gain, Standing, Trials
from drafters.tree import EMPTY, DraftTree

logger = logging.getLogger(__name__)

_NO_MEMBERS = ("none", "grammar", "auto")
"""Two propose nothing, one asks all others."""
_ASKED_EVERY = 8
_CERTAIN = 0.8
"""Expected share of a chain that is accepted, from which nobody else is asked."""
_LEAST_SURVIVAL = 0.01
"""Where cost is weighed, no node of a chain is worth its row that is less likely to be accepted."""
_LEAST_GAIN = 0.01
"""Tokens per step that a member has to add to those asked before it, where cost is not weighed."""
_NEARLY_SAID = 0.1
"""The first belief in tokens that the target nearly said."""
_NO_HEAD = "none"
_FIRST = "suffix"
"""The member that is asked before anything is known of any: it finds nearly all that others find, too."""

_Begin: TypeAlias = Callable[[Sequence[DraftRequest]], Callable[[], list[DraftTree]]]
"""``Drafter.begin``, as far as its readback is known already."""


@dataclass(frozen=True, slots=True)
class AutoSettings:
    """The operator's settings."""

    head: str | None = field(
        default=None,
        metadata={
            "description": "The drafter with a trained head that auto asks where that pays: its name, or "
            "none; default: the first one that draft names, if any."
        },
    )


_Found: TypeAlias = list[tuple[Member, list[float]]]
"""Those that have drafted for a request, with the survivals of their nodes."""


@drafter
class AutoDrafter(Drafter):
    """See the module. A member that raises is left out, first for a step, then for the request."""

    info = DrafterInfo(
        "auto",
        "Lays the drafts of all drafters that need no model, and what the target nearly said, over each "
        "other and takes what is likeliest, by how often each of them has been right about this text.",
        cost="The CPU time of its members together; no model.",
    )
    settings = AutoSettings

    def __init__(
        self,
        members: Mapping[str, Drafter],
        vocab_size: int = 0,
        head: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``vocab_size`` as in ``DraftTree.validate``, ``head`` as in the settings; ``clock`` gives
        seconds. Raises ValueError without members, or with one that needs more than token ids and top
        tokens."""
        super().__init__()
        if not members:
            raise ValueError("auto needs at least one drafter to choose from")
        if not all(can_join(each.info) for each in members.values()):
            raise ValueError("auto chooses among drafters that need no model and no window")
        self._members = dict(members)
        self._vocab_size = vocab_size
        self._wanted_head, self._clock = head, clock
        self._head: Drafter | None = None
        self._asking = Ledger()
        self._standings: dict[str, Standing] = {}
        self._trials = Trials()
        self._tokens_per_second = 0.0
        """What was last said in a request for a draft."""
        self._last_top = LastTopDrafter()
        # Counts of hits and misses, no texts: they serve all requests and tenants.
        self.estimator = AcceptanceEstimator()
        self._nearly_said = AcceptanceEstimator(initial=_NEARLY_SAID)
        self._describe()

    def _describe(self) -> None:
        infos = [each.info for each in self._members.values()]
        self.info = replace(
            type(self).info,
            needs=DrafterNeeds(top_probs=any(each.needs.top_probs for each in infos)),
            takes_prediction=any(each.takes_prediction for each in infos),
        )
        if self._head is not None:
            own = self._head.info
            needs = replace(
                self.info.needs,
                hidden_rows=own.needs.hidden_rows,
                draft_slots=own.needs.draft_slots,
            )
            cost = (
                f"The CPU time of its members together, and where that pays a draft of {own.name}."
            )
            self.info = replace(self.info, needs=needs, cost=cost)
            self.hidden_layers, self.num_slots = self._head.hidden_layers, self._head.num_slots

    @classmethod
    def build(cls, context: DrafterContext) -> AutoDrafter:
        """Returns it over drafters of its own, of all kinds of the core that can be members and work
        here; of two of which one does all that the other does, that one."""
        members: dict[str, Drafter] = {}
        for name, kind in REGISTERED.items():
            if can_join(kind.info) and not kind.part_of:
                with suppress(DrafterUnavailableError):  # the registry says which and why
                    members[name] = kind.build(context)
        return cls(members, context.vocab_size, cls.settings_in(context).head)

    def meet(self, drafters: Mapping[str, Drafter]) -> None:
        """Those of other distributions become members as they are, and one head is taken. Raises
        DrafterUnavailableError where the head that is set is none of these."""
        self._members |= {
            name: each
            for name, each in drafters.items()
            if name not in REGISTERED and can_join(each.info)
        }
        self._head = self._head_of(drafters)
        self._describe()

    def _head_of(self, drafters: Mapping[str, Drafter]) -> Drafter | None:
        heads = {name: each for name, each in drafters.items() if is_head(each.info)}
        wanted = self._wanted_head
        if not wanted:
            return next(iter(heads.values()), None)
        if wanted == _NO_HEAD:
            return None
        if wanted not in heads:
            have = ", ".join(heads) or "none"
            raise DrafterUnavailableError(
                f"auto: the head {wanted!r} is not loaded; loaded heads: {have}"
            )
        return heads[wanted]

    def start(self, request: NewRequest) -> MemberStates:
        request_id, token_ids = request.request_id, request.token_ids
        members = [
            self._member(each, self.estimator.for_request(name))
            for name, each in self._members.items()
        ]
        nearly_said = self._nearly_said.for_request(self._last_top.info.name)
        members.append(self._member(self._last_top, nearly_said))
        members.sort(key=lambda each: -each.gain.tokens)  # stable among those nobody has met
        state = MemberStates(members, token_ids)
        state.send_to_sleep(self._tokens_per_second)
        if self._head is not None:
            name = self._head.info.name
            its = self.estimator.for_request(name)
            gain = Gain(Standing.first(False), 0.0)  # it has a count of its own
            state.head = HeadMember(self._head, its, gain, added=self._asking.gain())
        for member in state.everyone:
            options, begin = member.drafter.info.defaults(), member.drafter.open
            if not tried((member,), begin, request_id, token_ids, options, request.cache_salt):
                member.num_failures = FAILURES_BEFORE_SILENCE
        return state

    def _member(self, drafter: Drafter, acceptance: RequestAcceptance) -> Member:
        name = drafter.info.name
        standing = self._standings.setdefault(name, Standing.first(name == _FIRST))
        is_own = drafter is self._last_top or type(drafter) is REGISTERED.get(name)
        return Member(drafter, acceptance, Gain(standing, standing.gain), is_own)

    def predict(self, request_id: str, prediction_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        for member in self._states[request_id].members:
            if member.drafter.info.takes_prediction:
                member.wake()
                tried((member,), member.drafter.predict, request_id, prediction_token_ids)

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        """One member after the other; those that have read all are asked already."""
        num_read = 0
        for member in self._states[request_id].everyone:
            if member.is_asked and (num_read < num_tokens or not num_tokens):
                left, read = num_tokens - num_read, member.drafter.read_prompt
                num_read += counted((member,), left, read, request_id, left)
        return num_read

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""

        def begin(asks: Sequence[DraftRequest]) -> Callable[[], list[DraftTree]]:
            assert self._head is not None
            return partial(self._head.propose, asks)

        return self._begin(requests, begin)()

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """See ``Drafter``. Raises KeyError for a request that is not open."""

        def begin(asks: Sequence[DraftRequest]) -> Callable[[], list[DraftTree]]:
            assert self._head is not None
            return self._head.begin(asks, readback)

        return self._begin(requests, begin)

    def _begin(
        self, requests: Sequence[DraftRequest], begin: _Begin
    ) -> Callable[[], list[DraftTree]]:
        """Lets the members draft and begins the head's drafts, by ``begin``, where they are expected to
        pay; returns what makes the trees of all."""
        found = [self._ask_members(request) for request in requests]
        wanted = self._choose(requests, found) if self._head is not None else {}
        asks = [requests[at] for at in wanted]
        take = self._ask_head(asks, [*wanted.values()], begin) if asks else None

        def finish() -> list[DraftTree]:
            if take is not None:
                take()
            for at, head in wanted.items():
                if head.tree.token_ids:
                    found[at].append((head, head.acceptance.survivals(head.tree)))
            return [self._lay(*each) for each in zip(requests, found, strict=True)]

        return finish

    def _ask_members(self, request: DraftRequest) -> _Found:
        state, depth = self._states[request.request_id], request.depth
        is_chain = request.shape.width == 1
        state.depth = depth
        state.tokens_per_second = self._tokens_per_second = request.tokens_per_second
        weighs_cost = request.tokens_per_second > 0
        woken = state.woken(self._trials) if weighs_cost else None
        least = _LEAST_SURVIVAL if weighs_cost else 0.0
        asks_all = not weighs_cost and (not is_chain or state.num_steps % _ASKED_EVERY == 0)
        state.num_steps += 1
        found: _Found = []
        is_certain = False
        for member in state.members:
            if weighs_cost:
                wanted = member is woken or (member.is_awake and not is_certain)
            else:
                member.is_awake = True
                wanted = asks_all or (not is_certain and member.gain.tokens >= _LEAST_GAIN)
            if not wanted or not member.is_asked:
                continue
            member.was_asked = True
            started = self._clock()
            if member.num_missed:
                member.catch_up(request.request_id, request.token_ids)
            tried((member,), self._ask, member, request)
            member.seconds = self._clock() - started
            if member.tree.token_ids:
                survivals = member.acceptance.survivals(member.tree, least)
                if len(survivals) < len(member.tree):
                    member.tree = member.tree.subtree(range(len(survivals)))
                found.append((member, survivals))
                is_certain |= is_chain and sum(survivals) >= _CERTAIN * depth
        return found

    def _lay(self, request: DraftRequest, found: _Found) -> DraftTree:
        """Returns the draft of all that were found."""
        depth, width = request.depth, request.shape.width
        if width == 1 and len(found) == 1 and found[0][0].tree.is_chain():
            return alone(found[0][0].tree, found[0][1], depth)
        overlay = Overlay()
        most = max((member.weight for member, _ in found), default=1.0)
        for member, survivals in found:
            weight = member.weight / most
            overlay.lay(member.tree, [weight * each for each in survivals])
        if width == 1:
            return overlay.chain(depth)
        return overlay.tree(request.max_nodes, width, depth)

    def _ask(self, member: Member, request: DraftRequest) -> None:
        (tree,) = member.drafter.propose([request])
        if not member.is_trusted:
            tree.validate(self._vocab_size)
        member.tree = tree

    def _take(self, members: Sequence[Member], trees: Sequence[DraftTree]) -> None:
        taken = list(zip(members, trees, strict=True))
        # Here it costs this member's draft; found in what all have drafted it would cost everybody's.
        for member, tree in taken:
            if not member.is_trusted:
                tree.validate(self._vocab_size)
        for member, tree in taken:
            member.tree = tree

    # The head

    def _head_in(self, request_id: str) -> HeadMember | None:
        """Returns the head's part in a request, if there is one and it did not fail too often. Raises
        KeyError for a request that is not open."""
        head: HeadMember | None = self._states[request_id].head
        return head if head is not None and head.is_asked else None

    def _choose(
        self, requests: Sequence[DraftRequest], found: Sequence[_Found]
    ) -> dict[int, HeadMember]:
        """Returns the indices of the requests that the head is asked for, and its parts in them; none for
        which free drafts are as good as certain."""
        able: list[tuple[int, HeadMember]] = []
        hopes: list[Hope] = []
        for at, (request, each) in enumerate(zip(requests, found, strict=True)):
            head = self._head_in(request.request_id)
            if head is None:
                continue
            expected = [expected_tokens(member.tree, survivals) for member, survivals in each]
            head.num_free = max(expected, default=0.0)
            if head.num_free < _CERTAIN * request.depth:
                able.append((at, head))
                hopes.append(Hope(head.added.expect(head.num_free), request.tokens_per_second))
        return dict(able[index] for index in self._asking.choose(hopes))

    def _ask_head(
        self, asks: Sequence[DraftRequest], heads: Sequence[HeadMember], begin: _Begin
    ) -> Callable[[], None]:
        """Begins the drafts of one batch. What is returned takes them, of each request alone where that
        goes wrong."""
        started = self._clock()
        for head in heads:
            head.tree, head.was_asked = EMPTY, True
        blamed = heads if len(heads) == 1 else ()
        begun: list[Callable[[], list[DraftTree]]] = []
        tried(blamed, lambda: begun.append(begin(asks)))

        def finish() -> None:
            if begun and tried(blamed, lambda: self._take(heads, begun[0]())):
                if any(head.tree.token_ids for head in heads):
                    self._asking.took(len(heads), self._clock() - started)
            elif len(heads) > 1:
                for head, ask in zip(heads, asks, strict=True):
                    tried((head,), self._ask, head, ask)

        return finish

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Raises KeyError for a request that is not open."""
        told = [(head, each) for each in rows if (head := self._head_in(each.request_id))]
        if told and self._head is not None:
            heads = [head for head, _ in told]
            tried(heads, self._head.observe_hidden, [each for _, each in told])

    def num_usable_tokens(
        self, token_ids: Sequence[int], block_ids: Sequence[int], cache_salt: str
    ) -> int:
        """As many as the head can use; all if it fails."""
        if self._head is None:
            return len(token_ids)
        ask, most = self._head.num_usable_tokens, len(token_ids)
        return counted((), most, ask, token_ids, block_ids, cache_salt, otherwise=most)

    def leave_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """Raises KeyError for a request that is not open."""
        head = self._head_in(request_id)
        if head is not None:
            tried((head,), head.drafter.leave_blocks, request_id, token_ids, block_ids)

    def settle(self) -> None:
        if self._head is not None:
            tried((), self._head.settle)

    # What all are told

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for seen in observations:
            state = self._states[seen.request_id]
            emitted = seen.emitted_token_ids
            has_rated = rate(state.asked, emitted, state.depth)
            for member in state.everyone:
                if member.tree.token_ids or member.acceptance.is_waiting:
                    member.acceptance.label_against(member.tree, emitted)
                if member.is_awake and not member.num_missed:
                    self._tell(member, seen)
                else:
                    member.num_missed += len(emitted)
            if has_rated:
                state.members.sort(key=_charge)
            if state.tokens_per_second > 0:
                state.send_to_sleep(state.tokens_per_second)
                self._trials.wrote(len(emitted))
            self._asking.wrote(len(emitted))

    def _tell(self, member: Member, seen: Observation) -> None:
        told, member.tree = member.view(seen), EMPTY
        if not member.is_asked:
            return
        started = self._clock()
        tried((member,), member.drafter.observe, [told])
        if member.seconds:
            member.gain.standing.took(member.seconds + self._clock() - started)
            member.seconds = 0.0

    def num_top_tokens(self, request_id: str) -> int:
        """As many as the member that wants most. Raises KeyError for a request that is not open."""
        most = 0
        for each in self._states[request_id].members:
            if each.is_awake and each.is_asked:
                most = max(most, counted((each,), None, each.drafter.num_top_tokens, request_id))
        return most

    def finish(self, request_id: str, state: MemberStates) -> None:
        for member in state.everyone:
            if member.is_asked:
                member.catch_up(request_id, state.token_ids)
            tried((member,), member.drafter.close, request_id)


_charge = attrgetter("charge")


def can_join(info: DrafterInfo) -> bool:
    """Whether a drafter may be a member of ``auto``."""
    needs = info.needs
    needs_more = needs.hidden_rows or needs.draft_slots or needs.all_or_nothing or needs.draft_model
    return info.name not in _NO_MEMBERS and not needs_more


def is_head(info: DrafterInfo) -> bool:
    """Whether a drafter may be the head of ``auto``: it reads the target's hidden states."""
    return info.needs.hidden_rows and not info.needs.all_or_nothing and info.name not in _NO_MEMBERS
