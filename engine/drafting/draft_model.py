"""The draft models that drafters run: a model runner, level by level."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drafters.model.protocol import DraftRows
from engine.batch import InputBatch
from engine.drafting.levels import LevelModel
from engine.model.runner import ModelRunner


class EngineDraftModel(LevelModel):
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
        super().__init__(
            runner.attention,
            vocab_size=vocab_size,
            max_len=max_len,
            max_catch_up_rows=max_catch_up_rows,
        )
        self._runner = runner
        self.owns_rows = owns_rows

    def _logits(
        self, rows: Sequence[DraftRows], batch: InputBatch, lanes: Sequence[Tensor | None]
    ) -> Tensor:
        del rows, lanes
        return self._runner.forward(batch).logits
