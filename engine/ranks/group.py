"""The group of ranks: how they find each other, and what rank 0 tells the others.

Rank 0 alone decides: it has the requests, the scheduler, the drafters and every clock. What the others
need to know of a step is its rows, so that is what they are told, once per step.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine.batch import InputBatch
from engine.config import EngineConfig
from engine.ranks.rank import STORE, Rank, rank_here
from engine.request.errors import RanksError, UnsupportedModelError

# Those that follow wait for the next step however long nobody asks for one; who dies is found out by its
# connections and by whoever launched it.
_PATIENCE = timedelta(days=3650)
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Step:
    """To all ranks: move stored rows between slots, then run the batch's rows."""

    batch: InputBatch
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Leave:
    """To all ranks: there are no more steps."""


class Ranks:
    """This process's end of the group, which is torch's default one. ``device``: what this rank
    computes on."""

    def __init__(self, place: Rank, device: torch.device) -> None:
        self.place = place
        self.device = device
        self._is_whole = True

    def tell(self, message: Step | Leave) -> None:
        """Rank 0 to all others. Raises RanksError where one of them has gone."""
        try:
            dist.broadcast_object_list([message], src=0, device=_HOST)
        except Exception as error:
            raise self.broken(error) from error

    def hear(self) -> Step | Leave:
        """Waits for what rank 0 says next. Raises RanksError where it has gone."""
        heard: list[Any] = [None]
        try:
            dist.broadcast_object_list(heard, src=0, device=_HOST)
        except Exception as error:
            raise self.broken(error) from error
        message: Step | Leave = heard[0]
        return message

    def of_all(self, value: Any) -> list[Any]:
        """Every rank's value, in their order; all have to ask."""
        found: list[Any] = [None] * self.place.size
        dist.all_gather_object(found, value)
        return found

    def broken(self, error: Exception) -> RanksError:
        """Returns the error to raise of a step that failed in one rank: the others are in the middle of
        it, so that nothing can be computed together any more."""
        self._is_whole = False
        return RanksError(f"the ranks are no longer in step: {type(error).__name__}: {error}")

    def leave(self) -> None:
        """Let the others go, where they still listen."""
        if not self._is_whole:
            return
        self._is_whole = False
        if self.place.number == 0:
            with suppress(RanksError):
                self.tell(Leave())
        dist.destroy_process_group()


def join_ranks(config: EngineConfig) -> Ranks | None:
    """Meet the other ranks; returns once all are there. None: ``tensor_parallel_size`` is 1.

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
        store=None if store is None else _store(store, place.size),
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


def _store(path: str, size: int) -> Any:
    return dist.FileStore(path, size)  # type: ignore[attr-defined]  # not in its __all__


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
