"""Layers in 8 bits: what they round, and what they share. Bits are those of the kernel's tests."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine.kernels import int8_product
from engine.model.int8 import (
    GROUP,
    Int8Product,
    Int8Weight,
    is_exact,
    quantize_by_channel,
    quantize_weight,
)
from engine.model.layers import Int8Linear

needs_int8 = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def restored(weight: Int8Weight) -> torch.Tensor:
    """``[out_features, in_features]`` float32."""
    scales = weight.scales[:, None]
    if weight.group_scales is not None:
        spread = weight.group_scales.float().repeat_interleave(GROUP, 1)
        scales = scales * spread[:, : weight.values.shape[1]]
    return weight.values * scales


def product_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Product:
    return Int8Product([quantize_weight(weight)], [bias], torch.float32)


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
    assert (found.values.dtype, found.values.shape) == (torch.int8, weight.shape)
    assert not found.values[7].any()
    assert found.group_scales is not None
    steps = found.scales[:, None] * found.group_scales.float()
    error = (restored(found) - weight.float()).abs()
    # Of the largest value half a step, and what float16 rounds of the step.
    assert (error <= (0.5 + 127 * 2**-11) * steps.repeat_interleave(GROUP, 1)[:, :width]).all()
    assert by_channel.group_scales is None
    assert by_channel.values.abs().amax(1).eq(127).sum() == 4999
    error = (restored(by_channel) - weight.float()).abs()
    assert (error <= 0.5001 * by_channel.scales[:, None]).all()


@needs_int8
def test_the_result_is_near_that_of_the_weights_it_was_made_of() -> None:
    weight, bias, rows = drawn(96, 160), drawn(96, seed=1), drawn(20, 160, seed=2)
    expected = rows @ weight.T + bias
    got = product_of(weight, bias)(rows)
    assert float((got - expected).norm() / expected.norm()) < 0.02


@needs_int8
def test_layers_that_share_an_input_share_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(product: Int8Product, rows: torch.Tensor) -> torch.Tensor:
        calls.append((product, len(rows)))
        return compute(product, rows)

    compute = Int8Product.__call__
    monkeypatch.setattr(Int8Product, "__call__", counted)
    weights = [drawn(size, 64, seed=size) for size in (32, 8, 8)]
    product = Int8Product(
        [quantize_weight(w) for w in weights], [None, drawn(8), None], torch.float32
    )
    columns = ((0, 32), (32, 8), (40, 8))
    layers = [Int8Linear(product, *each) for each in columns]
    for rows in (drawn(1, 3, 64), drawn(2, 2, 64, seed=5)):
        outputs = [layer(rows) for layer in layers]
        alone = [
            product_of(w, b)(rows.view(-1, 64)).view(*rows.shape[:2], -1)
            for w, b in zip(weights, (None, drawn(8), None), strict=True)
        ]
        for got, expected in zip(outputs, alone, strict=True):
            assert torch.equal(got, expected)
    assert [count for used, count in calls if used is product] == [3, 4]
    # Called with another input each, they compute what is theirs.
    a, b = drawn(2, 64, seed=8), drawn(2, 64, seed=9)
    mixed = [layers[0](a), layers[1](b), layers[2](a)]
    assert torch.equal(mixed[2], product_of(weights[2])(a))
    assert torch.equal(mixed[1], product_of(weights[1], drawn(8))(b))


@needs_int8
def test_sums_that_may_leave_32_bits_are_refused() -> None:
    longest = (2**31 - 1) // 127**2
    for in_features in (longest, longest + 1):
        weight = quantize_by_channel(torch.ones(1, in_features))
        with (
            nullcontext() if in_features == longest else pytest.raises(ValueError, match="32 bits")
        ):
            Int8Product([weight], [None], torch.float32)


@needs_int8
def test_a_value_far_above_all_others_coarsens_its_own_group_alone() -> None:
    weight, rows = drawn(64, 256, seed=1), drawn(8, 256, seed=2)
    rows[:, 3] = 400.0
    weight[:, 3] = 0.0  # so that it is the others' rounding that is seen
    expected = rows @ weight.T
    grouped = (product_of(weight)(rows) - expected).norm() / expected.norm()
    by_row = Int8Product([quantize_by_channel(weight)], [None], torch.float32)(rows)
    assert grouped < 0.4 * (by_row - expected).norm() / expected.norm()


def test_without_the_instruction_nothing_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_product, "can_multiply", lambda: False)
    assert not is_exact.__wrapped__()


@needs_int8
def test_the_probe_can_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where pairs of products are cut off at 16 bits."""
    assert is_exact.__wrapped__()
    call = Int8Product.__call__

    def cut_off(product: Any, rows: torch.Tensor) -> torch.Tensor:
        return call(product, rows).clamp(-(2.0**19), 2.0**19)

    monkeypatch.setattr(Int8Product, "__call__", cut_off)
    assert not is_exact.__wrapped__()
