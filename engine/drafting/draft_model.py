"""The draft models that drafters run: a model runner, and how its logits become candidates."""

from __future__ import annotations

from collections.abc import Sequence

from drafters.model.protocol import Candidates, DraftRows
from engine.batch import RequestRows, build_batch
from engine.drafting.candidates import ScoredRow, choose_candidates
from engine.model.runner import ModelRunner
from engine.transfer import upload


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
        if runner.attention.needs.determinism != "fast":
            raise ValueError("a draft model runs in fast mode: its trees are fed level by level")
        self._runner = runner
        self._vocab_size = vocab_size
        self.owns_rows = owns_rows
        self.block_size = runner.store.block_size
        self.max_len = max_len
        self.max_catch_up_rows = max_catch_up_rows

    def forward(self, rows: Sequence[DraftRows]) -> list[list[Candidates]]:
        """One forward over all rows; per request, candidates per scored row."""
        batch = build_batch([request_rows(each) for each in rows], self.block_size)
        logits = self._runner.forward(batch).logits
        order: list[int] = []
        scored: list[ScoredRow] = []
        for part, run in zip(rows, batch.requests, strict=True):
            for row in range(run.first_logit, run.first_logit + part.num_scored):
                position = batch.positions[batch.logits_indices[row]] + 1
                order.append(row)
                scored.append(ScoredRow(part.ask.sampling, position, part.num_candidates))
        if not scored:
            return [[] for _ in rows]
        logits = logits.index_select(0, upload(order, logits.device))
        found = iter(choose_candidates(logits, scored, self._vocab_size))
        return [[next(found) for _ in range(part.num_scored)] for part in rows]


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
