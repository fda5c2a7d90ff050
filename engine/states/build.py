"""How many states a model is given room for, and what runs its operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.kernels import is_host
from engine.kernels.triton import missing_for
from engine.states.compiled import CompiledStates
from engine.states.plan import ModelStates, PlainStates
from engine.states.triton import TritonStates
from kvpool.state_store import StateShape, StateStore

_SHARE = 0.5
"""The largest share of the memory of keys, values and states for states."""
_SNAPSHOTS_PER_SEAT = 8
"""More are of no use: what they stand for has long left the prefix cache."""

LEAST_PLACES = 6
"""Drafts of the start-up checks."""


class StateSizes(NamedTuple):
    """So many requests may run at a time (``num_seats``), with ``num_snapshots`` kept beside;
    ``num_places``: for inputs of draft rows."""

    num_seats: int
    num_snapshots: int
    num_places: int

    @property
    def num_slots(self) -> int:
        return self.num_seats + self.num_snapshots

    def num_bytes(self, shapes: Sequence[StateShape]) -> int:
        slots = self.num_slots * StateStore.bytes_per_slot(shapes)
        return slots + self.num_places * StateStore.bytes_per_place(shapes)


def size_states(
    shapes: Sequence[StateShape], num_bytes: int, num_seqs: int, num_rows: int
) -> StateSizes:
    """Returns what a part of ``num_bytes`` has room for, for at most ``num_seqs`` requests at a time and
    ``num_rows`` draft rows in a step, which may wait beside those of the step before."""
    num_places, most = max(2 * num_rows, LEAST_PLACES), num_seqs * (1 + _SNAPSHOTS_PER_SEAT)
    left = _SHARE * num_bytes - num_places * StateStore.bytes_per_place(shapes)
    num_slots = max(2, min(most, int(left / StateStore.bytes_per_slot(shapes))))
    num_seats = min(num_seqs, num_slots // 2)
    return StateSizes(num_seats, num_slots - num_seats, num_places)


def build_states(
    shapes: Sequence[StateShape], num_slots: int, num_places: int, device: torch.device
) -> ModelStates | None:
    """Returns what runs a model's operations with a state; None: it has none."""
    if not shapes:
        return None
    store = StateStore(shapes, num_slots, num_places, device)
    if is_host(device):
        return CompiledStates(store)
    return PlainStates(store) if missing_for(device) is not None else TritonStates(store)


def checked_states(shapes: Sequence[StateShape], device: torch.device) -> ModelStates | None:
    """Returns the same with room for the check at start."""
    return build_states(shapes, 2, 8, device)
