"""Queries and keys rotated in one pass: the bits are those of torch's operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.kernels.rotary import can_rotate, reference, rotate
from worlds.threads import threads

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    check(*parts(heads, rows, dim, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_need_not_turn_by_the_same_angles(dtype: torch.dtype) -> None:
    query, key, *_ = parts((4, 2), 5, 64, dtype)
    check(query, key, drawn(1, 5, 64, seed=3).to(dtype), drawn(1, 5, 64, seed=4).to(dtype))


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


def test_so_are_cosines_and_sines() -> None:
    query, key, cos, sin = parts((4, 2), 9, 64)
    wide = torch.cat([cos, sin], -1)
    check(query, key, wide[..., :64], wide[..., 64:])
    check(query, key, cos[:, :1].expand(1, 9, 64), sin)


def test_results_are_read_as_rows_without_a_copy() -> None:
    """Attention wants a row's heads side by side."""
    query, _ = rotate(*parts((4, 2), 9, 64))
    assert query.transpose(1, 2).is_contiguous()


def test_inputs_stay_what_they_are() -> None:
    given = parts((4, 2), 9, 64)
    before = [each.clone() for each in given]
    rotate(*given)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_bits(num_threads: int) -> None:
    with threads(num_threads):
        for _ in range(10):
            check(*parts((8, 2), 150, 64, torch.bfloat16))


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
