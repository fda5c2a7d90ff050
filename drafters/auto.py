"""``auto``: copies, the target's own top tokens and what guests draft, in one tree of the likeliest.

Its core (``drafters/merged``) is compiled, and asked in every step. It grows one tree, best first: after
each node it guesses what followed the text's last tokens before, in the request and in the tenant's
finished ones (``drafters/copying``), what the target found likeliest after the last tokens, what it
nearly said of late and what it says most often. How likely a guess is, is learned from the text that
comes, whether the guess was used or not.

Guests are asked besides, where that is expected to pay (``ledger.py``): a head, a drafter that reads the
target's hidden states; drafters of other distributions; ``prediction`` where a request brings one. What
they draft is laid over the core's tree. A head is the very drafter that requests may name: ``auto`` opens
its own requests in it under their ids and hands on what it is to know of them, asked or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

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
    RequestState,
    drafter,
)
from drafters.containment import counted, guarded, succeeds
from drafters.copying.prediction import PredictionDrafter
from drafters.estimator import AcceptanceEstimator
from drafters.guests import Guest
from drafters.ledger import Hope, Ledger, expected_tokens
from drafters.overlay import Overlay
from drafters.tree import EMPTY, DraftTree

if TYPE_CHECKING:
    from drafters.merged.merging import MergedText

_CERTAIN = 0.8
"""Expected share of a draft's depth that is accepted, from which no guest is asked."""
_NO_HEAD = "none"

_Begin: TypeAlias = Callable[[Drafter, Sequence[DraftRequest]], Callable[[], list[DraftTree]]]
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


@dataclass(slots=True)
class AutoState(RequestState):
    """One request. ``tree``: what its core has drafted in this step. ``is_read``: all have read the
    prompt."""

    token_ids: Sequence[int]
    core: MergedText
    guests: list[Guest]
    tree: DraftTree = EMPTY
    is_read: bool = True


