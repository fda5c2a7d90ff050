"""Passes after joint products: to the bit what small operations, one after another, make of the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.kernels.triton.joint_ops import HeadNorms, Heads, gate_rows, put_heads
from engine.kernels.triton.ops import store_rows
from engine.kernels.triton.row_ops import Sums, row_norm, sum_norm
from worlds.interpreted import DEVICE, ON_CPU, drawn

pytestmark = pytest.mark.usefixtures("patched_once")
DTYPES = [torch.float32, torch.float16]
"""The interpreter does not round bfloat16 to the nearest."""
LARGEST = 100.0


def left(dtype: torch.dtype, num_chunks: int, num_rows: int, features: int) -> Sums:
    """Returns the sums that a product leaves, and a bias where they are in chunks."""
    if num_chunks == 1:
        return Sums(drawn(dtype, 1, num_rows, features))
    chunks = drawn(torch.float32, num_chunks, num_rows, features)
    return Sums(chunks, drawn(dtype, features, seed=1))


def whole(sums: Sums, dtype: torch.dtype) -> torch.Tensor:
    chunks, bias = sums
    total = torch.zeros_like(chunks[0], dtype=torch.float32)
    for chunk in chunks:
        total = total + chunk.float()
    return (total if bias is None else total + bias.float()).to(dtype)


def rotated(rows: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """As transformers writes it; ``rows`` ``[num_rows, num_heads, dim]``."""
    first, second = rows.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return rows * cosines[:, None] + turned * sines[:, None]


@ON_CPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_chunks", "is_rounded", "stored"),
    [(1, None, None), (3, None, torch.float8_e4m3fn), (1, True, None), (2, False, None)],
)
def test_heads_are_normed_rotated_and_stored_with_the_bits_of_single_passes(
    dtype: torch.dtype, num_chunks: int, is_rounded: bool | None, stored: torch.dtype | None
) -> None:
    num_rows, num_heads, kv_heads, dim = 70, 4, 2, 32
    sums = left(dtype, num_chunks, num_rows, (num_heads + 2 * kv_heads) * dim)
    cosines, sines = drawn(dtype, num_rows, dim, seed=2), drawn(dtype, num_rows, dim, seed=3)
    factors = drawn(torch.float32, 2, dim, seed=4)
    norms = None if is_rounded is None else HeadNorms(factors, 1e-5, is_rounded)
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(5))[:num_rows].to(DEVICE)
    slots[[3, 69]] = -1
    planes = [
        torch.zeros(kv_heads, 100, dim, dtype=stored or dtype, device=DEVICE) for _ in range(4)
    ]
    planes = [each.view(torch.uint8) if stored else each for each in planes]
    heads = Heads(num_heads, cosines, sines, norms)
    query, output = put_heads(sums, heads, (planes[0], planes[1]), slots, LARGEST)

    sizes = [num_heads * dim, kv_heads * dim, kv_heads * dim]
    parts = whole(sums, dtype).split(sizes, -1)
    mine, key, value = (each.unflatten(-1, (-1, dim)) for each in parts)
    if norms is not None:
        mine, key = (
            row_norm(rows, each, norms.epsilon, norms.is_rounded)
            for rows, each in zip((mine, key), factors, strict=True)
        )
    mine, key = (rotated(each, cosines, sines) for each in (mine, key))
    store_rows(key, value, planes[2], planes[3], slots, num_heads, LARGEST)
    assert torch.equal(query, mine)
    assert torch.equal(planes[0], planes[2])
    assert torch.equal(planes[1], planes[3])
    assert planes[0].any()
    assert not output[[3, 69]].any()


@ON_CPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_halves_are_gated_with_the_bits_of_single_passes(
    dtype: torch.dtype, num_chunks: int, activation: str
) -> None:
    sums = left(dtype, num_chunks, 7, 2 * 2400)
    gate, up = whole(sums, dtype).chunk(2, -1)
    wide = inner = gate.float().numpy()
    one, two = np.float32(1), np.float32(2)
    if activation == "gelu_tanh":
        inner = wide + np.float32(0.044715) * wide * wide * wide
        inner = two * (np.float32(0.7978845608028654) * inner)
    small = np.exp(-abs(inner))
    active = wide * np.where(inner < 0, small, one) / (one + small)
    got = gate_rows(sums, activation, dtype)
    assert torch.equal(got, torch.from_numpy(active).to(dtype) * up)
    library = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(got, library * up, rtol=3e-3, atol=1e-5)
    alone = Sums(sums.chunks[:, 5:6].contiguous(), sums.bias)
    assert torch.equal(gate_rows(alone, activation, dtype), got[5:6])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_sums_are_normed_with_the_bits_of_single_passes(
    dtype: torch.dtype, num_chunks: int, is_rounded: bool
) -> None:
    sums, factors = left(dtype, num_chunks, 70, 96), drawn(torch.float32, 96, seed=3)
    residual = drawn(dtype, 1, 70, 96, seed=2)
    hidden, normed = sum_norm(sums, residual, factors, 1e-6, is_rounded)
    expected = residual + whole(sums, dtype)
    assert torch.equal(hidden, expected)
    assert torch.equal(normed, row_norm(expected, factors, 1e-6, is_rounded))
