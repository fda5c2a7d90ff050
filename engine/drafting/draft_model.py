"""The draft models that drafters run, level by level.

A level is one forward. Rows of a later level hold tokens that the level before it has chosen. In chains
their places are known in advance, so their tokens go from the device's choice into the next forward's
inputs, and the host waits once for all levels.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from drafters.model.protocol import Candidates, DraftRows, Levels
from engine.attention.backend import AttentionBackend
from engine.batch import InputBatch, RequestRows, build_batch
from engine.drafting.candidates import Choice, ScoredRow, begin_candidates
from engine.model.runner import ModelRunner
from engine.transfer import Readback, Stopwatch, is_host, read_now, upload

_Result = TypeVar("_Result")


class LevelModel(ABC):
    """A ``drafters.model.protocol.DraftModel``. ``vocab_size`` is the target's."""

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

    def read_now(self, begin: Callable[[Readback], Callable[[], _Result]]) -> _Result:
        return read_now(begin)

    @torch.inference_mode()
    def begin(
        self, levels: Sequence[Sequence[DraftRows]], readback: Readback
    ) -> Callable[[], Levels]:
        """Launch all levels. The device is not waited for."""
        choices = [self._choose(levels[0], None, readback)]
        stop = _watch(self._device)
        for above, rows in pairwise(levels):
            chosen = _chosen(above, choices[-1], rows)
            choices.append(self._choose(rows, chosen, readback))
        seconds = stop()

        def finish() -> Levels:
            found = [_by_request(*each) for each in zip(levels, choices, strict=True)]
            return Levels(found, seconds())

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


class EngineDraftModel(LevelModel):
    """A model runner that drafts."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        owns_rows: bool,
        max_len: int,
        max_catch_up_rows: int,
    ) -> None:
        """Raises ValueError for a runner that is not in fast mode."""
        if runner.attention.needs.determinism != "fast":
            raise ValueError("a draft model runs in fast mode: its trees are fed level by level")
        super().__init__(
            runner.attention,
            vocab_size=vocab_size,
            max_len=max_len,
            max_catch_up_rows=max_catch_up_rows,
        )
        self._runner = runner
        self.owns_rows = owns_rows

    def _logits(self, rows: Sequence[DraftRows], batch: InputBatch) -> Tensor:
        del rows
        return self._runner.forward(batch).logits


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


def _chosen(above: Sequence[DraftRows], choice: Choice | None, rows: Sequence[DraftRows]) -> Tensor:
    """The tokens of rows that follow those ``above``, one per request: ``[num_rows]``."""
    assert choice is not None
    names = [each.ask.request_id for each in above for _ in range(each.num_scored)]
    scored = {name: index for index, name in enumerate(names)}
    index = upload([scored[each.ask.request_id] for each in rows], choice.token_ids.device)
    return choice.token_ids[:, 0].index_select(0, index)


def _by_request(rows: Sequence[DraftRows], choice: Choice | None) -> list[list[Candidates]]:
    """The candidates of a level by request and scored row, once they were fetched."""
    found = iter(() if choice is None else choice.finish())
    return [[next(found) for _ in range(each.num_scored)] for each in rows]


def _watch(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts a stopwatch. Returns what stops it, which returns what gives its seconds."""
    if device.type == "cuda":
        return Stopwatch(device).stop
    start = time.perf_counter()

    def stop() -> Callable[[], float]:
        seconds = time.perf_counter() - start
        return lambda: seconds

    return stop
