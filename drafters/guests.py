"""The guests of ``auto`` in one request: drafters whose drafts are laid over its own.

Owned by ``auto``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from drafters.base import Observation
from drafters.containment import guarded
from drafters.estimator import RequestAcceptance
from drafters.ledger import Ledger
from drafters.part import Part
from drafters.tree import EMPTY, DraftTree

_Number = TypeVar("_Number", int, float)


@dataclass(slots=True, eq=False)
class Guest(Part):
    """One guest's part in one request. ``ledger``: chooses the requests that it is asked for.
    ``was_asked``, ``tree``: in this step, and what it has drafted. ``num_free``: the tokens that the
    draft of ``auto`` was expected to bring."""

    ledger: Ledger
    acceptance: RequestAcceptance
    was_asked: bool = False
    tree: DraftTree = EMPTY
    num_free: float = 0.0

    @property
    def has_drafted(self) -> bool:
        return bool(self.gain.own)

    def hear(self, seen: Observation, core: DraftTree, is_read: bool) -> None:
        """Learns from a step, for which ``auto`` itself had drafted ``core``. Drafts that the guest could
        not make say nothing of those that it can. Until the prompt ``is_read`` by all, nothing waits:
        who reads it reads what is written meanwhile, too."""
        emitted = seen.emitted_token_ids
        has_drafted = bool(self.tree.token_ids)
        self.has_rested = not has_drafted
        if has_drafted:
            self.gain.observe(self._brought(seen, core), self.num_free)
        if has_drafted or self.acceptance.is_waiting:
            self.acceptance.label_against(self.tree, emitted)
        if not self.was_asked:
            self.num_missed += len(emitted)
            if not is_read:
                self.catch_up(seen.request_id, seen.token_ids)
        elif self.is_asked:
            guarded((self,), self.drafter.observe, [self._view(seen)])
        self.was_asked, self.tree = False, EMPTY

    def _brought(self, seen: Observation, core: DraftTree) -> float:
        """Returns the accepted tokens that only the guest had drafted, less those that were not written
        while its rows were verified: of what no row was granted for, nothing came."""
        accepted = seen.accepted_token_ids
        num_more = len(self.tree.follow(accepted)) - len(core.follow(accepted))
        rows = {*seen.tree.paths()}.intersection(self.tree.paths()).difference(core.paths())
        return max(0, num_more) - len(rows) * seen.row_tokens

    def _view(self, seen: Observation) -> Observation:
        """Returns the part of its own draft that the text has reached, as if that had been verified: the
        guest learns by features of its own. There are no top tokens of nodes that were not."""
        emitted = seen.emitted_token_ids
        depths = self.tree.depths()
        tree = self.tree.subtree([at for at, depth in enumerate(depths) if depth <= len(emitted)])
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
