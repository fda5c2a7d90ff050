"""An attention backend in one file, as somebody would add it: one row at a time, by the definition.

Slow, and exact: what a row's sums are made of depends on its own past alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionBackend, AttentionOptions, attention_backend
from engine.batch import InputBatch, InputTensors, RequestRows, slot_of


@attention_backend("row_by_row")
class RowByRow(AttentionBackend):
    determinisms = frozenset({"exact", "fast"})
    device_types = frozenset({"cpu"})
    rank = -1  # never unless asked for
    block_multiple = 2

    def plan(self, batch: InputBatch, inputs: InputTensors) -> RowByRowPlan:
        size = self.store.block_size
        slots = [
            torch.tensor([slot_of(request.block_table, place, size) for place in path])
            for request in batch.requests
            for path in paths_of(request)
        ]
        return RowByRowPlan(self, inputs.slot_mapping, slots)


def paths_of(request: RequestRows) -> list[list[int]]:
    """What each row sees, as places in the request's blocks: its past, its ancestors, itself."""
    known_end = request.base + request.num_known
    known = [list(range(place + 1)) for place in range(request.base, known_end)]
    nodes: list[list[int]] = []
    for node, parent in enumerate(request.parents):
        above = list(range(known_end)) if parent < 0 else nodes[parent]
        nodes.append([*above, known_end + node])
    return known + nodes[request.num_stored :]


@dataclass
class RowByRowPlan:
    backend: RowByRow
    slot_mapping: torch.Tensor
    slots: list[torch.Tensor]  # of each row, those it sees

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        assert options.softcap is None
        assert options.sinks is None
        self.backend.write(layer, self.slot_mapping, key, value)
        store, share = self.backend.store, query.shape[1] // key.shape[1]
        scale = query.shape[2] ** -0.5 if options.scaling is None else options.scaling
        rows = []
        for row, slots in zip(query, self.slots, strict=True):
            seen = slots if options.window is None else slots[-options.window :]
            keys, values = store.key[layer][seen], store.value[layer][seen]
            grouped = row.view(-1, share, row.shape[1])  # [num_kv_heads, share, head_dim]
            weights = torch.einsum("hsd,khd->hsk", grouped.float(), keys.float()).mul(scale)
            rows.append(
                torch.einsum("hsk,khd->hsd", weights.softmax(-1), values.float()).flatten(0, 1)
            )
        return torch.stack(rows).to(query.dtype)
