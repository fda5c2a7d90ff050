"""Drafters' parts in a request: that of the one it names, its host, and those of guests beside it.

Guests are asked after the host has drafted, for what they bring beyond that, and all drafts are laid
over each other. A guest learns from its own draft, as far as the text has reached it, not from the tree
that was verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import TypeAlias, TypeVar

from drafters.base import Drafter, Observation
from drafters.containment import guarded
from drafters.ledger import Gain, Ledger, expected_tokens
from drafters.tree import EMPTY, DraftTree
from engine.schedule.request import Plan, ScheduledRequest
from engine.speculation.acceptance import Acceptance
from engine.speculation.overlay import Overlay

_FAILURES_BEFORE_SILENCE = 8
"""A drafter that failed this often for a request is not asked again for it."""
_CERTAIN = 0.8
"""Expected share of a host's draft's depth that is accepted, from which no guest is asked."""
_Number = TypeVar("_Number", int, float)


@dataclass(slots=True, eq=False)
class Part:
    """``ledger``: chooses the requests that the drafter is asked for. ``gain``: what its drafts bring to
    this one. ``weighs_cost``: it is asked only where that is expected to be more than they take."""

    drafter: Drafter
    ledger: Ledger
    gain: Gain
    acceptance: Acceptance
    weighs_cost: bool
    num_free: float = field(default=0.0, init=False)
    """The tokens that the draft beside which it is asked was expected to bring."""
    num_before: int = field(default=0, init=False)
    """The nodes of that draft which are worth their rows."""
    row_tokens: float = field(default=0.0, init=False)
    """The tokens that the engine did not write while it verified the rows of the last draft."""
    num_whole: int = field(default=0, init=False)
    """The rows of the last draft, where such are granted whole or not at all."""
    num_failures: int = field(default=0, init=False)
    num_missed: int = field(default=0, init=False)
    """Tokens at the end of the text that the drafter was not told of yet."""
    has_rested: bool = field(default=True, init=False)
    """It was not asked in the step before, and has to take in what has come since."""
    num_behind: int = field(default=0, init=False)
    """Calls since then that have brought nothing."""
    is_open: bool = field(default=True, init=False)
    """False: the drafter could not start the request."""

    @property
    def name(self) -> str:
        return self.drafter.info.name

    @property
    def is_asked(self) -> bool:
        return self.is_open and self.num_failures < _FAILURES_BEFORE_SILENCE

    @property
    def leaves_rows(self) -> bool:
        """Whether it computes something for others to find when the request leaves its blocks."""
        return self.is_asked

    def draft_in(self, each: ScheduledRequest) -> DraftTree:
        """Returns what the drafter itself has proposed in a step."""
        return each.shares.get(self, each.proposal)

    def prices_in(self, each: ScheduledRequest) -> Sequence[float]:
        """Returns the prices of its nodes, beside those that others have drafted."""
        return each.row_prices[self.num_before :] or each.row_prices[-1:]

    def catch_up(self, request_id: str, text: Sequence[int]) -> None:
        """Tells the drafter what it has missed, as one long draft that was accepted."""
        num_missed, self.num_missed = self.num_missed, 0
        if num_missed and self.is_asked:
            seen = Observation.of_missed(request_id, text, num_missed)
            guarded([self], self.drafter.observe, [seen])


Ask: TypeAlias = tuple[ScheduledRequest, Part]
"""A drafter is asked for these: its part in a request, and the request's in the step."""
Asked: TypeAlias = Mapping[str, Sequence[Ask]]
"""The requests that each drafter is asked for, by its name."""


class Guest(Part):
    """A part beside the host's."""

    __slots__ = ()

    @property
    def leaves_rows(self) -> bool:
        """Not if it does not pay, or never drafted here."""
        return self.is_asked and bool(self.gain.own) and self.ledger.pays

    def is_told(self, each: ScheduledRequest) -> bool:
        """Returns whether the drafter hears of this step at once, not when it is asked again."""
        return self in each.shares

    def learn(
        self, each: ScheduledRequest, seen: Observation, core: DraftTree, plan: Plan
    ) -> Observation | None:
        """Learns from a step for which the host had drafted ``core``; returns what the drafter is to hear
        of it at once, if anything. Drafts that it could not make say nothing of those that it can."""
        tree = each.shares.get(self)
        self.ledger.wrote(len(seen.emitted_token_ids))
        if tree:
            self.gain.observe(_brought(tree, core, seen, plan.row_tokens), self.num_free)
        if tree or self.acceptance.is_waiting:
            self.acceptance.observe(tree or EMPTY, seen)
        if tree is not None:
            return _view(tree, seen)
        self.num_missed += len(seen.emitted_token_ids)
        self.has_rested |= not plan.is_plain
        return None


def able_guests(each: ScheduledRequest, host: Part, guests: Sequence[Guest]) -> list[Ask]:
    """Returns those that may add something to what the host has drafted."""
    tree = each.shares[host] = each.proposal
    survivals = host.acceptance.survivals(tree) if tree else ()
    num_free = expected_tokens(tree, survivals)
    if num_free >= _CERTAIN * min(each.num_asked, each.max_depth):
        return []
    able: list[Ask] = []
    best = sorted(survivals, reverse=True)
    num_before = sum(map(gt, best, each.row_prices))
    for guest in guests:
        guest.num_free, guest.num_before = num_free, num_before
        if guest.is_asked:
            able.append((each, guest))
    return able


def lay(each: ScheduledRequest, width: int) -> None:
    """Makes all drafts of a request its proposal. One of the host alone stays as it is."""
    drafted = {part: tree for part, tree in each.shares.items() if tree}
    if any(tree is not each.proposal for tree in drafted.values()):
        overlay = Overlay()
        for part, tree in drafted.items():
            overlay.lay(tree, part.acceptance.survivals(tree))
        each.proposal = overlay.draft(each.num_asked, width, each.max_depth)


def _brought(tree: DraftTree, core: DraftTree, seen: Observation, row_tokens: float) -> float:
    """Returns the accepted tokens that only the guest had drafted, less those that were not written while
    its rows were verified: of what no row was granted for, nothing came."""
    accepted = seen.accepted_token_ids
    num_more = len(tree.follow(accepted)) - len(core.follow(accepted))
    rows = {*seen.tree.paths()}.intersection(tree.paths()).difference(core.paths())
    return max(0, num_more) - len(rows) * row_tokens


def _view(tree: DraftTree, seen: Observation) -> Observation:
    """Returns the part of a guest's own draft that the text has reached, as if that had been verified: it
    learns by features of its own. There are no top tokens of nodes that were not."""
    emitted = seen.emitted_token_ids
    depths = tree.depths()
    tree = tree.subtree([at for at, depth in enumerate(depths) if depth <= len(emitted)])
    path = [0, *(node + 1 for node in tree.follow(emitted))]
    said = [-1] * (len(tree) + 1)
    for row, token_id in zip(path, emitted, strict=False):
        said[row] = token_id
    rows = {each: row for row, each in enumerate(seen.tree.paths())}
    places = [rows.get(each, -1) for each in tree.paths()]
    return Observation(
        seen.request_id,
        seen.token_ids,
        tree,
        said,
        path,
        emitted,
        _picked(seen.top_token_ids, places),
        _picked(seen.top_probs, places),
        _picked(seen.top_logits, places),
    )


def _picked(
    rows: Sequence[Sequence[_Number]] | None, places: Sequence[int]
) -> list[Sequence[_Number]] | None:
    return None if rows is None else [rows[place] if place >= 0 else () for place in places]
