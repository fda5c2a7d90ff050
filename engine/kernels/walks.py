"""What kernels of operations with a state are told of a step: its walks, as ``engine.states.work`` says
what they are."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.records import Float32s, Pointer


class Walk(NamedTuple):
    """As ``engine.states.work.Walk``."""

    first: int
    end: int
    source: int
    num_buffers: int


class Entry(NamedTuple):
    """As ``engine.states.work.Entry``."""

    row: int
    read: int
    keep: int
    parent: int
    source: int
    buffer: int
    store: int
    snapshot: int


class Step(NamedTuple):
    """A step. Rows from ``num_rows`` on are padding. ``scratch``: ``scratch_size`` floats for each
    worker; ``num_parts``: tasks that a walk is divided into, or a head of it."""

    walks: Annotated[Any, Pointer(Walk)]
    entries: Annotated[Any, Pointer(Entry)]
    scratch: Float32s
    scratch_size: int
    num_walks: int
    num_rows: int
    num_parts: int


# --- as many floats as there are, not only multiples of sixteen ---


@njit
def load(floats: Any, at: int, end: int) -> Any:
    """Loads sixteen floats; those from the number ``end`` on are not read, and are 0."""
    if at + LANES <= end:
        return v.load(floats, at)
    return v.load_some(floats + at, end - at)


@njit
def store(floats: Any, at: int, value: Any, end: int) -> None:
    """Stores sixteen floats, but for those from the number ``end`` on."""
    if at + LANES <= end:
        v.store(floats, at, value)
    else:
        v.store_some(floats + at, value, end - at)


@njit
def copy(source: Any, count: int, target: Any) -> None:
    at = 0
    while at + LANES <= count:
        v.store(target, at, v.load(source, at))
        at += LANES
    if at < count:
        v.store_some(target + at, v.load_some(source + at, count - at), count - at)


@njit
def clear(floats: Any, count: int) -> None:
    zeros = v.splat(np.float32(0.0))
    for at in range(0, count, LANES):
        store(floats, at, zeros, count)
