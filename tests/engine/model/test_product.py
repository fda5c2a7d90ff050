"""Products that layers share, and inputs in another order."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.integers import can_multiply
from engine.kernels.packing import pack
from engine.kernels.row_records import Gate, gate_rows
from engine.model.layers import GroupedLinear
from engine.model.product import GroupedProduct, can_join, join_products
from engine.weights.rounding.int8 import quantize_weight
from worlds.random_tensors import drawn

pytestmark = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")


def product_of(
    weight: torch.Tensor, bias: torch.Tensor | None = None, order: torch.Tensor | None = None
) -> GroupedProduct:
    packed = pack([quantize_weight(weight)], len(weight), weight.shape[1], bias)
    return GroupedProduct(packed, torch.float32, order)


def test_layers_that_share_an_input_share_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(product: GroupedProduct, rows: torch.Tensor) -> torch.Tensor:
        calls.append((product, len(rows)))
        return compute(product, rows)

    compute = GroupedProduct.__call__
    monkeypatch.setattr(GroupedProduct, "__call__", counted)
    weights = [drawn(size, 64, seed=size) for size in (64, 32, 8)]
    biases = (None, drawn(32), None)
    alone = [product_of(w, b) for w, b in zip(weights, biases, strict=True)]
    assert can_join(alone)
    product = join_products(alone)
    layers = [
        GroupedLinear(product, size, "", "", first) for size, first in ((64, 0), (32, 64), (8, 96))
    ]
    for rows in (drawn(1, 3, 64), drawn(2, 2, 64, seed=5)):
        outputs = [layer(rows) for layer in layers]
        for got, each in zip(outputs, alone, strict=True):
            assert torch.equal(got, each(rows.view(-1, 64)).view(*rows.shape[:2], -1))
    assert [count for used, count in calls if used is product] == [3, 4]
    assert [layer(drawn(0, 64)).shape for layer in layers] == [(0, 64), (0, 32), (0, 8)]
    # Called with another input each, they compute what is theirs.
    a, b = drawn(2, 64, seed=8), drawn(2, 64, seed=9)
    mixed = [layers[0](a), layers[1](b), layers[2](a)]
    assert torch.equal(mixed[2], alone[2](a))
    assert torch.equal(mixed[1], alone[1](b))


@pytest.mark.parametrize("gate", [None, Gate("silu", True)])
def test_columns_may_be_for_features_in_another_order(gate: Gate | None) -> None:
    weight, order = drawn(32, 64), torch.randperm(64, generator=torch.Generator().manual_seed(3))
    ordered = product_of(weight[:, order], order=order)
    rows = drawn(5, 128 if gate else 64, seed=2)
    given = gate_rows(rows, gate) if gate else rows
    assert torch.equal(ordered(rows, gate), product_of(weight[:, order])(given[:, order]))
    assert not can_join([ordered, product_of(weight)])
    assert can_join([ordered, product_of(drawn(8, 64), order=order.clone())])
    twice = join_products([ordered, product_of(drawn(8, 64), order=order.clone())])
    assert torch.equal(twice(rows, gate)[:, :32], ordered(rows, gate))


def test_models_may_read_the_weights_of_their_layers() -> None:
    """As routers are read, and the type of a head."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    weights = [drawn(size, 64, seed=size) for size in (64, 32)]
    product = join_products([product_of(weight[:, order], order=order) for weight in weights])
    for first, weight in zip((0, 64), weights, strict=True):
        layer = GroupedLinear(product, len(weight), "", "", first)
        # Codes are made group by group, of features in the order in which they are multiplied.
        columns = quantize_weight(weight[:, order]).dequantized()
        assert torch.equal(layer.weight[:, order], columns)
        assert layer.weight is layer.weight
        assert layer.weight.dtype == torch.float32