@drafter
class AutoDrafter(Drafter):
    """See the module. A guest that raises is left out, first for a step, then for the request."""

    info = DrafterInfo(
        "auto",
        "Copies what followed the last tokens before, recycles what the target found likely there, and "
        "drafts what is likeliest of it all, as a tree or a chain; asks a trained head, too, where that "
        "pays.",
        cost="Per step and request some 30 microseconds; the target's eight likeliest tokens per row.",
        takes_prediction=True,
    )
    settings = AutoSettings
    auto_width = 8
    row_worth = 0.015
    most_recomputed = 64
    fetches_hidden = True

    def __init__(
        self,
        guests: Mapping[str, Drafter] | None = None,
        vocab_size: int = 0,
        head: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``vocab_size`` as in ``DraftTree.validate``, ``head`` as in the settings; ``clock`` gives
        seconds. Raises ValueError for a guest that needs more than token ids and top tokens."""
        # Imported where it is used: numba takes a while.
        from drafters.merged.merging import Merging

        super().__init__()
        self._guests = dict(guests or {})
        if not all(can_join(each.info) for each in self._guests.values()):
            raise ValueError("guests of auto need no model and no window")
        self._merging = Merging()
        self._prediction = PredictionDrafter()
        self._vocab_size = vocab_size
        self._wanted_head, self._clock = head, clock
        self._head: Drafter | None = None
        self._ledgers: dict[str, Ledger] = {}
        # Counts of hits and misses, no texts: they serve all requests and tenants.
        self.estimator = AcceptanceEstimator()

    @classmethod
    def build(cls, context: DrafterContext) -> AutoDrafter:
        return cls(None, context.vocab_size, cls.settings_in(context).head)

    def meet(self, drafters: Mapping[str, Drafter]) -> None:
        """Those of other distributions become guests, and one head is taken. Raises
        DrafterUnavailableError where the head that is set is none of these."""
        self._guests |= {
            name: each
            for name, each in drafters.items()
            if name not in REGISTERED and can_join(each.info)
        }
        needs = DrafterNeeds(
            top_probs=any(each.info.needs.top_probs for each in self._guests.values())
        )
        self.info = replace(self.info, needs=needs)
        self._head = self._head_of(drafters)
        if self._head is None:
            return
        own = self._head.info
        needs = replace(needs, hidden_rows=own.needs.hidden_rows, draft_slots=own.needs.draft_slots)
        cost = f"{self.info.cost[:-1]}; where that pays a draft of {own.name}."
        self.info = replace(self.info, needs=needs, cost=cost)
        self.hidden_layers, self.num_slots = self._head.hidden_layers, self._head.num_slots

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

    def start(self, request: NewRequest) -> AutoState:
        core = self._merging.open(request.token_ids, request.cache_salt)
        state = AutoState(request.token_ids, core, [])
        for each in (*self._guests.values(), *([] if self._head is None else [self._head])):
            self._invite(state, each, request)
        return state

    def _invite(self, state: AutoState, drafter: Drafter, request: NewRequest) -> Guest:
        name = drafter.info.name
        ledger = self._ledger(name)
        guest = Guest(drafter, ledger.gain(), ledger, self.estimator.for_request(name))
        state.guests.append(guest)
        options = drafter.info.defaults()
        told = (request.request_id, request.token_ids, options, request.cache_salt)
        guest.is_open = succeeds((guest,), drafter.open, *told)
        return guest

    def _ledger(self, guest: str) -> Ledger:
        return self._ledgers.setdefault(guest, Ledger())

    def predict(self, request_id: str, prediction_token_ids: Sequence[int]) -> None:
        """Raises KeyError for a request that is not open."""
        state = self._states[request_id]
        self._invite(state, self._prediction, NewRequest(request_id, state.token_ids, {}, ""))
        for guest in state.guests:
            if guest.drafter.info.takes_prediction:
                guarded((guest,), guest.drafter.predict, request_id, prediction_token_ids)

    def read_prompt(self, request_id: str, num_tokens: int) -> int:
        """The core, then one guest after the other."""
        state: AutoState = self._states[request_id]
        state.is_reading = False  # nobody waits for one that fails to read
        num_read = state.core.read_prompt(num_tokens)
        state.is_reading = num_read == num_tokens
        for guest in state.guests:
            if guest.is_asked and (num_read < num_tokens or not num_tokens):
                left, read = num_tokens - num_read, guest.drafter.read_prompt
                num_read += counted((guest,), left, read, request_id, left)
        state.is_read = num_read < num_tokens
        return num_read

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Raises KeyError for a request that is not open."""
        return self._begin(requests, lambda guest, asks: partial(guest.propose, asks))()

    def begin(
        self, requests: Sequence[DraftRequest], readback: Any
    ) -> Callable[[], list[DraftTree]]:
        """See ``Drafter``. Raises KeyError for a request that is not open."""
        return self._begin(requests, lambda guest, asks: guest.begin(asks, readback))

    def _begin(
        self, requests: Sequence[DraftRequest], begin: _Begin
    ) -> Callable[[], list[DraftTree]]:
        """Has the core draft and begins the guests' drafts, by ``begin``, where they are expected to pay;
        returns what makes the trees of all."""
        self.weighed_seconds = 0.0
        self._merging.advance()
        by_guest: dict[Drafter, list[tuple[DraftRequest, Guest]]] = {}
        for request in requests:
            state = self._states[request.request_id]
            is_asked = request.depth > 0 and not state.is_reading
            state.tree = state.core.propose(request) if is_asked else EMPTY
            if not state.guests or request.depth < 1:
                continue
            num_free = expected_tokens(state.tree, state.tree.survivals) if state.tree else 0.0
            for guest in state.guests:
                guest.num_free = num_free
                if guest.is_asked and num_free < _CERTAIN * request.depth:
                    by_guest.setdefault(guest.drafter, []).append((request, guest))
        takes = [
            take
            for drafter, able in by_guest.items()
            if (take := self._ask(drafter, able, begin)) is not None
        ]

        def finish() -> list[DraftTree]:
            for take in takes:
                take()
            return [self._lay(request) for request in requests]

        return finish

    def _ask(
        self, drafter: Drafter, able: Sequence[tuple[DraftRequest, Guest]], begin: _Begin
    ) -> Callable[[], None] | None:
        """Begins a guest's drafts of one batch, for the requests where they are expected to pay. What is
        returned takes them, of each request alone where that goes wrong."""
        hopes = [
            Hope(
                guest.gain.expect(guest.num_free),
                request.tokens_per_second,
                has_rested=guest.has_rested,
            )
            for request, guest in able
        ]
        ledger = able[0][1].ledger
        chosen = [able[at] for at in ledger.choose(hopes)]
        if not chosen:
            return None
        asks, guests = [ask for ask, _ in chosen], [guest for _, guest in chosen]
        started = self._clock()
        if drafter is self._head:
            self.fetch_hidden()
        for ask, guest in chosen:
            guest.catch_up(ask.request_id, ask.token_ids)
            guest.was_asked = True
        blamed = guests if len(guests) == 1 else ()
        begun = guarded(blamed, begin, drafter, asks)
        spent = self._clock() - started

        def finish() -> None:
            started = self._clock()
            if begun is not None and succeeds(blamed, lambda: self._take(guests, begun())):
                seconds = spent + self._clock() - started
                if any(guest.tree.token_ids for guest in guests):
                    ledger.took(len(guests), seconds, any(guest.has_rested for guest in guests))
            elif len(guests) > 1:
                for ask, guest in chosen:
                    guarded(
                        (guest,), lambda g, a: self._take([g], drafter.propose([a])), guest, ask
                    )
            self.weighed_seconds += spent + self._clock() - started

        return finish

    def _take(self, guests: Sequence[Guest], trees: Sequence[DraftTree]) -> None:
        taken = list(zip(guests, trees, strict=True))
        # Here it costs this guest's draft; found in what all have drafted it would cost everybody's.
        for _, tree in taken:
            tree.validate(self._vocab_size)
        for guest, tree in taken:
            guest.tree = tree

    def _lay(self, request: DraftRequest) -> DraftTree:
        """Returns the draft of the core and of all guests that have drafted."""
        state: AutoState = self._states[request.request_id]
        drafted = [guest for guest in state.guests if guest.tree.token_ids]
        if not drafted:
            return state.tree
        overlay = Overlay()
        overlay.lay(state.tree, state.tree.survivals)
        for guest in drafted:
            overlay.lay(guest.tree, guest.acceptance.survivals(guest.tree))
        return overlay.draft(request.max_nodes, request.shape.width, request.depth)

    # What a head is told besides

    def _head_in(self, request_id: str) -> Guest | None:
        """Returns the head's part in a request, if there is one and it did not fail too often. Raises
        KeyError for a request that is not open."""
        guests: list[Guest] = self._states[request_id].guests
        return next((each for each in guests if each.drafter is self._head and each.is_asked), None)

    def observe_hidden(self, rows: Sequence[HiddenRows]) -> None:
        """Raises KeyError for a request that is not open."""
        told = [(head, each) for each in rows if (head := self._head_in(each.request_id))]
        if told and self._head is not None:
            heads = [head for head, _ in told]
            guarded(heads, self._head.observe_hidden, [each for _, each in told])

    def num_usable_tokens(
        self, token_ids: Sequence[int], block_ids: Sequence[int], cache_salt: str
    ) -> int:
        """As many as the head can use; all if it fails, or has not paid of late."""
        if self._head is None or not self._ledger(self._head.info.name).pays:
            return len(token_ids)
        ask, most = self._head.num_usable_tokens, len(token_ids)
        return counted((), most, ask, token_ids, block_ids, cache_salt, otherwise=most)

    def leave_blocks(
        self, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int]
    ) -> None:
        """A head that does not pay, or never drafted here, computes nothing for others to find. Raises
        KeyError for a request that is not open."""
        head = self._head_in(request_id)
        if head is not None and head.has_drafted and head.ledger.pays:
            guarded((head,), head.drafter.leave_blocks, request_id, token_ids, block_ids)

    def settle(self) -> None:
        if self._head is not None:
            guarded((), self._head.settle)

    # What all are told

    def observe(self, observations: Sequence[Observation]) -> None:
        """Raises KeyError for a request that is not open."""
        for seen in observations:
            state = self._states[seen.request_id]
            if not state.is_reading:
                state.core.observe(seen)
            if state.guests:
                for guest in state.guests:
                    guest.hear(seen, state.tree, state.is_read)
                for ledger in {guest.ledger for guest in state.guests}:
                    ledger.wrote(len(seen.emitted_token_ids))
            state.tree = EMPTY

    def num_top_tokens(self, request_id: str) -> int:
        """As many as the core wants, or the guest that wants most. Raises KeyError for a request that is
        not open."""
        state: AutoState = self._states[request_id]
        most = 0 if state.is_reading else state.core.num_top_tokens
        for each in state.guests:
            if each.is_asked:
                most = max(most, counted((each,), None, each.drafter.num_top_tokens, request_id))
        return most

    def finish(self, request_id: str, state: AutoState) -> None:
        state.core.finish()
        for guest in state.guests:
            guest.catch_up(request_id, state.token_ids)
            guarded((guest,), guest.drafter.close, request_id)


def can_join(info: DrafterInfo) -> bool:
    """Whether a drafter may be a guest of ``auto``, beside a head."""
    needs = info.needs
    needs_more = needs.hidden_rows or needs.draft_slots or needs.all_or_nothing or needs.draft_model
    return info.name != "auto" and not needs_more


def is_head(info: DrafterInfo) -> bool:
    """Whether a drafter may be the head of ``auto``: it reads the target's hidden states."""
    return info.needs.hidden_rows and not info.needs.all_or_nothing and info.name != "auto"
