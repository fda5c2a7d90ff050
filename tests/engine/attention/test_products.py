"""Attention written out: the same sums as the fused kernel's, in pieces, tiles and chunks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from engine.attention import products as attention_products
from engine.attention.backend import AttentionOptions
from engine.attention.products import CallShapes, bmm_attention

torch.set_num_threads(1)

SHARE, KEYS, DIM = 2, 40, 16
PLAIN = AttentionOptions(None, None, None, None)
FREE = CallShapes(fused=False)


def inputs(dtype: torch.dtype, kv_heads: int = 3, rows: int = 10) -> list[torch.Tensor]:
    """Query, keys and values as a gather leaves them, and limits that hide about half."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, kv_heads, rows, DIM, generator=generator)
    keys, values = (
        torch.randn(2, KEYS, kv_heads, DIM, generator=generator).transpose(1, 2) for _ in range(2)
    )
    hidden = torch.rand(2, 1, rows, KEYS, generator=generator) < 0.5
    limits = torch.full((2, 1, rows, KEYS), math.inf).masked_fill_(hidden, -math.inf)
    return [query.to(dtype), keys.to(dtype), values.to(dtype), limits]


@torch.inference_mode()
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_fused_kernels_attention(dtype: torch.dtype, kv_heads: int) -> None:
    query, keys, values, limits = inputs(dtype, kv_heads)
    got = bmm_attention(query, keys, values, limits, SHARE, PLAIN, FREE)
    mask = limits.clamp(max=0.0).double()
    expected = F.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=mask
    )
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(got.double(), expected, rtol=0.0, atol=tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.5, -0.5, 0.3, 2.0, 0.1, -2.0])])
def test_long_chunks_go_through_in_pieces_that_change_nothing(
    monkeypatch: pytest.MonkeyPatch, sinks: torch.Tensor | None
) -> None:
    options = AttentionOptions(0.3, None, 5.0, sinks)
    whole = bmm_attention(*inputs(torch.float32), SHARE, options, FREE)
    sizes: list[int] = []
    attend = attention_products._attend

    def watched(query: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(query.shape[2])
        return attend(query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_products, "_attend", watched)
    monkeypatch.setattr(attention_products, "_MOST_SCORES", 2 * 3 * KEYS * 5)
    pieces = bmm_attention(*inputs(torch.float32), SHARE, options, FREE)
    assert sizes == [4, 4, 2]  # rows of a piece share their key heads
    torch.testing.assert_close(pieces, whole)
    tiles = bmm_attention(*inputs(torch.float32), SHARE, options, CallShapes(False, tile_rows=1))
    assert sizes[3:] == [2] * 5
    torch.testing.assert_close(tiles, whole)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_be_summed_in_chunks_of_keys(dtype: torch.dtype) -> None:
    calls = CallShapes(False, key_multiple=8, key_chunk=8)
    whole, chunks = (bmm_attention(*inputs(dtype), SHARE, PLAIN, each) for each in (FREE, calls))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(chunks, whole, rtol=0.0, atol=tolerance)
