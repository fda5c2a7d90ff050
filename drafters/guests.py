"""The guests of ``auto`` in one request: drafters whose drafts are laid over its own.

Owned by ``auto``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafters.base import Drafter, Observation
from drafters.containment import guarded
from drafters.estimator import RequestAcceptance
from drafters.ledger import Gain, Ledger
from drafters.tree import EMPTY, DraftTree

_FAILURES_BEFORE_SILENCE = 4


@dataclass(slots=True, eq=False)
class Guest:
    """One guest's part in one request. ``ledger``: chooses the requests that it is asked for.
    ``num_free``: the tokens that the draft of ``auto`` was expected to bring in this step."""

    drafter: Drafter
    ledger: Ledger
    acceptance: RequestAcceptance
    added: Gain = field(init=False)
    tree: DraftTree = EMPTY
    num_failures: int = 0
    num_missed: int = 0
    """Tokens at the end of the text that it was not told of, since it was not asked."""
    num_free: float = 0.0
    has_rested: bool = True
    """It was not asked in the step before, and has to take in what has come since."""
    hears_all: bool = field(init=False)
    """It hears of every step, since it keeps states of the target."""

    def __post_init__(self) -> None:
        self.added = self.ledger.gain()
        self.hears_all = self.drafter.info.needs.hidden_rows

    @property
    def name(self) -> str:
        return self.drafter.info.name

    @property
    def has_drafted(self) -> bool:
        return bool(self.added.own)

    @property
    def is_asked(self) -> bool:
        return self.num_failures < _FAILURES_BEFORE_SILENCE

    def silence(self) -> None:
        """It cannot draft for this request."""
        self.num_failures = _FAILURES_BEFORE_SILENCE

    def hear(self, seen: Observation, core: DraftTree) -> None:
        """Learns from a step, for which ``auto`` itself had drafted ``core``. Drafts that the guest could
        not make say nothing of those that it can."""
        emitted = seen.emitted_token_ids
        was_asked = bool(self.tree.token_ids)
        self.has_rested = not was_asked
        if was_asked:
            self.added.observe(self._brought(seen, core), self.num_free)
        if was_asked or self.acceptance.is_waiting:
            self.acceptance.label_against(self.tree, emitted)
        told, self.tree = self._view(seen), EMPTY
        if not self.is_asked:
            return
        if was_asked or self.hears_all:
            guarded((self,), self.drafter.observe, [told])
        else:
            self.num_missed += len(emitted)

    def _brought(self, seen: Observation, core: DraftTree) -> float:
        """Returns the accepted tokens that only the guest had drafted, less those that were not written
        while its rows were verified: of what no row was granted for, nothing came."""
        accepted = seen.accepted_token_ids
        num_more = len(self.tree.follow(accepted)) - len(core.follow(accepted))
        rows = {*seen.tree.paths()}.intersection(self.tree.paths()).difference(core.paths())
        return max(0, num_more) - len(rows) * seen.row_tokens

    def _view(self, seen: Observation) -> Observation:
        """Returns the part of its own draft that the text has reached, as if that had been verified: the
        guest learns by features of its own."""
        emitted = seen.emitted_token_ids
        depths = self.tree.depths()
        tree = self.tree.subtree([at for at, depth in enumerate(depths) if depth <= len(emitted)])
        path = [0, *(node + 1 for node in tree.follow(emitted))]
        said = [-1] * (len(tree) + 1)
        for row, token_id in zip(path, emitted, strict=False):
            said[row] = token_id
        return Observation(seen.request_id, seen.token_ids, tree, said, path, emitted)

    def catch_up(self, request_id: str, text: Sequence[int]) -> None:
        """It hears of what it missed, as one long draft that was accepted."""
        num_missed, self.num_missed = self.num_missed, 0
        if num_missed and self.is_asked:
            seen = Observation.of_missed(request_id, text, num_missed)
            guarded((self,), self.drafter.observe, [seen])
