"""Networks of published heads on the engine's attention: texts whose rows go through in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.attention.backend import AttentionNeeds, build_attention
from engine.batch import InputBuffers, RequestRows, build_batch

CPU = torch.device("cpu")
BLOCK_SIZE = 4


@dataclass(slots=True)
class DraftText:
    """One request's rows: ``known`` of them are in the store."""

    block_table: list[int]
    known: int = 0


@dataclass(slots=True)
class Rows:
    """Rows of one text in a step: ``parents`` as in ``RequestRows``, without them the rows are known."""

    text: DraftText
    token_ids: Sequence[int]
    features: torch.Tensor  # [num_rows, feature_size]
    parents: Sequence[int] = ()
    num_stored: int = 0
    outputs: tuple[torch.Tensor, torch.Tensor] = field(init=False)


class DraftStore:
    """Runs steps of a network over a store of its own. Rows lie from slot 0 on, at positions from 0."""

    def __init__(self, network: Any, backend: str, num_texts: int) -> None:
        self.network = network
        determinism: Any = "exact" if backend == "paged" else "fast"
        needs = AttentionNeeds(determinism, CPU, torch.float32, BLOCK_SIZE, network.shapes)
        blocks = torch.randperm(16 * num_texts, generator=torch.Generator().manual_seed(0))
        tables = blocks.view(num_texts, 16).tolist()
        self.texts = [DraftText(table) for table in tables]
        self._attention = build_attention(needs, 16 * num_texts, backend)
        self._buffers = InputBuffers(CPU, 64)

    @torch.inference_mode()
    def step(self, *rows: Rows) -> None:
        """Gives each of the rows what the network makes of them, all of them in one forward."""
        requests = [
            RequestRows(
                each.token_ids,
                0 if each.parents else len(each.token_ids),
                each.text.known,
                each.parents,
                each.text.block_table,
                len(each.token_ids),
                each.num_stored,
            )
            for each in rows
        ]
        batch = build_batch(requests, BLOCK_SIZE)
        inputs = self._buffers.fill(batch)
        plan = self._attention.plan(batch, inputs)
        features = torch.cat([each.features for each in rows])
        outputs = self.network(inputs.token_ids, features, inputs.positions, plan)
        counts = [len(each.token_ids) for each in rows]
        for each, *parts in zip(rows, *(output.split(counts) for output in outputs), strict=True):
            each.outputs = (parts[0], parts[1])
            each.text.known += 0 if each.parents else len(each.token_ids)
