"""Queries and keys rotated in one pass: the bits are those of torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.kernels.rotary import can_rotate, reference, rotate
from worlds.random_tensors import drawn
from worlds.threads import threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def parts(
    heads: tuple[int, int], rows: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Queries and keys as projections leave them, cosines and sines of both halves alike."""
    both = [drawn(1, rows, count, dim, seed=count).to(dtype).transpose(1, 2) for count in heads]
    angles = 50 * drawn(1, rows, dim // 2, seed=99).repeat(1, 1, 2)
    return [*both, angles.cos().to(dtype), angles.sin().to(dtype)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Which tell zeros of either sign apart."""
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def check(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    assert can_rotate(query, key, cos, sin)
    transformers = apply_rotary_pos_emb(query, key, cos, sin)
    plain = reference(query, cos, sin), reference(key, cos, sin)
    for got, *expected in zip(rotate(query, key, cos, sin), transformers, plain, strict=True):
        for wanted in expected:
            assert got.shape == wanted.shape
            assert torch.equal(bits(got), bits(wanted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
@pytest.mark.parametrize(
    ("heads", "dim"), [((4, 2), 32), ((3, 1), 96), ((2, 5), 64), ((16, 16), 128)]
)
def test_bits_are_those_of_operations_one_by_one(
    heads: tuple[int, int], dim: int, rows: int, dtype: torch.dtype
) -> None:
    """In any number of threads, also where halves turn by different angles."""
    query, key, cos, sin = parts(heads, rows, dim, dtype)
    before = query.clone(), key.clone()
    for num_threads in (1, 3):
        with threads(num_threads):
            check(query, key, cos, sin)
    check(query, key, *(drawn(1, rows, dim, seed=seed).to(dtype) for seed in (3, 4)))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
    # Attention wants a row's heads side by side.
    assert rotate(query, key, cos, sin)[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    "laid",
    [
        lambda each: each.contiguous(),
        lambda each: torch.cat([each, each], -1)[..., 16 : 16 + each.shape[-1]],
        lambda each: torch.cat([each, each], 1)[:, 1 : 1 + each.shape[1]],
        lambda each: each.repeat_interleave(2, 2)[:, :, ::2],
        lambda each: each[:, :1].expand(-1, 5, -1, -1),
        lambda each: each[:, :, :1].expand(-1, -1, 9, -1),
    ],
)
def test_they_are_read_wherever_they_lie(laid: Callable[[torch.Tensor], torch.Tensor]) -> None:
    query, key, cos, sin = parts((4, 2), 9, 64)
    check(laid(query), laid(key), cos, sin)
    check(query, laid(key), cos, sin)
    wide = torch.cat([cos, sin], -1)
    check(query, key, wide[..., :64], wide[..., 64:])
    check(query, key, cos[:, :1].expand(1, 9, 64), sin)


def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice() -> None:
    given = parts((4, 2), 3, 64)
    alone = rotate(*given)[0].clone()
    given[0][0, 2, 1, 5] = torch.nan
    got = rotate(*given)[0]
    assert got.isnan().nonzero()[:, 1:].tolist() == [[2, 1, 5], [2, 1, 37]]
    got[0, 2, 1] = alone[0, 2, 1]
    assert torch.equal(got, alone)


def other(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    given = parts((4, 2), 6, 64)
    given[index] = change(given[index])
    return given


@pytest.mark.parametrize(
    "given",
    [
        parts((4, 2), 6, 48),  # halves of 24
        parts((4, 2), 6, 64, torch.float64),
        [each.expand(2, *each.shape[1:]) for each in parts((4, 2), 6, 64)],
        other(0, lambda each: each.expand(2, -1, -1, -1)),
        other(1, lambda each: each.expand(2, -1, -1, -1)),
        other(0, lambda each: each[0]),
        other(1, lambda each: each[:, :, :1]),
        other(1, lambda each: each.bfloat16()),
        other(2, lambda each: each.double()),
        other(2, lambda each: each[..., :32]),
        [*parts((4, 2), 6, 64)[:2], *parts((4, 2), 6, 32)[2:]],
        other(3, lambda each: each[:, :1]),
        other(0, lambda each: each.repeat_interleave(2, -1)[..., ::2]),
        other(3, lambda each: each.repeat_interleave(2, -1)[..., ::2]),
        other(1, lambda each: each.to("meta")),
    ],
)
def test_others_are_refused(given: Parts) -> None:
    assert not can_rotate(*given)
