"""Attention written out: the same sums as the fused kernel's, and the probe that says whether a row's
bits depend on shapes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from engine.attention import products as attention_products
from engine.attention.backend import AttentionOptions
from engine.attention.products import bmm_attention, products_keep_bits
from engine.model.linear import can_pack

torch.set_num_threads(1)

SHARE, KEYS, DIM = 2, 40, 16
PLAIN = AttentionOptions(None, None, None, None)
needs_bf16 = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="this CPU has no bf16 instructions"
)


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
    got = bmm_attention(query, keys, values, limits, SHARE, PLAIN, in_pieces=True)
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
    whole = bmm_attention(*inputs(torch.float32), SHARE, options, in_pieces=True)
    sizes: list[int] = []
    attend = attention_products._attend

    def watched(query: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(query.shape[2])
        return attend(query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention_products, "_attend", watched)
    monkeypatch.setattr(attention_products, "_MOST_SCORES", 2 * 3 * KEYS * 5)
    pieces = bmm_attention(*inputs(torch.float32), SHARE, options, in_pieces=True)
    assert sizes == [4, 4, 2]  # rows of a piece share their key heads
    torch.testing.assert_close(pieces, whole)
    bmm_attention(*inputs(torch.float32), SHARE, options, in_pieces=False)
    assert sizes[3:] == [10]


@needs_bf16
@torch.inference_mode()
def test_where_the_probe_finds_equal_bits_other_rows_have_them_too() -> None:
    """Text and sizes that the probe does not know: every row alone against all rows together."""
    share, dim, multiple = 4, 64, 128
    if not products_keep_bits(share, dim, dim, multiple, torch.bfloat16):
        pytest.skip("here bits follow shapes, and attention keeps to tiles")
    generator = torch.Generator().manual_seed(2)
    num_tokens, num_requests = 300, 3
    query = torch.randn(num_requests, 1, share * num_tokens, dim, generator=generator)
    keys, values = (
        torch.randn(num_requests, 1, 512, dim, generator=generator).bfloat16() for _ in range(2)
    )
    seen = torch.arange(512)[None] <= torch.arange(num_tokens).repeat_interleave(share)[:, None]
    limits = torch.full(seen.shape, math.inf).masked_fill_(~seen, -math.inf)
    together = bmm_attention(
        query.bfloat16(), keys, values, limits[None, None], share, PLAIN, in_pieces=True
    )
    for token in (0, 1, 77, 127, 128, 255, 256, 299):
        rows = slice(share * token, share * (token + 1))
        for request in range(num_requests):
            num_keys = -(-(token + 1) // multiple) * multiple
            alone = bmm_attention(
                query[request : request + 1, :, rows].bfloat16(),
                keys[request : request + 1, :, :num_keys],
                values[request : request + 1, :, :num_keys],
                limits[None, None, rows, :num_keys],
                share,
                PLAIN,
                in_pieces=True,
            )
            assert torch.equal(alone[0], together[request, :, rows])


@pytest.mark.parametrize("fussy", ["rows", "keys", "requests"])
def test_the_probe_notices_products_that_follow_their_shape(
    monkeypatch: pytest.MonkeyPatch, fussy: str
) -> None:
    """A kernel that adds its sums in one order up to a size and in another beyond it."""

    def steady(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left.double() @ right.double()).round(decimals=4).float()

    def follows_shape(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sizes = {"rows": left.shape[1], "keys": max(left.shape[2], right.shape[2])}
        large = {"requests": left.shape[0], **sizes}[fussy] > {"requests": 4}.get(fussy, 256)
        return steady(left, right) + (1e-3 if large else 0.0)

    monkeypatch.setattr(torch, "bmm", steady)
    assert products_keep_bits(8, 32, 32, 128, torch.float32)
    monkeypatch.setattr(torch, "bmm", follows_shape)
    assert not products_keep_bits(8, 32, 32, 128, torch.float32)
