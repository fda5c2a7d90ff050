"""The group of ranks: how they find each other, what rank 0 broadcasts, and one forward in all of them.

Rank 0 alone decides: it has the requests, the scheduler, the drafters and every clock. The others only
need a step's rows, so rank 0 broadcasts these once per step, and every rank runs them over its own
part.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from engine.attention.backend import AttentionBackend
from engine.batch import ForwardOutput, InputBatch
from engine.config import EngineConfig
from engine.model.runner import ModelRunner
from engine.ranks.rank import STORE, Rank, rank_here
from engine.request.errors import RanksError, UnsupportedModelError

# Those that follow wait for the next step however long nobody asks for one; who dies is found out by its
# connections and by whoever launched it.
_PATIENCE = timedelta(days=3650)
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of all ranks: move stored rows between slots, then run the batch's rows."""

    batch: InputBatch
    sources: list[int]
    targets: list[int]


class Ranks:
    """This process's end of the group, which is torch's default one. ``device``: what this rank
    computes on."""

    def __init__(self, place: Rank, device: torch.device) -> None:
        self.place = place
        self.device = device
        self._is_whole = True

    def tell(self, step: Step | None) -> None:
        """Tells all others as rank 0 what to do; None: there are no more steps. Raises RanksError where
        one of them has gone."""
        try:
            dist.broadcast_object_list([step], src=0, device=_HOST)
        except Exception as error:
            raise self.broken(error) from error

    def hear(self) -> Step | None:
        """Waits for what rank 0 tells next. Raises RanksError where it has gone."""
        heard: list[Any] = [None]
        try:
            dist.broadcast_object_list(heard, src=0, device=_HOST)
        except Exception as error:
            raise self.broken(error) from error
        step: Step | None = heard[0]
        return step

    def of_all(self, value: Any) -> list[Any]:
        """Returns every rank's value, in their order; all have to ask."""
        found: list[Any] = [None] * self.place.size
        dist.all_gather_object(found, value)
        return found

    def broken(self, error: Exception) -> RanksError:
        """Returns the error to raise of a step that failed in one rank: the others are in the middle of
        it, so that nothing can be computed together any more."""
        self._is_whole = False
        return RanksError(f"the ranks are no longer in step: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Lets the others go, where they still listen."""
        if not self._is_whole:
            return
        self._is_whole = False
        if self.place.number == 0:
            with suppress(RanksError):
                self.tell(None)
        dist.destroy_process_group()


def join_ranks(config: EngineConfig) -> Ranks | None:
    """Meets the other ranks; returns once all are there. None: ``tensor_parallel_size`` is 1.

    Raises ValueError where no ranks were launched or where they were given different settings, and
    UnsupportedModelError where the device rules them out.
    """
    if config.tensor_parallel_size == 1:
        return None
    place = rank_here(config.tensor_parallel_size)
    if place is None:
        raise ValueError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but no ranks were launched: the "
            "engine needs a process of its own, or torchrun"
        )
    device = _device(config, place)
    store = os.environ.get(STORE)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        # FileStore is not in its module's __all__.
        store=None if store is None else dist.FileStore(store, place.size),  # type: ignore[attr-defined]
        rank=place.number,
        world_size=place.size,
        timeout=_PATIENCE,
        device_id=None if device.type == "cpu" else device,
    )
    ranks = Ranks(place, device)
    if any(each != config for each in ranks.of_all(config)):
        dist.destroy_process_group()
        raise ValueError("tensor_parallel_size: the ranks were given different settings")
    atexit.register(ranks.leave)
    return ranks


def _device(config: EngineConfig, place: Rank) -> torch.device:
    if config.device == "cuda":
        device = torch.device("cuda", place.local_number)
        torch.cuda.set_device(device)
        return device
    if torch.accelerator.is_available():
        raise UnsupportedModelError(
            "device=cpu: transformers divides models among accelerators where there are any, and this "
            "machine has some"
        )
    return _HOST


class LeadingRunner(ModelRunner):
    """Rank 0's runner. Moves of accepted rows travel with the rows of the next step, so that a step is
    one message."""

    def __init__(
        self, model: PreTrainedModel, attention: AttentionBackend, max_num_rows: int, ranks: Ranks
    ) -> None:
        super().__init__(model, attention, max_num_rows, can_capture=False)
        self.ranks = ranks
        self._sources: list[int] = []
        self._targets: list[int] = []

    def forward(self, batch: InputBatch) -> ForwardOutput:
        """Raises RanksError for whatever goes wrong: the other ranks cannot be called back."""
        # All ranks come to the same hidden states, and only this one's are read.
        told = replace(batch, hidden_layers=())
        self.ranks.tell(Step(told, self._sources, self._targets))
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
    """Runs what rank 0 tells until there are no more steps. Raises RanksError where it has gone, and
    whatever a forward raises."""
    while (step := ranks.hear()) is not None:
        runner.move(step.sources, step.targets)
        runner.forward(step.batch)
