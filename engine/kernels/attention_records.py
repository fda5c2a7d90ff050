"""The arguments of ``paged_attention`` and ``kv_rows``, which compiled code reads by names of fields: an
array of 64-bit numbers, which holds two counters, a layer, a step and a call, one after another. The step
points to records of int64. Addresses are integers, and strides are bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

CHUNK = 256
TILE_QUERIES = 64
QUERY_MULTIPLE = 4


class Layer(NamedTuple):
    """A layer. ``share``: queries to a key head; ``kind``, ``store_kind``: types of new rows and of the
    store, by the numbers of ``STORED_KINDS``; ``keys``, ``values``: addresses in the store, ``key_head``
    and ``value_head`` from one head to the next; ``window``: keys that a row sees, its own included, 0:
    all; ``sinks``: address of a float32 for each query head, 0: none; ``softcap``: 0: none."""

    num_kv_heads: int
    share: int
    key_dim: int
    value_dim: int
    kind: int
    store_kind: int
    keys: int
    key_head: int
    values: int
    value_head: int
    window: int
    sinks: int
    scale: float
    softcap: float
    largest_key: float


class Step(NamedTuple):
    """A step. ``slot_mapping``: address of each new row's slot; ``num_tasks``: tiles times key heads;
    ``tiles``, ``rows``, ``branches``: addresses of records; ``groups``: of the first slot of each group,
    or of which sixteen of ``slots`` it is made, as -1 - number. ``most_queries``: of a tile;
    ``scratch``: memory of ``scratch_bytes`` for each worker; ``parts``: for sums of chunks of divided
    tiles; ``counters``: how many of a divided tile's tasks are done, by first part and key head."""

    num_rows: int
    slot_mapping: int
    num_tasks: int
    tiles: int
    rows: int
    branches: int
    groups: int
    slots: int
    most_queries: int
    scratch: int
    scratch_bytes: int
    parts: int
    counters: int


class Call(NamedTuple):
    """New rows and results: of each the address, and strides from row to row and from head to head."""

    query: int
    query_row: int
    query_head: int
    new_keys: int
    new_key_row: int
    new_key_head: int
    new_values: int
    new_value_row: int
    new_value_head: int
    output: int
    output_row: int
    output_head: int


NEXT_TASK, NUM_WORKERS, _NUM_COUNTERS = 0, 1, 2
"""Counters; 0 before a call."""
LAYER_AT = _NUM_COUNTERS
STEP_AT = LAYER_AT + len(Layer._fields)
CALL_AT = STEP_AT + len(Step._fields)
NUM_ARGS = CALL_AT + len(Call._fields)
COUNTERS, LAYER = slice(0, LAYER_AT), slice(LAYER_AT, STEP_AT)
STEP, CALL = slice(STEP_AT, CALL_AT), slice(CALL_AT, NUM_ARGS)


def layer_arguments(layer: Layer) -> Any:
    """Returns what goes to ``LAYER`` of the arguments: numbers of 64 bits."""
    return np.array([np.array(field).view(np.int64) for field in layer])


# --- the step's records ---


class Row(NamedTuple):
    """A row: its number in the batch, how many keys of its text it sees, its first query in the tile."""

    number: int
    num_seen: int
    query: int


class Branch(NamedTuple):
    """Queries of a tile, from a multiple of ``QUERY_MULTIPLE`` to one; ``groups``: number of the first of
    its own groups; ``end_group``: of its text, the group after the last."""

    first_query: int
    end_query: int
    groups: int
    end_group: int


class Tile(NamedTuple):
    """Rows, chunks and branches by number. ``num_queries``: a multiple of ``QUERY_MULTIPLE``; ``groups``:
    number of the first of ``num_common`` groups that all rows share. ``first_part``: where the sums of
    its chunks are left, if it is one of ``num_tiles`` that divide ``num_chunks``; -1: it is not."""

    first_row: int
    end_row: int
    first_chunk: int
    end_chunk: int
    first_branch: int
    end_branch: int
    num_queries: int
    groups: int
    num_common: int
    first_part: int
    num_chunks: int
    num_tiles: int
