"""Rows by experts: every pair gets what its row alone gets from its expert's matrix, to the bit, and a
row's experts are added in the order in which they were chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.kernels import float_product, grouped_product, packing, routes, row_records
from engine.kernels.integers import can_multiply
from worlds.grouped_weights import channels_of, drawn_weight
from worlds.random_tensors import drawn
from worlds.threads import threads

EXPERTS = 5
needs_kernel = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")


def chosen_for(num_rows: int, num_chosen: int, num_experts: int = EXPERTS) -> torch.Tensor:
    """Experts, most rows' among the first few, and one beyond the last for some."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = torch.logspace(0, -1.5, num_experts + 1).repeat(num_rows, 1)
    return torch.multinomial(weights, num_chosen, generator=generator)


@pytest.mark.parametrize("num_rows", [1, 2, 24, 400])
def test_every_pair_has_its_place_in_a_segment_of_its_expert(num_rows: int) -> None:
    chosen = chosen_for(num_rows, 3)
    found = routes.route(chosen, EXPERTS)
    flat, seen = chosen.flatten().tolist(), []
    for expert, first, end in found.segments[1:].view(-1, 3)[: found.segments[0]].tolist():
        pairs = found.order[first:end].tolist()
        assert 0 < len(pairs) <= routes.MOST_PAIRS
        assert {flat[pair] for pair in pairs} == {expert}
        assert found.rows[first:end].tolist() == [pair // 3 for pair in pairs]
        for at, pair in enumerate(pairs, first):
            place = found.places[3 * pair : 3 * pair + 3].tolist()
            assert place == [at, first, end]
        seen += pairs
    assert sorted(seen) == [pair for pair, expert in enumerate(flat) if expert < EXPERTS]
    nowhere = [pair for pair, expert in enumerate(flat) if expert == EXPERTS]
    assert not any(found.places.view(-1, 3)[nowhere].flatten().tolist())


@pytest.mark.parametrize("features", [64, 41])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_loop(features: int, dtype: torch.dtype) -> None:
    chosen, weights = chosen_for(30, 3), drawn(30, 3)
    outputs = drawn(90, features, seed=1).to(dtype)
    found = routes.route(chosen, EXPERTS)
    kept = weights.masked_fill(chosen == EXPERTS, 0)
    expected = routes.reference_sum(outputs.view(30, 3, -1), kept).to(dtype)
    with threads(2):
        assert torch.equal(routes.weighted_sum(outputs, weights, found, dtype), expected)


@needs_kernel
@pytest.mark.parametrize("keeps_inputs", [False, True])
@pytest.mark.parametrize("scheme", ["Q4_K", "MXFP4", "W8A8"])
def test_a_pair_in_few_bits_has_the_bits_of_its_row_alone(scheme: str, keeps_inputs: bool) -> None:
    whole, bias = drawn_weight(scheme, 40 * EXPERTS, 512), drawn(EXPERTS, 40)
    parts = [channels_of(whole, 40 * each, 40 * each + 40) for each in range(EXPERTS)]
    packed = packing.pack(iter(parts), 40, 512, bias, EXPERTS)
    singles = [packing.pack([part], 40, 512, bias[each]) for each, part in enumerate(parts)]
    rows = drawn(90, 512, seed=2)
    gate = row_records.Gate("silu", True)

    def multiply(rows: torch.Tensor, packed: Any, gate: Any, *found: Any) -> torch.Tensor:
        return grouped_product.product(rows, packed, torch.float32, gate, keeps_inputs, *found)

    for num_rows in (1, 7, 90):
        chosen = chosen_for(num_rows, 2)
        found = routes.route(chosen, EXPERTS)
        with threads(2):
            got = multiply(rows[:num_rows], packed, None, found)
            # The second product of experts reads a row for each pair, and gates it.
            halves = torch.cat([rows[found.order.sort()[1] % 90] for _ in range(2)], 1)
            gated = multiply(halves, packed, gate, found)
        for expert in range(EXPERTS):
            mine = (chosen.flatten() == expert).nonzero()[:, 0]
            assert torch.equal(got[mine], multiply(rows[mine // 2], singles[expert], None))
            assert torch.equal(gated[mine], multiply(halves[mine], singles[expert], gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("out_features", [64, 104])
def test_a_pair_in_floats_has_the_bits_of_its_row_alone(
    out_features: int, dtype: torch.dtype
) -> None:
    weights, bias = drawn(EXPERTS, out_features, 96).to(dtype), drawn(EXPERTS, out_features)
    packed = float_product.pack_experts(iter(weights), bias, EXPERTS)
    rows = drawn(90, 96, seed=2).to(dtype)
    for num_rows in (1, 90):
        chosen = chosen_for(num_rows, 2)
        found = routes.route(chosen, EXPERTS)
        with threads(2):
            got = packed.times(rows[:num_rows], found)
        for expert in range(EXPERTS):
            mine = (chosen.flatten() == expert).nonzero()[:, 0]
            alone = float_product.pack(weights[expert], bias[expert]).times(rows[mine // 2])
            assert torch.equal(got[mine], alone)
