"""Attention written out: the same sums as the fused kernel's, in pieces, tiles and chunks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.attention import products as attention_products
from engine.attention.backend import AttentionOptions
from engine.attention.products import BmmCall, CallShapes, Limits

torch.set_num_threads(1)

SHARE, KEYS, ROWS, BRANCHES, DIM = 2, 40, 10, 2, 16
PLAIN = AttentionOptions(None, None, None, None)
FREE = CallShapes(fused=False, key_multiple=8)


def inputs(dtype: torch.dtype, kv_heads: int = 3, first_hidden: int = 0) -> list[torch.Tensor]:
    """Query, keys and values as a gather leaves them, and what rows see: about half of the keys from
    ``first_hidden`` on."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(BRANCHES * ROWS, kv_heads * SHARE, DIM, generator=generator)
    keys, values = (
        torch.randn(kv_heads, BRANCHES, KEYS, DIM, generator=generator) for _ in range(2)
    )
    visible = torch.rand(BRANCHES, ROWS, KEYS, generator=generator) < 0.5
    visible[:, :, :first_hidden] = True
    return [query.to(dtype), keys.to(dtype), values.to(dtype), visible]


def limits_of(visible: torch.Tensor, start: int = 0) -> Limits:
    values = torch.full(visible.shape, math.inf).masked_fill_(~visible, -math.inf)
    ends = [int(row.nonzero()[:, 1].max()) + 1 for row in visible.unbind(1)]
    return Limits(start, values[:, :, None, start:], ends)


def fused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """``[num_branches * rows, num_heads, DIM]`` in float64."""
    output = F.scaled_dot_product_attention(
        query.double().unflatten(0, (BRANCHES, ROWS)).transpose(1, 2),
        keys.double().transpose(0, 1).repeat_interleave(SHARE, 1),
        values.double().transpose(0, 1).repeat_interleave(SHARE, 1),
        attn_mask=visible[:, None],
    )
    return output.transpose(1, 2).flatten(0, 1)


@torch.inference_mode()
@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_the_fused_kernels_attention(
    dtype: torch.dtype, kv_heads: int, start: int
) -> None:
    *tensors, visible = inputs(dtype, kv_heads, start)
    got = BmmCall(limits_of(visible, start), FREE, PLAIN).attend(*tensors)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(got.double(), fused(*tensors, visible), rtol=0.0, atol=tolerance)


@torch.inference_mode()
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.5, -0.5, 0.3, 2.0, 0.1, -2.0])])
def test_long_chunks_go_through_in_pieces_that_change_nothing(
    monkeypatch: pytest.MonkeyPatch, sinks: torch.Tensor | None
) -> None:
    *tensors, visible = inputs(torch.float32)
    visible[:, :4, 12:] = False  # the first piece sees less
    call = BmmCall(limits_of(visible), FREE, AttentionOptions(0.3, None, 5.0, sinks))
    whole = call.attend(*tensors)
    sizes: list[tuple[int, int]] = []
    attend = BmmCall._attend

    def watched(call: BmmCall, query: torch.Tensor, keys: torch.Tensor, *rest: object) -> object:
        sizes.append((query.shape[2], keys.shape[2]))
        return attend(call, query, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(BmmCall, "_attend", watched)
    monkeypatch.setattr(attention_products, "MOST_SCORES", BRANCHES * 6 * KEYS * 4)
    pieces = call.attend(*tensors)
    assert sizes == [(4, 16), (4, 40), (2, 40)]
    torch.testing.assert_close(pieces, whole)
    tiles = replace(call, calls=CallShapes(False, tile_rows=2, key_multiple=8)).attend(*tensors)
    torch.testing.assert_close(tiles, whole)


@torch.inference_mode()
@pytest.mark.parametrize("chunk", [8, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_be_summed_in_chunks_of_keys(dtype: torch.dtype, chunk: int) -> None:
    """Fewer chunks than heads and branches, and more; a last one that is shorter."""
    for kv_heads in (1, 3):
        *tensors, visible = inputs(dtype, kv_heads)
        call = BmmCall(limits_of(visible), FREE, PLAIN)
        whole = call.attend(*tensors)
        calls = CallShapes(False, key_multiple=8, key_chunk=chunk)
        chunks = replace(call, calls=calls).attend(*tensors)
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(chunks, whole, rtol=0.0, atol=tolerance)
