"""Puts new keys and values into their slots of the block store: finite ones, and keys within a limit."""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.kernels import LANES
from engine.kernels import lanes as v
from engine.kernels.attention_records import (
    CALL_AT,
    LAYER_AT,
    NEXT_TASK,
    NUM_ARGS,
    STEP_AT,
    Call,
    Layer,
    Step,
)
from engine.kernels.compiled import Kernel
from engine.kernels.paged_attention import keys_at, record_at, values_at


@njit
def _store_row(
    kind: int, source: int, store_kind: int, target: int, dim: int, largest: float
) -> None:
    itemsize, store_itemsize = v.itemsize_of(kind), v.itemsize_of(store_kind)
    for d in range(0, dim, LANES):
        row = v.clean(v.load(kind, source + itemsize * d), largest)
        v.store(store_kind, target + store_itemsize * d, row)


def _store_rows(p: int) -> None:
    layer, step = record_at(Layer, p + 8 * LAYER_AT), record_at(Step, p + 8 * STEP_AT)
    call = record_at(Call, p + 8 * CALL_AT)
    while True:
        row = v.fetch_add(p + 8 * NEXT_TASK, 1)
        if row >= step.num_rows:
            break
        slot = v.read_int(step.slot_mapping + 8 * row)
        if slot < 0:  # padding's
            continue
        keys = call.new_keys + row * call.new_key_row
        values = call.new_values + row * call.new_value_row
        for head in range(layer.num_kv_heads):
            _store_row(
                layer.kind, keys + head * call.new_key_head, layer.store_kind,
                keys_at(layer, head, slot), layer.key_dim, np.float32(layer.largest_key),
            )  # fmt: skip
            _store_row(
                layer.kind, values + head * call.new_value_head, layer.store_kind,
                values_at(layer, head, slot), layer.value_dim, np.float32(np.inf),
            )  # fmt: skip


store_rows = Kernel(_store_rows, NUM_ARGS)
"""Every new row of one layer."""
