"""Rotary position embeddings of queries and keys in one pass (Su et al. 2021, arXiv:2104.09864)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import njit

from compiled.records import Counter
from engine.kernels import KINDS, LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Floats


def reference(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turns ``heads`` ``[.., rows, dim]``, queries or keys. Every operation is rounded to their type."""
    x, y = heads.chunk(2, -1)
    cos_x, cos_y = cosines.chunk(2, -1)
    sin_x, sin_y = sines.chunk(2, -1)
    return torch.cat([x * cos_x - y * sin_x, y * cos_y + x * sin_y], -1)


class Arguments(NamedTuple):
    """``cosines`` and ``sines`` ``[num_rows, 2 * half]``, rows apart by ``cosine_row`` and ``sine_row``;
    queries and keys ``[num_rows, heads, 2 * half]``, apart by ``_row`` and ``_head``; turned ones lie
    together."""

    cosines: Floats
    sines: Floats
    queries: Floats
    turned_queries: Floats
    keys: Floats
    turned_keys: Floats
    num_rows: int
    half: int
    cosine_row: int
    sine_row: int
    num_query_heads: int
    query_row: int
    query_head: int
    num_key_heads: int
    key_row: int
    key_head: int
    next_row: Counter = 0


@njit
def _rotate_heads(
    half: int, cosines: Any, sines: Any, heads: Any, num_heads: int, step: int, turned: Any
) -> None:
    """One row's heads. Each value is rounded where torch's operations would round it."""
    for _ in range(num_heads):
        for low in range(0, half, LANES):
            high = low + half
            x, y = v.load(heads, low), v.load(heads, high)
            crossed = v.rounded(heads, y * v.load(sines, low))
            kept = v.rounded(heads, x * v.load(cosines, low))
            v.store(turned, low, kept - crossed)
            crossed = v.rounded(heads, x * v.load(sines, high))
            kept = v.rounded(heads, y * v.load(cosines, high))
            v.store(turned, high, kept + crossed)
        heads, turned = heads + step, turned + 2 * half


def _rotate(a: Arguments) -> None:
    for row in v.shared(a.next_row, a.num_rows):
        cosines, sines = a.cosines + row * a.cosine_row, a.sines + row * a.sine_row
        _rotate_heads(
            a.half, cosines, sines, a.queries + row * a.query_row, a.num_query_heads,
            a.query_head, a.turned_queries + row * 2 * a.half * a.num_query_heads,
        )  # fmt: skip
        _rotate_heads(
            a.half, cosines, sines, a.keys + row * a.key_row, a.num_key_heads,
            a.key_head, a.turned_keys + row * 2 * a.half * a.num_key_heads,
        )  # fmt: skip


rotate_all = Kernel(_rotate)
"""Turns every row's queries and keys."""


def can_rotate(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> bool:
    """Whether ``rotate`` is for them: one batch, all dimensions rotated, halves a multiple of 16."""
    parts = (query, key, cosines, sines)
    dim = query.shape[-1]
    return (
        query.dim() == key.dim() == 4
        and query.shape[0] == key.shape[0] == 1
        and cosines.shape == sines.shape == (1, query.shape[2], dim)
        and key.shape[2:] == query.shape[2:]
        and dim % (2 * LANES) == 0
        and query.dtype in KINDS
        and all(each.dtype == query.dtype and each.stride(-1) == 1 for each in parts)
        and all(each.device.type == "cpu" for each in parts)
    )


def rotate(
    query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query`` and ``key`` ``[1, heads, rows, dim]``, ``cosines`` and ``sines`` ``[1, rows, dim]``, as
    ``can_rotate`` takes them. Returns the like of ``query`` and ``key``, a row's heads side by side."""
    _, num_query_heads, num_rows, dim = query.shape
    turned_query = query.new_empty(1, num_rows, num_query_heads, dim)
    turned_key = key.new_empty(1, num_rows, key.shape[1], dim)
    arguments = Arguments(
        cosines=cosines,
        sines=sines,
        queries=query,
        turned_queries=turned_query,
        keys=key,
        turned_keys=turned_key,
        num_rows=num_rows,
        half=dim // 2,
        cosine_row=cosines.stride(1),
        sine_row=sines.stride(1),
        num_query_heads=num_query_heads,
        query_row=query.stride(2),
        query_head=query.stride(1),
        num_key_heads=key.shape[1],
        key_row=key.stride(2),
        key_head=key.stride(1),
    )
    rotate_all.run(arguments, threads_for(query.numel()))
    return turned_query.transpose(1, 2), turned_key.transpose(1, 2)
