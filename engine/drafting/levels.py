"""Levels of drafts: forwards of a draft model one after another, and what they say read in one go.

The rows of a later level hold tokens that the level before it has chosen. Where their places are known
in advance, nobody has to read these tokens in between: they go from the device's choice into the next
forward's inputs, and the host waits once, for all levels.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from drafters.base import DraftRequest
from drafters.model.protocol import Candidates, DraftRows, Levels
from engine.attention.backend import AttentionBackend
from engine.batch import InputBatch, RequestRows, build_batch, slot_of
from engine.drafting.beams import Beams, Lanes
from engine.drafting.candidates import Choice, ScoredRow, begin_candidates, completed
from engine.transfer import Readback, Stopwatch, is_host, read_now, upload

_Result = TypeVar("_Result")


class LevelModel(ABC):
    """See ``drafters.model.protocol.DraftModel``. ``vocab_size`` is the target's."""

    def __init__(
        self,
        attention: AttentionBackend,
        *,
        vocab_size: int,
        max_len: int,
        max_catch_up_rows: int,
    ) -> None:
        self._attention = attention
        self._device = attention.store.device
        self._vocab_size = vocab_size
        self.block_size = attention.store.block_size
        self.max_len = max_len
        self.max_catch_up_rows = max_catch_up_rows

    @property
    def runs_ahead(self) -> bool:
        return not is_host(self._device)

    @property
    def picks_ahead(self) -> bool:
        return self.runs_ahead and self._attention.can_see_by_tensor

    def read_now(self, begin: Callable[[Readback], Callable[[], _Result]]) -> _Result:
        return read_now(begin)

    @torch.inference_mode()
    def begin(
        self, levels: Sequence[Sequence[DraftRows]], readback: Readback
    ) -> Callable[[], Levels]:
        """Launch all levels. The device is not waited for."""
        launched = [_Launched(levels[0], self._choose(levels[0], None, readback))]
        trees = [each for each in levels[0] if each.beam is not None]
        beams = Beams(trees, self._device) if trees and len(levels) > 1 else None
        stop = _watch(self._device)
        for rows in levels[1:]:
            above = _above(launched[-1], rows, beams)
            choice = self._choose(rows, above, readback)
            launched.append(_Launched(rows, choice, above.read_picks(readback)))
        seconds = stop()

        def finish() -> Levels:
            return Levels(
                [each.finish() for each in launched],
                seconds(),
                [each.finish_picks() for each in launched],
            )

        return finish

    @torch.inference_mode()
    def keep(self, ask: DraftRequest, rows: Sequence[int]) -> None:
        """See ``DraftModel``."""
        base, table = len(ask.token_ids), ask.block_table
        moves = [
            [slot_of(table, base + row, self.block_size) for row in each]
            for each in (rows, range(len(rows)))
        ]
        sources, targets = upload(moves, self._device)
        self._attention.store.move(sources, targets)

    def _choose(
        self, rows: Sequence[DraftRows], above: Above | None, readback: Readback
    ) -> Choice | None:
        """One forward: what may follow its scored rows, one request's after another's; None: there are
        none. ``above``: what the rows are, where only the device knows."""
        requests = [request_rows(each) for each in rows]
        if above is not None:
            for request, seen in zip(requests, above.seen, strict=True):
                request.seen = seen
        batch = build_batch(requests, self.block_size)
        batch.chosen = None if above is None else above.token_ids
        logits = self._logits(rows, batch, [None] * len(rows) if above is None else above.lanes)
        if not batch.logits_indices:
            return None
        positions = iter([batch.positions[row] + 1 for row in batch.logits_indices])
        scored = [
            ScoredRow(each.ask.sampling, next(positions), each.num_candidates)
            for each in rows
            for _ in range(each.num_scored)
        ]
        return begin_candidates(logits, scored, self._vocab_size, readback)

    @abstractmethod
    def _logits(
        self, rows: Sequence[DraftRows], batch: InputBatch, lanes: Sequence[Tensor | None]
    ) -> Tensor:
        """Run the rows and keep their keys and values: ``[num_scored_rows, vocab_size]``, of the rows
        ``batch.logits_indices``. ``lanes``: by request, which of its rows of the level above its rows
        hang on ``[num_rows]``, where only the device knows."""


