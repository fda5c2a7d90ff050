"""Compiled attention: its arguments, and where a store's keys and values are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from numba import njit

from compiled.records import Counter, Int64s
from engine.kernels.attention_tiles import Branch, Row, Tile
from engine.kernels.records import Float32s, Floats


class Step(NamedTuple):
    """``slot_mapping``: each new row's slot; ``groups``: each group's first slot, or which sixteen of
    ``slots`` it is made of, as -1 - number; ``scratch``: ``scratch_size`` floats for each worker;
    ``parts``: for sums of chunks of divided tiles; ``counters``: how many of a divided tile's tasks are
    done, by first part and key head. ``num_tasks``: tiles times key heads; ``most_queries``: a tile's."""

    slot_mapping: Int64s
    tiles: Sequence[Tile]
    rows: Sequence[Row]
    branches: Sequence[Branch]
    groups: Int64s
    slots: Int64s
    scratch: Float32s
    parts: Float32s
    counters: Int64s
    num_rows: int
    num_tasks: int
    most_queries: int
    scratch_size: int


class Arguments(NamedTuple):
    """New rows and the output ``[num_rows, heads, dim]``, apart by ``_row`` and ``_head``; the store's
    keys and values, apart by ``key_head`` and ``value_head``; ``sinks``: of each query head, or NOWHERE;
    ``share``: queries to a key head; ``window``: how many keys up to its own a row sees at most;
    ``softcap``: 0: none."""

    query: Floats
    new_keys: Floats
    new_values: Floats
    output: Floats
    keys: Floats
    values: Floats
    sinks: Float32s
    step: Step
    query_row: int
    query_head: int
    new_key_row: int
    new_key_head: int
    new_value_row: int
    new_value_head: int
    output_row: int
    output_head: int
    key_head: int
    value_head: int
    num_kv_heads: int
    share: int
    key_dim: int
    value_dim: int
    window: int
    scale: float
    softcap: float
    largest_key: float
    next_row: Counter = 0
    next_task: Counter = 0
    num_workers: Counter = 0


@njit(inline="always")
def keys_at(a: Arguments, head: int, group: int) -> Any:
    """Returns where a group of keys is that lies together; of another, one that may be fetched."""
    return a.keys + (head * a.key_head + max(0, group) * a.key_dim)


@njit(inline="always")
def values_at(a: Arguments, head: int, group: int) -> Any:
    return a.values + (head * a.value_head + max(0, group) * a.value_dim)
