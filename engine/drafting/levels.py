"""Levels of drafts: forwards of a draft model one after another, and what they say read in one go.

The rows of a later level hold tokens that the level before it has chosen. Where their places are known
in advance, nobody has to read these tokens in between: they go from the device's choice into the next
forward's inputs, and the host waits once, for all levels.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from drafters.model.protocol import Candidates, DraftRows, Levels
from engine.batch import InputBatch, RequestRows, build_batch
from engine.drafting.candidates import Choice, ScoredRow, begin_candidates, completed
from engine.transfer import Readback, Stopwatch, is_host, read_now, upload

_Result = TypeVar("_Result")


class LevelModel(ABC):
    """See ``drafters.model.protocol.DraftModel``. ``vocab_size`` is the target's."""

    def __init__(
        self,
        device: torch.device,
        *,
        vocab_size: int,
        block_size: int,
        max_len: int,
        max_catch_up_rows: int,
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.block_size = block_size
        self.max_len = max_len
        self.max_catch_up_rows = max_catch_up_rows

    @property
    def runs_ahead(self) -> bool:
        return not is_host(self._device)

    def read_now(self, begin: Callable[[Readback], Callable[[], _Result]]) -> _Result:
        return read_now(begin)

    @torch.inference_mode()
    def begin(
        self, levels: Sequence[Sequence[DraftRows]], readback: Readback
    ) -> Callable[[], Levels]:
        """Launch all levels. The device is not waited for."""
        launched = [_Launched(levels[0], self._choose(levels[0], None, readback))]
        stop = _watch(self._device)
        for rows in levels[1:]:
            chosen = launched[-1].picked(rows)
            launched.append(_Launched(rows, self._choose(rows, chosen, readback)))
        seconds = stop()

        def finish() -> Levels:
            return Levels([each.finish() for each in launched], seconds())

        return finish

    def _choose(
        self, rows: Sequence[DraftRows], chosen: Tensor | None, readback: Readback
    ) -> Choice | None:
        """One forward: what may follow its scored rows, one request's after another's; None: there are
        none. ``chosen``: the rows' tokens, where only the device knows them."""
        batch = build_batch([request_rows(each) for each in rows], self.block_size)
        batch.chosen = chosen
        logits = self._logits(rows, batch)
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
    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> Tensor:
        """Run the rows and keep their keys and values: ``[num_scored_rows, vocab_size]``, of the rows
        ``batch.logits_indices``."""


class _Launched:
    """A level on the device."""

    def __init__(self, rows: Sequence[DraftRows], choice: Choice | None) -> None:
        self._rows = rows
        self._choice = choice
        self._first: dict[str, int] = {}
        count = 0
        for each in rows:
            self._first[each.ask.request_id] = count
            count += each.num_scored

    def finish(self) -> list[list[Candidates]]:
        found = iter(self._choice.finish() if self._choice is not None else ())
        return [[next(found) for _ in range(each.num_scored)] for each in self._rows]

    def picked(self, rows: Sequence[DraftRows]) -> Tensor:
        """The tokens of the next level's rows."""
        tokens = self._tokens()
        most = tokens.shape[1]
        index = [
            (self._first[each.ask.request_id] + lane) * most + rank
            for each in rows
            for lane, rank in each.picks
        ]
        return tokens.flatten().index_select(0, upload(index, tokens.device))

    def _tokens(self) -> Tensor:
        assert self._choice is not None
        lacking = [
            (self._first[each.ask.request_id] + lane, each.fillers)
            for each in self._rows
            if each.fillers
            for lane in range(each.num_scored)
        ]
        if not lacking:
            return self._choice.token_ids
        return completed(self._choice, [row for row, _ in lacking], [each for _, each in lacking])


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
