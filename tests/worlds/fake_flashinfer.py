"""FlashInfer's paged prefill on a CPU, by its documentation: what ``plan`` and ``run`` take, and what
they answer, as a plain sum over pages.

Written against flashinfer-python 0.7.2, for the arguments that we give and the family of kernels (fa2)
that we ask for. What the package checks in Python is checked here, and so is what its kernels take for
granted: types, contiguity and bounds of what they read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.attention.flashinfer import FlashInferAttention

_HALVES = (torch.float16, torch.bfloat16)
_STORED = (*_HALVES, torch.float8_e4m3fn, torch.float8_e5m2)
_PLANNED_SUMS = 8 << 20


@contextmanager
def fake_flashinfer() -> Iterator[None]:
    """As if it were installed, and CPUs a device that it serves."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = PagedPrefill
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", module)
        patch.setattr(FlashInferAttention, "device_types", frozenset({"cpu"}))
        yield


class PagedPrefill:
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper``."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert float_workspace_buffer.nbytes >= _PLANNED_SUMS
        assert backend == "fa2"
        assert kv_layout == "NHD"
        self.device = float_workspace_buffer.device
        self._planned: dict[str, Any] | None = None
        self._mask: list[torch.Tensor] | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        kv_data_type = q_data_type if kv_data_type is None else kv_data_type
        for indices in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert indices.dtype == torch.int32
            assert indices.dim() == 1
            assert indices.is_contiguous()
        # Read on the host; on the device they would be waited for.
        for indices in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert indices.device.type == "cpu"
        assert paged_kv_indices.device == self.device
        rows, pages = qo_indptr.diff(), paged_kv_indptr.diff()
        assert len(rows) == len(pages) == len(paged_kv_last_page_len) > 0
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert rows.min() > 0
        assert pages.min() > 0
        assert 1 <= paged_kv_last_page_len.min() <= paged_kv_last_page_len.max() <= page_size
        keys = (pages - 1) * page_size + paged_kv_last_page_len
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256)
        assert q_data_type in _HALVES
        assert kv_data_type == q_data_type or (
            kv_data_type in _STORED and kv_data_type.itemsize == 1
        )
        assert window_left >= -1
        if causal and custom_mask is None:
            assert (rows <= keys).all()
        self._mask = None
        if custom_mask is not None:
            assert custom_mask.dtype == torch.bool
            assert custom_mask.device == self.device
            assert custom_mask.shape == (int((rows * keys).sum()),)
            split = custom_mask.split((rows * keys).tolist())
            self._mask = [
                part.view(*shape)
                for part, shape in zip(split, zip(rows, keys, strict=True), strict=True)
            ]
        self._planned = {
            "rows": rows.tolist(),
            "keys": keys.tolist(),
            "pages": [each.clone() for each in paged_kv_indices.split(pages.tolist())],
            "heads": (num_qo_heads, num_kv_heads, head_dim_qk),
            "page_size": page_size,
            "causal": causal,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            "window": window_left,
            "cap": logits_soft_cap or 0.0,
            "dtypes": (q_data_type, kv_data_type),
        }

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        return_lse: bool = False,
    ) -> Any:
        planned = self._planned
        assert planned is not None, "plan comes first"
        num_heads, num_kv_heads, dim = planned["heads"]
        size = planned["page_size"]
        assert isinstance(paged_kv_cache, tuple)
        key, value = paged_kv_cache
        assert (q.dtype, key.dtype) == planned["dtypes"]
        assert value.dtype == key.dtype
        assert q.shape == (sum(planned["rows"]), num_heads, dim)
        assert q.stride(2) == 1
        assert key.shape == value.shape == (key.shape[0], size, num_kv_heads, dim)
        # Loads are of 16 bytes; equal strides have a kernel compiled from the first.
        for plane in (key, value):
            assert plane.stride(3) == 1
            assert plane.data_ptr() % 16 == 0
            assert plane.stride() == key.stride()
        outputs, sums = [], []
        for number, mine in enumerate(q.split(planned["rows"])):
            pages = planned["pages"][number]
            assert 0 <= pages.min() <= pages.max() < key.shape[0]
            count = planned["keys"][number]
            keys, values = (each[pages].flatten(0, 1)[:count].float() for each in (key, value))
            seen = self._seen(number, len(mine), count)
            output, log_sum = _attended(mine.float(), keys, values, seen, planned)
            outputs.append(output)
            sums.append(log_sum)
        out = torch.cat(outputs).to(q.dtype)
        return (out, torch.cat(sums)) if return_lse else out

    def _seen(self, number: int, num_rows: int, num_keys: int) -> torch.Tensor:
        """``[num_rows, num_keys]``. A row's place is counted from the last key backwards, mask or not."""
        assert self._planned is not None
        places = torch.arange(num_keys - num_rows, num_keys)[:, None]
        keys = torch.arange(num_keys)[None]
        seen = torch.ones(num_rows, num_keys, dtype=torch.bool)
        if self._mask is not None:
            seen = self._mask[number].clone()
        elif self._planned["causal"]:
            seen = keys <= places
        if self._planned["window"] >= 0:
            seen &= places - keys <= self._planned["window"]
        return seen


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seen: torch.Tensor,
    planned: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and logarithms of base 2 of the sums of weights, ``[num_rows, num_heads]`` float32."""
    share = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = torch.einsum("rhd,khd->rhk", query, keys) * planned["scale"]
    if planned["cap"] > 0:
        scores = planned["cap"] * torch.tanh(scores / planned["cap"])
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    output = torch.einsum("rhk,khd->rhd", scores.softmax(-1), values)
    return output, scores.logsumexp(-1) / math.log(2)
