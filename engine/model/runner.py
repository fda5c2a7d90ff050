"""Runs the target: one forward over a step's flat rows. Knows nothing of requests or sampling."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.attention.backend import AttentionBackend
from engine.batch import ForwardOutput, InputBatch, InputBuffers, RequestRows, build_batch


class ModelRunner:
    """A model on the engine's attention and the store that holds its keys and values."""

    def __init__(
        self, model: PreTrainedModel, attention: AttentionBackend, max_num_rows: int = 256
    ) -> None:
        self.model = model
        self.attention = attention
        self.store = attention.store
        self.device = model.device
        self._buffers = InputBuffers(self.device, max_num_rows)

    @torch.inference_mode()
    def forward(self, batch: InputBatch) -> ForwardOutput:
        """Keys and values of all rows are in the store afterwards."""
        inputs = self._buffers.fill(batch)
        with self._hidden_kept(batch.wants_hidden) as hidden:
            output = self.model(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                logits_to_keep=inputs.logits_indices,
                slipstream_plan=self.attention.plan(batch, inputs),
            )
        self.synchronize()  # so that a caller's clock stops when the device is done
        return ForwardOutput(output.logits[0, : len(batch.logits_indices)], *hidden)

    def move(self, source_slots: Sequence[int], target_slots: Sequence[int]) -> None:
        """Copy accepted rows to their committed slots, all layers at once."""
        if source_slots:
            self.store.move(self._tensor(source_slots), self._tensor(target_slots))

    @contextmanager
    def _hidden_kept(self, wanted: bool) -> Iterator[list[torch.Tensor]]:
        """The output head may see fewer rows than the base model wrote: so they are taken there."""
        hidden: list[torch.Tensor] = []
        if not wanted:
            yield hidden
            return

        def keep(module: torch.nn.Module, args: object, output: Any) -> None:
            del module, args
            hidden.append(output.last_hidden_state[0])

        handle = self.model.base_model.register_forward_hook(keep)
        try:
            yield hidden
        finally:
            handle.remove()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_step(self, num_rows: int, num_kv_tokens: int, num_requests: int = 1) -> float:
        """Seconds of one forward of ``num_requests`` requests with ``num_rows`` rows after
        ``num_kv_tokens`` tokens between them, in equal shares; for the cost model. Overwrites the
        store's first blocks: only while it is unused."""
        block_size = self.store.block_size
        rows, base = num_rows // num_requests, num_kv_tokens // num_requests
        num_blocks = -(-(base + rows) // block_size)
        requests = [
            RequestRows(
                token_ids=[0] * rows,
                num_known=rows,
                base=base,
                parents=(),
                block_table=range(first, first + num_blocks),
                num_logits=min(rows, 64),
            )
            for first in range(0, num_requests * num_blocks, num_blocks)
        ]
        batch = build_batch(requests, block_size)
        self.synchronize()
        start = time.perf_counter()
        self.forward(batch)
        self.synchronize()
        return time.perf_counter() - start

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)
