"""Weights rounded to 8 bits: how far they move. Bits of products are those of the kernel's tests."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine.kernels import grouped_product, integers
from engine.kernels.grouped_weight import GroupedWeight
from engine.kernels.packing import pack
from engine.weights.rounding.int8 import (
    GROUP,
    ZERO_POINT,
    computes_whole_numbers,
    is_exact,
    quantize_by_channel,
    quantize_weight,
)
from worlds.random_tensors import drawn

needs_integers = pytest.mark.skipif(not integers.can_multiply(), reason="this CPU has no AVX2")


def product_of(
    weight: GroupedWeight, rows: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    packed = pack([weight], len(weight.codes), weight.codes.shape[1], bias)
    return grouped_product.product(rows, packed, torch.float32)


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_halfway_to_the_next_step_at_most(dtype: torch.dtype, width: int) -> None:
    weight = drawn(5000, width)  # more channels than go through at once
    weight[:, ::GROUP] *= 50
    weight[7] = 0
    weight[8, :GROUP] = 0
    weight = weight.to(dtype)
    before = weight.clone()
    found, by_channel = quantize_weight(weight), quantize_by_channel(weight)
    assert torch.equal(weight, before)
    assert (found.codes.dtype, found.codes.shape) == (torch.uint8, weight.shape)
    assert found.codes[7].eq(ZERO_POINT).all()
    assert found.scales is not None
    assert found.channel_scales is not None
    steps = found.channel_scales[:, None] * found.scales.float()
    error = (found.dequantized() - weight.float()).abs()
    # Of the largest value half a step, and what float16 rounds of the step.
    assert (error <= (0.5 + 127 * 2**-11) * steps.repeat_interleave(GROUP, 1)[:, :width]).all()
    assert by_channel.scales is None
    assert by_channel.channel_scales is not None
    values = by_channel.codes.int() - by_channel.zero
    assert values.abs().amax(1).eq(127).sum() == 4999
    error = (by_channel.dequantized() - weight.float()).abs()
    assert (error <= 0.5001 * by_channel.channel_scales[:, None]).all()


@needs_integers
def test_the_result_is_near_that_of_the_weights_it_was_made_of() -> None:
    weight, bias, rows = drawn(96, 160), drawn(96, seed=1), drawn(20, 160, seed=2)
    expected = rows @ weight.T + bias
    got = product_of(quantize_weight(weight), rows, bias)
    assert float((got - expected).norm() / expected.norm()) < 0.02


@needs_integers
def test_sums_that_may_leave_32_bits_are_refused() -> None:
    longest = (2**31 - 1) // 127**2
    for in_features in (longest, longest + 1):
        with (
            nullcontext() if in_features == longest else pytest.raises(ValueError, match="32 bits")
        ):
            quantize_by_channel(torch.ones(1, in_features))


@needs_integers
def test_a_value_far_above_all_others_coarsens_its_own_group_alone() -> None:
    weight, rows = drawn(64, 256, seed=1), drawn(8, 256, seed=2)
    rows[:, 3] = 400.0
    weight[:, 3] = 0.0  # so that it is the others' rounding that is seen
    expected = rows @ weight.T
    grouped = (product_of(quantize_weight(weight), rows) - expected).norm() / expected.norm()
    by_row = product_of(quantize_by_channel(weight), rows)
    assert grouped < 0.4 * (by_row - expected).norm() / expected.norm()


def test_without_integer_products_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integers, "can_multiply", lambda: False)
    assert not computes_whole_numbers.__wrapped__()


def test_without_the_instruction_8_bits_are_not_what_is_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integers, "has_integer_products", lambda: False)
    assert not is_exact.__wrapped__()


@needs_integers
def test_the_probe_can_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where pairs of products are cut off at 16 bits."""
    assert computes_whole_numbers.__wrapped__()
    compute = grouped_product.product

    def cut_off(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
        return compute(rows, *rest).clamp(-(2.0**19), 2.0**19)

    monkeypatch.setattr(grouped_product, "product", cut_off)
    assert not computes_whole_numbers.__wrapped__()
