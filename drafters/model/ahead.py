"""Levels of drafts that are run before anybody has read what the levels above them chose.

Of chains and of sampled trees it is known where every node will lie, whatever its token is: so a growth
that is fed with ranks in the place of tokens says what rows there will be. A chain that would have ended
early, since the draft model was unsure, is run to its full depth and cut when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from drafters.model.growth import DraftGrowth
from drafters.model.protocol import Candidates, DraftRows
from drafters.tree import ROOT


@dataclass(slots=True)
class GrowthAhead(DraftGrowth):
    """A growth of which nobody knows the tokens: its nodes hold their ranks."""

    _lanes: dict[int, int] = field(default_factory=dict)
    """Which of the level's scored rows belongs to a node."""

    @classmethod
    def of(cls, growth: DraftGrowth, mean: float) -> GrowthAhead:
        """Of a growth with known places that has no level yet. ``mean``: how likely a chain's nodes are
        taken to be."""
        ask, depth = growth.ask, growth.max_depth
        if growth.num_candidates > 1:
            return cls(ask, growth.min_survival, depth, growth.calibrate)
        return cls(ask, 0.0, depth, lambda feature, confidence: mean)  # noqa: ARG005

    def add_level(self, nodes: Sequence[int], candidates: Sequence[Candidates]) -> None:
        self._lanes = {node: lane for lane, node in enumerate(nodes)}
        DraftGrowth.add_level(self, nodes, candidates)

    def next_rows(self) -> DraftRows:
        picks = [
            (self._lanes[self.nodes.parents[node]], self.nodes.token_ids[node])
            for node in self.frontier
        ]
        return self.filled(replace(DraftGrowth.next_rows(self), picks=picks))

    def filled(self, rows: DraftRows) -> DraftRows:
        """The rows, with what completes their candidates."""
        return replace(rows, fillers=self.fillers()) if self.num_candidates > 1 else rows


def ranks(rows: Sequence[DraftRows]) -> list[list[Candidates]]:
    """Candidates of which nothing is known but which of them they are."""
    return [
        [Candidates(range(each.num_candidates), [1.0] * each.num_candidates)] * each.num_scored
        for each in rows
    ]


@dataclass(frozen=True, slots=True)
class Ahead:
    """``growths`` by request, and the ``levels`` below their first."""

    growths: dict[str, GrowthAhead]
    levels: list[list[DraftRows]]

    def has(self, growth: DraftGrowth) -> bool:
        return growth.ask.request_id in self.growths

    def first(self, rows: Sequence[DraftRows]) -> list[DraftRows]:
        """The first level's rows, with what completes candidates that are picked unread."""
        return [
            self.growths[each.ask.request_id].filled(each)
            if each.ask.request_id in self.growths
            else each
            for each in rows
        ]


def plan_ahead(
    growths: Iterable[DraftGrowth],
    mean: float,
    worth_a_level: Callable[[Iterable[GrowthAhead]], Sequence[GrowthAhead]],
) -> Ahead:
    """The levels that growths with known places will have, as far as they are worth it."""
    ahead = {
        each.ask.request_id: GrowthAhead.of(each, mean) for each in growths if each.has_known_places
    }
    for each in ahead.values():
        each.add_level([ROOT], ranks([DraftRows(each.ask, (), 0, 1, each.num_candidates)])[0])
    levels: list[list[DraftRows]] = []
    while ready := worth_a_level(ahead.values()):
        frontiers = [each.frontier for each in ready]
        levels.append([each.next_rows() for each in ready])
        for growth, nodes, found in zip(ready, frontiers, ranks(levels[-1]), strict=True):
            growth.add_level(nodes, found)
    return Ahead(ahead, levels)
