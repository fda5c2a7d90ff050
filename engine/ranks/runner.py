"""One forward in all ranks: rank 0 says which rows, and every rank runs them over its own part."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from engine.attention.backend import AttentionBackend
from engine.batch import ForwardOutput, InputBatch
from engine.model.runner import ModelRunner
from engine.ranks.group import Ranks, Step


class LeadingRunner(ModelRunner):
    """Rank 0's. Moves of accepted rows travel with the rows of the next step, so that a step is one
    message."""

    def __init__(
        self, model: PreTrainedModel, attention: AttentionBackend, max_num_rows: int, ranks: Ranks
    ) -> None:
        super().__init__(model, attention, max_num_rows, can_capture=False)
        self.ranks = ranks
        self._sources: list[int] = []
        self._targets: list[int] = []

    def forward(self, batch: InputBatch) -> ForwardOutput:
        """Raises RanksError for whatever goes wrong: the other ranks cannot be called back."""
        self.ranks.tell(Step(batch, self._sources, self._targets))
        self._sources, self._targets = [], []
        try:
            return super().forward(batch)
        except Exception as error:
            raise self.ranks.broken(error) from error

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        super().move(source_slots, target_slots)
        self._sources += source_slots
        self._targets += target_slots


def follow_steps(runner: ModelRunner, ranks: Ranks) -> None:
    """Run what rank 0 says until it says to leave. Raises RanksError where it has gone, and whatever a
    forward raises."""
    while isinstance(step := ranks.hear(), Step):
        runner.move(step.sources, step.targets)
        runner.forward(step.batch)
