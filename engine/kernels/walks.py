"""The walks of a step, as kernels of operations with a state read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.records import Float32s
from engine.kernels.walk_layout import Entry as Entry
from engine.kernels.walk_layout import Walk as Walk


class Step(NamedTuple):
    """A step. Rows from ``num_rows`` on are padding. ``scratch``: ``scratch_size`` floats for each
    worker; ``num_parts``: tasks that a walk is divided into, or a head of it."""

    walks: Sequence[Walk]
    entries: Sequence[Entry]
    scratch: Float32s
    scratch_size: int
    num_walks: int
    num_rows: int
    num_parts: int
    num_threads: int


# --- as many floats as there are, not only multiples of sixteen ---


@njit
def scale(source: Any, count: int, factor: float, target: Any) -> None:
    """Writes floats times a factor, with zeros up to whole lanes."""
    by, at = v.splat(factor), 0
    while at + LANES <= count:
        v.store(target, at, v.load(source, at) * by)
        at += LANES
    if at < count:
        v.store(target, at, v.load_some(source + at, count - at) * by)


@njit
def copy(source: Any, count: int, target: Any) -> None:
    """Writes floats, and nothing beyond them."""
    at = 0
    while at + LANES <= count:
        v.store(target, at, v.load(source, at))
        at += LANES
    if at < count:
        v.store_some(target + at, v.load_some(source + at, count - at), count - at)


@njit
def clear(floats: Any, count: int) -> None:
    zeros, at = v.splat(np.float32(0.0)), 0
    while at + LANES <= count:
        v.store(floats, at, zeros)
        at += LANES
    if at < count:
        v.store_some(floats + at, zeros, count - at)
