"""Levels of drafts that are run before anybody has read what the levels above them chose.

Of chains and of sampled trees it is known where every node will lie, whatever its token is: so a growth
that is fed with ranks in the place of tokens says what rows there will be. A chain that would have ended
early, since the draft model was unsure, is run to its full depth and cut when it is read.

Which nodes of other trees are followed further is the device's choice, by a growth's own arithmetic, for
as many lanes per level as there is room for. A growth that is told what was chosen goes along with it as
far as it would have chosen the same; lanes in which nothing lay are taken out of the store before it goes
on by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from drafters.base import DraftRequest
from drafters.model.growth import STRENGTH, DraftGrowth
from drafters.model.protocol import Beam, Candidates, DraftRows, Levels
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


@dataclass(slots=True)
class BeamAhead:
    """A tree of which the device chooses the nodes. Every level has as many lanes as there is room for,
    whether or not so many nodes are worth it, until there is none."""

    ask: DraftRequest
    max_depth: int
    num_candidates: int
    mean: float
    beam: Beam
    frontier: Sequence[int] = ()
    """Lanes of the next level."""
    _depth: int = 0
    _parents: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, growth: DraftGrowth, mean: float, beam: Beam) -> BeamAhead:
        """As ``GrowthAhead.of``."""
        return cls(growth.ask, growth.max_depth, growth.num_candidates, mean, beam)

    @property
    def expected_gain(self) -> float:
        return self.mean**self._depth

    def add_level(self, nodes: Sequence[int], candidates: Sequence[Candidates]) -> None:
        del nodes, candidates
        self._depth += 1
        room = self.ask.max_nodes - 1 - len(self._parents)
        is_over = self._depth >= self.max_depth
        self.frontier = range(0 if is_over else min(self.num_candidates, room))

    def next_rows(self) -> DraftRows:
        stored, count = len(self._parents), len(self.frontier)
        # Any node of the level above: they are equally deep.
        self._parents += [stored - 1 if stored else ROOT] * count
        return DraftRows(
            self.ask,
            [0] * count,
            len(self.ask.token_ids),
            count,
            self.num_candidates,
            tuple(self._parents),
            num_stored=stored,
            beam=self.beam,
        )

    def filled(self, rows: DraftRows) -> DraftRows:
        """The first level's rows: what they lead to is chosen by the beam."""
        return replace(rows, beam=self.beam)


Planned = GrowthAhead | BeamAhead


def ranks(rows: Sequence[DraftRows]) -> list[list[Candidates]]:
    """Candidates of which nothing is known but which of them they are."""
    return [
        [Candidates(range(each.num_candidates), [1.0] * each.num_candidates)] * each.num_scored
        for each in rows
    ]


@dataclass(frozen=True, slots=True)
class Ahead:
    """``growths`` by request, and the ``levels`` below their first."""

    growths: dict[str, Planned]
    levels: list[list[DraftRows]]

    def read(self, number: int, found: Levels) -> dict[str, Read]:
        """What level ``number`` of ``levels`` has found, by request."""
        at = number + 1
        return {
            rows.ask.request_id: Read(rows, candidates, picks)
            for rows, candidates, picks in zip(
                self.levels[number], found.candidates[at], found.picks[at], strict=True
            )
        }

    def is_final(self, growth: DraftGrowth) -> bool:
        """Whether what was run ahead is all that is worth it: where places were known, it is."""
        return isinstance(self.growths.get(growth.ask.request_id), GrowthAhead)

    def first(self, rows: Sequence[DraftRows]) -> list[DraftRows]:
        """The first level's rows, with what is needed to pick of their candidates unread."""
        return [
            self.growths[each.ask.request_id].filled(each)
            if each.ask.request_id in self.growths
            else each
            for each in rows
        ]


class Read(NamedTuple):
    """Of one request: a level's rows as they were planned, what may follow them, and what they hold where
    a beam picked it."""

    planned: DraftRows
    candidates: Sequence[Candidates]
    picks: Sequence[tuple[int, int]]


@dataclass(slots=True)
class Reader:
    """A growth that goes along with what was run ahead for it. ``kept``: which of the rows that were run
    hold its nodes, in their order."""

    growth: DraftGrowth
    kept: list[int] = field(default_factory=list)
    _num_run: int = 0
    _is_along: bool = True
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of the newest nodes: which of the rows they come after, and as which candidate."""

    def start(self, candidates: Sequence[Candidates]) -> None:
        """What may follow the known tokens."""
        self._add([ROOT], candidates)

    def read(self, level: Read) -> DraftRows | None:
        """The next level; its rows as the growth has them, if it goes along."""
        nodes = self.growth.frontier
        if not nodes or not self._is_along:
            return None
        if level.planned.beam is not None:
            self._is_along = [self._places[node] for node in nodes] == list(level.picks)
            if not self._is_along:
                return None
        rows = self.growth.next_rows()
        self.kept += range(self._num_run, self._num_run + len(nodes))
        self._num_run += len(level.planned.token_ids)
        self._add(nodes, level.candidates[: len(nodes)])
        return rows

    @property
    def has_gaps(self) -> bool:
        return self.kept != [*range(len(self.kept))]

    def _add(self, nodes: Sequence[int], candidates: Sequence[Candidates]) -> None:
        count, first = self.growth.num_candidates, len(self.growth.nodes)
        self.growth.add_level(nodes, candidates)
        places = [
            (lane, rank)
            for lane, each in enumerate(candidates)
            for rank in range(min(count, len(each.token_ids)))
        ]
        self._places = dict(enumerate(places, first))


def plan_ahead(
    growths: Iterable[DraftGrowth],
    mean: float,
    counts: Sequence[tuple[float, float]] | None,
    worth_a_level: Callable[[Iterable[Planned]], Sequence[Planned]],
) -> Ahead:
    """The levels that growths will have, as far as they are worth it. ``counts``: of features, as in
    ``Beam``; None: nobody can pick trees by a beam."""
    ahead: dict[str, Planned] = {}
    for each in growths:
        if each.has_known_places:
            ahead[each.ask.request_id] = GrowthAhead.of(each, mean)
        elif counts is not None:
            beam = Beam(each.min_survival, counts, STRENGTH)
            ahead[each.ask.request_id] = BeamAhead.of(each, mean, beam)
    for growth in ahead.values():
        growth.add_level([ROOT], ranks([DraftRows(growth.ask, (), 0, 1, growth.num_candidates)])[0])
    levels: list[list[DraftRows]] = []
    while ready := worth_a_level(ahead.values()):
        frontiers = [each.frontier for each in ready]
        levels.append([each.next_rows() for each in ready])
        for growth, nodes, found in zip(ready, frontiers, ranks(levels[-1]), strict=True):
            growth.add_level(nodes, found)
    return Ahead(ahead, levels)
