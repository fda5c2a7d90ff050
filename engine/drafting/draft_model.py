"""The draft models that drafters run: a model runner, and how its logits become candidates."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.model.protocol import Candidates, DraftRows
from engine.batch import BatchRequest, build_batch
from engine.drafting.candidates import ScoredRow, choose_candidates
from engine.model.runner import ModelRunner


class EngineDraftModel:
    """See ``drafters.model.protocol.DraftModel``. ``vocab_size`` is the target's."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        vocab_size: int,
        owns_rows: bool,
        max_len: int,
        max_catch_up_rows: int,
    ) -> None:
        if runner.exact:
            raise ValueError("a draft model runs in fast mode: its trees are fed level by level")
        self._runner = runner
        self._vocab_size = vocab_size
        self.owns_rows = owns_rows
        self.block_size = runner.store.block_size
        self.max_len = max_len
        self.max_catch_up_rows = max_catch_up_rows

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        """One forward over all rows; per request, candidates per scored row."""
        requests = [batch_request(each) for each in rows]
        batch = build_batch(requests, self.block_size)
        logits = self._runner.forward(batch)
        order: list[int] = []
        scored: list[ScoredRow] = []
        for part, first in zip(rows, batch.first_logit_row, strict=True):
            for row in range(first, first + part.num_scored):
                position = batch.positions[batch.logit_rows[row]] + 1
                order.append(row)
                scored.append(ScoredRow(part.ask.sampling, position, part.num_candidates))
        if not scored:
            return [[] for _ in rows]
        found = iter(choose_candidates(logits[order], scored, self._vocab_size))
        return [[next(found) for _ in range(part.num_scored)] for part in rows]


def batch_request(rows: DraftRows) -> BatchRequest:
    is_tree = bool(rows.parents)
    return BatchRequest(
        token_ids=rows.token_ids,
        num_known=0 if is_tree else len(rows.token_ids),
        base=rows.base,
        parents=rows.parents,
        block_table=rows.ask.block_table,
        num_logit_rows=rows.num_scored,
        num_stored=rows.num_stored,
    )
