"""Compiled loops find the same in rows of logits as operations on tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compiled.noise_numbers import TILE_TOKENS
from engine.kernels import KINDS, LANES
from engine.kernels.top_tokens import log_sums, reference, top_rows
from worlds.device_world import no_host
from worlds.sampled_rows import top_probs, top_tokens


def odd_rows(num_rows: int, vocab_size: int) -> Tensor:
    """With ties, both zeros, and much that is forbidden."""
    generator = torch.Generator().manual_seed(vocab_size)
    rows = torch.randn(num_rows, vocab_size, generator=generator) * 3
    rows[::3] = rows[::3].round()
    rows[1::3] = torch.where(rows[1::3] > 0, rows[1::3], -0.0)
    rows[:, ::7] *= 0.0
    rows[2::4, : vocab_size // 2] = float("-inf")
    return rows


def log_sum_bound(rows: Tensor) -> float:
    """How far the logarithm of a sum of exponentials may be off in float32, where an operation is off by
    2**-24 of its result, an exponential by six times that and the logarithm by twice. The sum: a tile's
    numbers in a lane, the tiles, the lanes. Differences that exponentials are taken of are off by as much
    of their size, which, weighted by them, is at most the logarithm of how many there are."""
    num_logits = rows.shape[1]
    num_sums = TILE_TOKENS // LANES + math.ceil(num_logits / TILE_TOKENS) + math.log2(LANES)
    most = float(rows[rows.isfinite()].abs().max()) + math.log(num_logits)
    return (num_sums + 6 + 3 * math.log(num_logits) + most) * 2.0**-24


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("vocab_size", [1, 5, 40, 1023, 1024, 1025, 4096, 5000])
@pytest.mark.parametrize("num_top", [1, 3, 64])
def test_kernel_finds_what_sorting_finds(vocab_size: int, num_top: int, dtype: torch.dtype) -> None:
    num_top = min(num_top, vocab_size)
    rows = odd_rows(12, vocab_size).to(dtype)
    found, expected = top_rows(rows, num_top), reference(rows.float(), num_top)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_numbers_come_before_what_is_none() -> None:
    rows = torch.tensor([[float("nan"), 1.0, float("nan"), 2.0]])
    tokens, values = top_rows(rows, 3)
    assert tokens.tolist() == [[3, 1, 0]]
    assert values.tolist() == [[2.0, 1.0, float("-inf")]]


@pytest.mark.parametrize("vocab_size", [3, 1024, 5000])
def test_sums_are_those_of_torch(vocab_size: int) -> None:
    rows = odd_rows(9, vocab_size)
    torch.testing.assert_close(log_sums(rows), torch.logsumexp(rows, -1, keepdim=True))
    assert torch.equal(log_sums(rows)[4:5], log_sums(rows[4:5]))
    for dtype in KINDS:
        assert torch.equal(log_sums(rows.to(dtype)), log_sums(rows.to(dtype).float()))
    assert log_sums(torch.tensor([[1.0, float("nan")]])).isnan().all()


def test_small_numbers_count_beside_a_large_one() -> None:
    """As many as the largest vocabularies have; each alone is less than half the sum's last bit."""
    rows = torch.full((2, 1 << 18), -17.0)
    rows[:, 0] = 0.0
    exact = torch.logsumexp(rows.double(), -1, keepdim=True)
    assert exact.min() > 0.01
    assert (log_sums(rows).double() - exact).abs().max() <= log_sum_bound(rows)


def test_top_tokens_are_the_same_without_the_kernel() -> None:
    """The probabilities within what rounding allows both."""
    rows = odd_rows(40, 3000)
    asked = range(1, 40, 2)
    tokens, (ids, probs) = top_tokens(rows, asked, 20), top_probs(rows, asked, 20)
    with no_host():
        assert tokens == top_tokens(rows, asked, 20)
        expected_ids, expected = top_probs(rows, asked, 20)
    assert ids == expected_ids
    exact = torch.log_softmax(rows[list(asked)].double(), -1).gather(1, torch.tensor(ids))
    # A logit less the logarithm is rounded once more.
    bound = log_sum_bound(rows) + float(exact.abs().max()) * 2.0**-24
    for found in (probs, expected):
        assert (torch.tensor(found).double().log() - exact).abs().max() <= bound


def test_rows_that_lie_apart_are_read_as_rows_that_do_not() -> None:
    """As those of a vocabulary that is no multiple of what a kernel writes at once."""
    wide = torch.randn(40, 3008, generator=torch.Generator().manual_seed(4))
    rows, asked = wide[:, :3000], range(40)
    assert top_probs(rows, asked, 5) == top_probs(rows.contiguous(), asked, 5)
    assert top_tokens(rows, asked, 5) == top_tokens(rows.contiguous(), asked, 5)


def test_rows_that_are_named_are_looked_at_where_they_lie() -> None:
    logits = torch.randn(9, 3000, generator=torch.Generator().manual_seed(3))
    rows = [7, 0, 7, 4]
    for got, expected in zip(top_rows(logits, 5, rows), top_rows(logits[rows], 5), strict=True):
        assert torch.equal(got, expected)
