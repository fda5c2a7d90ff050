"""Determines this process's rank among the processes that share a model, from the environment set by
``torchrun`` or a similar launcher. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

STORE = "SLIPSTREAM_RANKS_STORE"
"""Names the file in which ranks that an engine launched itself find each other; without it they meet
where ``MASTER_ADDR`` and ``MASTER_PORT`` say."""


class Rank(NamedTuple):
    """``number`` of ``size``; ``local_number`` of the ``local_size`` on this machine. Rank 0 decides, the
    others follow."""

    number: int
    size: int
    local_number: int
    local_size: int

    def environment(self) -> dict[str, str]:
        """Returns the variables in which ``torchrun`` would say it."""
        return {
            "RANK": str(self.number),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_number),
            "LOCAL_WORLD_SIZE": str(self.local_size),
        }


def rank_here(size: int, environment: Mapping[str, str] = os.environ) -> Rank | None:
    """This process's place among ``size`` ranks. None: no ranks were launched, or one is enough. Raises
    ValueError if a number other than ``tensor_parallel_size`` was launched."""
    launched = int(environment.get("WORLD_SIZE", "1"))
    if size == 1 or launched == 1:
        return None
    if launched != size:
        raise ValueError(
            f"tensor_parallel_size is {size}, but {launched} processes were launched (WORLD_SIZE)"
        )
    number = int(environment["RANK"])
    local = int(environment.get("LOCAL_RANK", number))
    return Rank(number, size, local, int(environment.get("LOCAL_WORLD_SIZE", size)))
