"""Attention on GPUs by FlashInfer's kernels, where that package is installed: its paged prefill reads the
block store where it is.

A request's rows are the last of its keys. Chains attend causally. Trees come with a mask of their rows
and all their keys, which FlashInfer packs to bits, and for that it asks the device how many there are:
so a step with trees waits for it, once for each kind of layer. Chains and trees of a step are planned
and attend apart, since one plan has a mask for all of its requests or for none.

What FlashInfer plans depends on a layer's heads, window, soft cap and scale (``_Kind``), which layers
say only when they attend: the first of a kind plans for all of them. That is work of the host amid a
forward, so steps are not captured. Sinks are applied to what comes back: a sink only adds to the sum that
weights are divided by, and FlashInfer gives that sum's logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch

from engine.attention.backend import (
    AttentionBackend,
    AttentionNeeds,
    AttentionOptions,
    attention_backend,
)
from engine.attention.sdpa import Branch, visibility
from engine.batch import InputBatch, InputTensors, RequestRows
from engine.config import Determinism
from engine.transfer import upload
from kvpool.store import KVStore

_DTYPES = (torch.float16, torch.bfloat16)
_STORED_DTYPES = (*_DTYPES, torch.float8_e4m3fn)
_DIMENSIONS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20
"""What FlashInfer advises; sums of keys that are divided among processors wait there to be merged."""


@attention_backend("flashinfer")
class FlashInferAttention(AttentionBackend):
    determinisms: ClassVar[frozenset[Determinism]] = frozenset({"fast"})
    device_types: ClassVar[frozenset[str] | None] = frozenset({"cuda"})
    rank: ClassVar[int] = -1  # never unless asked for

    def __init__(self, store: KVStore, needs: AttentionNeeds) -> None:
        super().__init__(store, needs)
        # Views as FlashInfer's NHD: [num_blocks, block_size, num_kv_heads, dim]; strides may be any.
        shape = (store.num_blocks, store.block_size)
        self.pages = [
            (key.unflatten(0, shape), value.unflatten(0, shape))
            for key, value in zip(store.key, store.value, strict=True)
        ]
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=store.device)
        self._wrappers: dict[tuple[_Kind, bool], Any] = {}

    @classmethod
    def refusal(cls, needs: AttentionNeeds) -> str | None:
        reason = super().refusal(needs)
        if reason is not None:
            return reason
        if find_spec("flashinfer") is None:
            return "it needs flashinfer-python, which is not installed (the extra flashinfer)"
        if needs.dtype not in _DTYPES:
            return f"it computes in float16 and bfloat16, not in {needs.dtype}"
        if needs.kv_dtype is not None and needs.kv_dtype not in _STORED_DTYPES:
            return f"it reads no keys and values of {needs.kv_dtype}"
        for shape in needs.shapes:
            if shape.key_dim != shape.value_dim or shape.key_dim not in _DIMENSIONS:
                return (
                    "keys and values of a head have 64, 128 or 256 dimensions, not "
                    f"{shape.key_dim} and {shape.value_dim}"
                )
        return None

    def plan(self, batch: InputBatch, inputs: InputTensors) -> FlashInferPlan:
        chains: list[RequestRows] = []
        trees: list[RequestRows] = []
        for request in batch.requests:
            if request.num_rows:
                (chains if request.is_chain() else trees).append(request)
        is_mixed = bool(chains and trees)
        parts = [
            _Part.of(requests, is_masked, is_mixed, self.store)
            for requests, is_masked in ((chains, False), (trees, True))
            if requests
        ]
        return FlashInferPlan(self, inputs.slot_mapping, parts)

    def planned(self, part: _Part, kind: _Kind) -> Any:
        """FlashInfer's wrapper, planned for a step's requests and layers of a kind. There is one for each
        kind, with a mask and without, since a wrapper has memory for one plan."""
        key = kind, part.is_masked
        if key not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            # Of its families of kernels only fa2 takes masks, and divides long texts of few rows.
            self._wrappers[key] = BatchPrefillWithPagedKVCacheWrapper(
                self._workspace, "NHD", backend="fa2"
            )
        wrapper = self._wrappers[key]
        # A draft tree's window is one of positions, not of places in the store: it is in the mask.
        window = None if part.is_masked else kind.window
        wrapper.plan(
            part.row_ends,
            part.block_ends,
            part.block_ids,
            part.last_block_tokens,
            kind.num_heads,
            kind.num_kv_heads,
            kind.dim,
            self.store.block_size,
            custom_mask=part.mask(kind.window) if part.is_masked else None,
            causal=not part.is_masked,
            sm_scale=kind.scaling,
            window_left=-1 if window is None else window - 1,  # keys before a row's own
            logits_soft_cap=kind.softcap,
            q_data_type=self.needs.dtype,
            kv_data_type=self.store.dtype,
        )
        return wrapper


@dataclass(frozen=True, slots=True)
class _Kind:
    """What one plan serves: layers that are alike in this."""

    num_heads: int
    num_kv_heads: int
    dim: int
    scaling: float
    window: int | None
    softcap: float


@dataclass(slots=True)
class _Part:
    """Requests of a step that attend together, as FlashInfer takes them. Numbers that it plans with are
    on the host, in int32: where each request's rows end, and its blocks, both from 0 on."""

    requests: Sequence[RequestRows]
    is_masked: bool
    rows: torch.Tensor | None  # [num_rows] among the batch's; None: all of them
    row_ends: torch.Tensor  # [num_requests + 1]
    block_ends: torch.Tensor  # [num_requests + 1]
    block_ids: torch.Tensor  # [num_blocks] on the device
    last_block_tokens: torch.Tensor  # [num_requests], at least 1
    planned: dict[_Kind, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        requests: Sequence[RequestRows], is_masked: bool, is_mixed: bool, store: KVStore
    ) -> _Part:
        size, device = store.block_size, store.device
        counts = [-(-request.end // size) for request in requests]
        ids = [
            block
            for request, count in zip(requests, counts, strict=True)
            for block in request.block_table[:count]
        ]
        rows = [
            row
            for request in requests
            for row in range(request.first_row, request.first_row + request.num_rows)
        ]
        return _Part(
            requests,
            is_masked,
            upload(rows, device) if is_mixed else None,
            _ends([request.num_rows for request in requests]),
            _ends(counts),
            upload(ids, device, torch.int32),
            torch.tensor([(request.end - 1) % size + 1 for request in requests], dtype=torch.int32),
        )

    def mask(self, window: int | None) -> torch.Tensor:
        """Of all requests, one after another: which of its keys each row sees. bool, on the device."""
        seen = []
        for request in self.requests:
            rows, base, end = range(request.num_rows), request.base, request.end
            branch = Branch(rows, base, base, request.block_table, end, request)
            seen.append(visibility([branch], len(rows), 0, end, window)[0].reshape(-1))
        return upload(np.concatenate(seen), self.block_ids.device)


@dataclass(slots=True)
class FlashInferPlan:
    backend: FlashInferAttention
    slot_mapping: torch.Tensor
    parts: list[_Part]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.backend.write(layer, self.slot_mapping, key, value)
        kind = _Kind(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            dim=query.shape[2],
            scaling=query.shape[2] ** -0.5 if options.scaling is None else options.scaling,
            window=options.window,
            softcap=options.softcap or 0.0,
        )
        first, *others = self.parts
        if not others:
            return self._attend(first, layer, query, kind, options.sinks)
        output = torch.empty_like(query)
        for part in self.parts:
            assert part.rows is not None
            mine = query.index_select(0, part.rows)
            output.index_copy_(0, part.rows, self._attend(part, layer, mine, kind, options.sinks))
        return output

    def _attend(
        self,
        part: _Part,
        layer: int,
        query: torch.Tensor,
        kind: _Kind,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if kind not in part.planned:
            part.planned[kind] = self.backend.planned(part, kind)
        wrapper, pages = part.planned[kind], self.backend.pages[layer]
        output: torch.Tensor
        if sinks is None:
            output = wrapper.run(query.contiguous(), pages)
            return output
        output, log_sum = wrapper.run(query.contiguous(), pages, return_lse=True)
        # The share of the whole sum that is the keys'. FlashInfer's logarithm is of base 2.
        share = torch.sigmoid(log_sum * math.log(2) - sinks.float())
        return (output.float() * share.unsqueeze(2)).to(output.dtype)


def _ends(counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
