"""A draft model that is a table, of a vocabulary of its own: what may follow a token, or what may stand
at each position behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.model.protocol import Candidates, DraftRows
from engine.drafting.draft_model import ScoredRow, begin_candidates
from engine.transfer import read_now
from worlds.model_world import Forwards


class TableModel(Forwards):
    """``tables``: ``[target_vocab, draft_vocab]`` logits by the last token, one table for each token that
    a forward drafts. ``token_map``: the target's id of each column."""

    owns_rows = False
    block_size = 4
    max_len = 500
    max_catch_up_rows = 64

    def __init__(self, tables: Sequence[torch.Tensor], token_map: torch.Tensor) -> None:
        self.num_parallel = len(tables)
        self._tables = tables
        self._token_map = token_map

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        found = []
        for each in rows:
            tokens = each.token_ids[len(each.token_ids) - each.num_scored :]
            logits = [table[token] for token in tokens for table in self._tables]
            scored = [
                ScoredRow(each.ask.sampling, position + further, each.num_candidates)
                for position in _positions(each)
                for further in range(self.num_parallel)
            ]
            found.append(self._choose(torch.stack(logits), scored))
        return found

    def _choose(self, logits: torch.Tensor, rows: Sequence[ScoredRow]) -> list[Candidates]:
        size = len(self._tables[0])
        return read_now(
            lambda readback: begin_candidates(logits, rows, size, readback, self._token_map).finish
        )


def _positions(rows: DraftRows) -> list[int]:
    """Returns where what follows each scored row stands."""
    if rows.parents:
        depths: list[int] = []
        for parent in rows.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        ends = [rows.base + depth for depth in depths[rows.num_stored :]]
    else:
        ends = [rows.base + at + 1 for at in range(len(rows.token_ids))]
    return ends[len(ends) - rows.num_scored :]
