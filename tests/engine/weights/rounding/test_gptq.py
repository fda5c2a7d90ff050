"""GPTQ's arithmetic, against rounding to the nearest and against what it has to find exactly."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.grouped_weight import GroupedWeight
from engine.weights.rounding.gptq import round_by_inputs
from worlds.grouped_weights import round_to_nearest


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(found: GroupedWeight, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    """Returns the change of the layer's output, as a share of its size."""
    wrong = inputs @ (found.dequantized() - weight).T
    return float(wrong.norm() / (inputs @ weight.T).norm())


@pytest.mark.parametrize("in_features", [96, 320, 150])
def test_where_inputs_go_together_outputs_change_half_as_much(in_features: int) -> None:
    weight = drawn(0, 48, in_features) * 0.1
    inputs = drawn(1, 1000, 24) @ drawn(2, 24, in_features) + 0.3 * drawn(3, 1000, in_features)
    found = round_by_inputs(weight, inputs.T @ inputs)
    assert found.codes.shape == weight.shape
    held_out = drawn(4, 500, 24) @ drawn(2, 24, in_features) + 0.3 * drawn(5, 500, in_features)
    nearest = error(round_to_nearest(weight), weight, held_out)
    assert error(found, weight, held_out) < nearest / 2


def test_where_no_inputs_go_together_it_rounds_to_the_nearest() -> None:
    weight = drawn(0, 24, 96)
    hessian = torch.diag(drawn(1, 96).square() + 0.1)
    found, nearest = round_by_inputs(weight, hessian, shares=(1.0,)), round_to_nearest(weight)
    assert torch.equal(found.codes, nearest.codes)
    assert torch.equal(found.dequantized(), nearest.dequantized())
    steps = nearest.scales.float().repeat_interleave(32, 1)  # type: ignore[union-attr]
    # Half a step, and at a group's ends another half: the zero point is a whole number.
    assert bool(((nearest.dequantized() - weight).abs() <= 1.01 * steps).all())


def test_weights_that_lie_on_a_grid_are_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (40, 128), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, 15  # a group's ends are seen
    zeros = torch.randint(0, 16, (40, 4), generator=generator)
    scales = torch.randint(128, 256, (40, 4), generator=generator) * 2.0**-12
    weight = scales.repeat_interleave(32, 1) * (codes - zeros.repeat_interleave(32, 1))
    inputs = drawn(1, 300, 8) @ drawn(2, 8, 128) + 0.1 * drawn(3, 300, 128)
    for found in (round_to_nearest(weight), round_by_inputs(weight, inputs.T @ inputs)):
        assert torch.equal(found.dequantized(), weight)
        assert torch.equal(found.codes.long(), codes)
        assert found.zeros is not None
        assert torch.equal(found.zeros.long(), zeros)


def test_minima_and_steps_of_any_size_are_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (40, 128), generator=generator)
    codes[:, ::32], codes[:, 1::32] = 0, 15
    scales = torch.randint(1024, 2048, (40, 4), generator=generator) * 2.0**-16
    minima = torch.randint(-2048, 2048, (40, 4), generator=generator) * 2.0**-13
    weight = scales.repeat_interleave(32, 1) * codes + minima.repeat_interleave(32, 1)
    inputs = drawn(1, 300, 8) @ drawn(2, 8, 128) + 0.1 * drawn(3, 300, 128)
    for found in (
        round_to_nearest(weight, has_minima=True),
        round_by_inputs(weight, inputs.T @ inputs, has_minima=True),
    ):
        assert torch.equal(found.codes.long(), codes)
        torch.testing.assert_close(found.dequantized(), weight, rtol=0, atol=2e-5)
    assert float((round_to_nearest(weight).dequantized() - weight).abs().max()) > 1e-3


def test_minima_serve_groups_that_lie_apart_from_zero() -> None:
    weight = 0.02 * drawn(0, 48, 320) + 0.2 * drawn(1, 48, 10).repeat_interleave(32, 1)
    inputs = drawn(2, 1000, 24) @ drawn(3, 24, 320) + 0.3 * drawn(4, 1000, 320)
    hessian = inputs.T @ inputs
    found = round_by_inputs(weight, hessian, has_minima=True)
    assert found.zeros is None
    zeros = error(round_by_inputs(weight, hessian), weight, inputs)
    assert error(found, weight, inputs) < zeros / 2


def test_a_smaller_range_is_taken_where_it_loses_less() -> None:
    """A far value that no input weighs costs the others nothing."""
    weight = drawn(0, 16, 64) * 0.1
    weight[:, 5], weight[:, 40] = 0.4, -0.4
    inputs = drawn(1, 400, 64)
    inputs[:, [5, 40]] *= 0.01
    hessian = inputs.T @ inputs
    whole = error(round_by_inputs(weight, hessian, shares=(1.0,)), weight, inputs)
    assert error(round_by_inputs(weight, hessian), weight, inputs) < 0.85 * whole


@pytest.mark.parametrize("size", [0.0, 1e-9, 1e-6, 3e4])
def test_numbers_of_any_size_have_finite_steps(size: float) -> None:
    weight = size * drawn(0, 8, 64).clamp(-2, 2)
    found = round_to_nearest(weight)
    assert found.scales is not None
    assert bool((found.scales > 0).all())
    assert bool(found.dequantized().isfinite().all())
    assert float((found.dequantized() - weight).abs().max()) <= max(0.4 * size, 2.0**-24)


def test_inputs_that_never_vary_or_never_come_are_survived() -> None:
    weight = drawn(0, 8, 64)
    ones = torch.ones(64, 64) * 1e4  # of rank one
    assert bool(round_by_inputs(weight, ones).dequantized().isfinite().all())
    unread = torch.zeros(64, 64)
    assert torch.equal(
        round_by_inputs(weight, unread, shares=(1.0,)).codes, round_to_nearest(weight).codes
    )


def test_scales_are_held_by_both_types_of_16_bits() -> None:
    found = round_to_nearest(drawn(0, 64, 96) * 0.03)
    assert found.scales is not None
    assert torch.equal(found.scales.bfloat16().float(), found.scales.float())
