"""Products in 8 bits are what integer arithmetic says, whatever shares the call."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model import int8
from engine.model.int8 import (
    MOST_IN_FEATURES,
    Int8Linear,
    Int8Product,
    Int8Rows,
    Int8Weight,
    SharedProduct,
    StoredInt8Linear,
    is_exact,
    quantize_rows,
    quantize_weight,
)

needs_int8 = pytest.mark.skipif(not is_exact(64, 64), reason="this CPU has neither VNNI nor AMX")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Product:
    return Int8Product([quantize_weight(weight)], [bias], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_halfway_to_the_next_step_at_most(dtype: torch.dtype) -> None:
    weight = drawn(5000, 24).to(dtype)  # more channels than go through at once
    before = weight.clone()
    values, scales = quantize_weight(weight)
    assert torch.equal(weight, before)
    assert values.dtype == torch.int8
    assert values.abs().amax(1).eq(127).all()
    error = (values * scales[:, None] - weight.float()).abs()
    assert (error <= 0.5001 * scales[:, None]).all()


def test_a_row_is_halfway_to_the_next_step_at_most() -> None:
    rows = torch.cat([drawn(6, 40), 1e6 * drawn(1, 40), torch.zeros(1, 40)])
    values, scales = quantize_rows(rows)
    assert values.dtype == torch.uint8
    error = ((values.float() - 128) * scales - rows).abs()
    assert (error <= 0.5001 * scales).all()
    assert values[-1].eq(128).all()


@given(rows=st.integers(1, 70), start=st.integers(0, 60), width=st.sampled_from([16, 40, 129]))
def test_a_row_is_quantised_alike_in_any_company(rows: int, start: int, width: int) -> None:
    every = drawn(140, width).bfloat16()
    values, scales = quantize_rows(every)
    part = slice(start, start + rows)
    some = quantize_rows(every[part])
    assert torch.equal(some.values, values[part])
    assert torch.equal(some.scales, scales[part])


@needs_int8
@pytest.mark.parametrize("shape", [(64, 48), (200, 33), (384, 640), (1024, 96)])
def test_sums_are_those_of_integers(shape: tuple[int, int]) -> None:
    in_features, out_features = shape
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-127, 128, (out_features, in_features), generator=generator)
    rows = torch.randint(0, 256, (67, in_features), generator=generator)
    product = Int8Product(
        [Int8Weight(weight.to(torch.int8), torch.ones(out_features))], [None], torch.float32
    )
    got = product.of_int8(Int8Rows(rows.to(torch.uint8), torch.ones(67, 1)))
    exact = (rows - 128) @ weight.T
    assert exact.abs().max() < 2**24  # float32 holds them
    assert torch.equal(got, exact.float())


@needs_int8
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_company(bias: bool, dtype: torch.dtype) -> None:
    weight = quantize_weight(drawn(96, 160))
    added = drawn(96, seed=1) if bias else None
    product = Int8Product([weight], [added], dtype)
    rows = drawn(300, 160, seed=2).to(dtype)
    every = product(rows)
    assert every.dtype == dtype
    for count in (1, 2, 3, 7, 16, 33, 64, 129, 300):
        for start in {0, 5, 300 - count}:
            part = slice(start, start + count)
            assert torch.equal(product(rows[part]), every[part]), (count, start)


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
    shared = SharedProduct(product, 3)
    first = (0, 32, 40)
    layers = [
        Int8Linear(shared, start, w.shape[0]) for start, w in zip(first, weights, strict=True)
    ]
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


def test_what_a_checkpoint_stores_is_what_it_computes() -> None:
    layer = StoredInt8Linear(24, 10, True, torch.float32)
    values, scales = quantize_weight(drawn(10, 24))
    layer.weight.data.copy_(values)
    layer.weight_scale.data.copy_(scales[:, None])
    assert layer.bias is not None
    layer.bias.data.copy_(drawn(10, seed=1))
    stored = layer.stored()
    assert torch.equal(stored.values, values)
    assert torch.equal(stored.scales, scales)
    rows = drawn(3, 24, seed=2)
    expected = rows @ (values * scales[:, None]).T + layer.bias
    torch.testing.assert_close(layer(rows), expected)


def test_the_longest_sum_fits_into_32_bits() -> None:
    assert MOST_IN_FEATURES * 128 * 127 < 2**31 <= (MOST_IN_FEATURES + 1) * 128 * 127


def test_the_probe_can_say_no(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CPUs without VNNI do: pairs of products are cut off at 16 bits."""
    int8._is_exact.cache_clear()

    def cut_off(rows: torch.Tensor, packed: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        pairs = rows.double()[:, None, 0::2] * packed.double()[None, :, 0::2]
        pairs = pairs + rows.double()[:, None, 1::2] * packed.double()[None, :, 1::2]
        return (pairs.clamp(-(2**15), 2**15 - 1).sum(2) - 128 * packed.double().sum(1)).float()

    def whole(rows: torch.Tensor, packed: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return ((rows.double() - 128) @ packed.double().T).float()

    def by_company(rows: torch.Tensor, packed: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return whole(rows, packed) * (1.0 if len(rows) > 3 else 1.0000002)

    monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", lambda values, _: values)
    answers = {}
    for product in (whole, cut_off, by_company):
        monkeypatch.setattr(int8, "_product", product)
        int8._is_exact.cache_clear()
        answers[product.__name__] = is_exact(32, 6)
    int8._is_exact.cache_clear()
    assert answers == {"whole": True, "cut_off": False, "by_company": False}