class _Launched:
    """A level on the device."""

    def __init__(
        self,
        rows: Sequence[DraftRows],
        choice: Choice | None,
        picks: Callable[[], list[list[tuple[int, int]]]] | None = None,
    ) -> None:
        self.choice = choice
        self._rows = rows
        self._picks = picks
        self.first: dict[str, int] = {}
        """Where a request's scored rows begin."""
        count = 0
        for each in rows:
            self.first[each.ask.request_id] = count
            count += each.num_scored

    def finish(self) -> list[list[Candidates]]:
        found = iter(self.choice.finish() if self.choice is not None else ())
        return [[next(found) for _ in range(each.num_scored)] for each in self._rows]

    def finish_picks(self) -> list[list[tuple[int, int]]]:
        return [[] for _ in self._rows] if self._picks is None else self._picks()

    def tokens(self) -> Tensor:
        """That the next level's rows may hold: ``[num_scored_rows, most]``."""
        assert self.choice is not None
        lacking = [
            (self.first[each.ask.request_id] + lane, each.fillers)
            for each in self._rows
            if each.fillers
            for lane in range(each.num_scored)
        ]
        if not lacking:
            return self.choice.token_ids
        return completed(self.choice, [row for row, _ in lacking], [each for _, each in lacking])


class Above(NamedTuple):
    """What a level's rows are by what the level above chose. By request, where the device picked them:
    ``seen``, which nodes of its draft each row sees ``[num_rows, num_nodes]`` bool, and ``lanes``, which
    row of the level above each hangs on."""

    token_ids: Tensor  # [num_rows]
    seen: list[Tensor | None]
    lanes: list[Tensor | None]
    picked: Lanes | None
    trees: list[tuple[int, int]]
    """By request, which of the trees it is, or -1, and how many rows it has."""

    def read_picks(self, readback: Readback) -> Callable[[], list[list[tuple[int, int]]]] | None:
        if self.picked is None:
            return None
        picks, most = readback.add(self.picked.picks), self.picked.num_candidates

        def finish() -> list[list[tuple[int, int]]]:
            found = picks.tolist()
            return [
                [divmod(pick, most) for pick in found[tree][:count] if pick >= 0]
                if tree >= 0
                else []
                for tree, count in self.trees
            ]

        return finish


def _above(level: _Launched, rows: Sequence[DraftRows], beams: Beams | None) -> Above:
    """Of the next level's rows."""
    assert level.choice is not None
    tokens = level.tokens()
    most = tokens.shape[1]
    index = [
        (level.first[each.ask.request_id] + lane) * most + rank
        for each in rows
        for lane, rank in (each.picks or [(0, 0)] * len(each.token_ids))
    ]
    chosen = tokens.flatten().index_select(0, upload(index, tokens.device))
    trees = [
        (-1 if each.beam is None or beams is None else beams.index[each.ask.request_id],)
        + (len(each.token_ids),)
        for each in rows
    ]
    if beams is None or all(tree < 0 for tree, _ in trees):
        return Above(chosen, [None] * len(rows), [None] * len(rows), None, trees)
    lanes = _next_lanes(level.choice, level.first, trees, beams)
    places, sources = _places(trees, lanes.token_ids.shape[1])
    own = lanes.token_ids.flatten().index_select(0, upload(sources, tokens.device))
    chosen.index_copy_(0, upload(places, tokens.device), own)
    return Above(
        chosen,
        [
            lanes.seen[tree, :count, : len(each.parents)] if tree >= 0 else None
            for each, (tree, count) in zip(rows, trees, strict=True)
        ],
        [lanes.above[tree, :count] if tree >= 0 else None for tree, count in trees],
        lanes,
        trees,
    )


def _next_lanes(
    choice: Choice, first: Mapping[str, int], trees: Sequence[tuple[int, int]], beams: Beams
) -> Lanes:
    num_lanes = [0] * len(beams.index)
    for tree, count in trees:
        if tree >= 0:
            num_lanes[tree] = count
    return beams.next(choice, [first.get(name, 0) for name in beams.index], num_lanes)


def _places(trees: Sequence[tuple[int, int]], most: int) -> tuple[list[int], list[int]]:
    """Where rows that were picked lie in the batch, and where among the lanes of all trees."""
    places: list[int] = []
    sources: list[int] = []
    row = 0
    for tree, count in trees:
        if tree >= 0:
            places += range(row, row + count)
            sources += range(tree * most, tree * most + count)
        row += count
    return places, sources


def request_rows(rows: DraftRows) -> RequestRows:
    is_tree = bool(rows.parents)
    return RequestRows(
        token_ids=rows.token_ids,
        num_known=0 if is_tree else len(rows.token_ids),
        base=rows.base,
        parents=rows.parents,
        block_table=rows.ask.block_table,
        num_logits=rows.num_scored,
        num_stored=rows.num_stored,
    )


def _watch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Started now: what stops it, and gives what tells the seconds."""
    if device.type == "cuda":
        return Stopwatch(device).stop
    start = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return stop
