"""Rows times weights as floats, by a compiled kernel: one order of sums, whatever shares the call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import KINDS
from engine.kernels.float_dots import has_pair_products
from engine.kernels.float_product import can_gate, can_multiply, pack, pack_gated, reference
from engine.kernels.instructions import has_wide_registers
from engine.kernels.lanes import ACTIVATIONS
from worlds.random_tensors import drawn
from worlds.threads import threads

pytestmark = pytest.mark.skipif(
    not has_wide_registers(), reason="this CPU has no registers for so many sums"
)

# A type, and whether bf16 is multiplied by pairs.
WAYS = [
    (torch.float32, False),
    (torch.float16, False),
    (torch.bfloat16, False),
    pytest.param(
        torch.bfloat16,
        True,
        marks=pytest.mark.skipif(not has_pair_products(), reason="this CPU has no AVX512_BF16"),
    ),
]
every_way = pytest.mark.parametrize(("dtype", "has_pairs"), WAYS)
# Fewer features than are taken at once, as many, more; channels that fill blocks and that do not.
SHAPES = [(2, 64), (40, 97), (256, 128), (578, 200), (1100, 64)]
every_shape = pytest.mark.parametrize(("in_features", "out_features"), SHAPES)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("has_bias", [False, True])
@every_shape
def test_products_are_added_one_after_another(
    in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, rows = drawn(out_features, in_features, dtype=dtype), drawn(9, in_features, dtype=dtype)
    bias = drawn(out_features, dtype=dtype, seed=1) if has_bias else None
    got = pack(weight, bias, has_pairs=False).times(rows)
    assert torch.equal(got, reference(rows, weight, bias))


def test_sums_that_cancel_leave_the_rounding_errors_of_that_order() -> None:
    """In any other order they would leave others."""
    weight, rows = drawn(64, 600), drawn(7, 600, seed=1)
    rows[:, 300:], weight[:, 300:] = -rows[:, :300].flip(1), weight[:, :300].flip(1)
    got = pack(weight, None).times(rows)
    assert got.abs().max() > 0
    assert torch.equal(got, reference(rows, weight, None))


@pytest.mark.skipif(not has_pair_products(), reason="this CPU has no AVX512_BF16")
@pytest.mark.parametrize("has_bias", [False, True])
@every_shape
def test_pairs_are_as_near_as_two_roundings_a_feature_let_them(
    in_features: int, out_features: int, has_bias: bool
) -> None:
    weight = drawn(out_features, in_features, dtype=torch.bfloat16)
    rows = drawn(9, in_features, dtype=torch.bfloat16, seed=1)
    bias = drawn(out_features, dtype=torch.bfloat16, seed=2) if has_bias else None
    got = pack(weight, bias).times(rows).double()
    exact = rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    sizes = rows.double().abs() @ weight.double().abs().T
    in_sums = 2 * in_features * torch.finfo(torch.float32).eps * (sizes + exact.abs())
    in_result = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((got - exact).abs() <= 1.01 * (in_sums + in_result)).all()


@every_way
@every_shape
def test_a_row_has_the_same_bits_alone_and_at_every_place_among_300(
    in_features: int, out_features: int, dtype: torch.dtype, has_pairs: bool
) -> None:
    """Rows and weights that cancel, so that rounding hides nothing."""
    half = in_features // 2
    weight, rows = (
        drawn(out_features, in_features, dtype=dtype),
        drawn(300, in_features, dtype=dtype),
    )
    rows[:, half : 2 * half], weight[:, half : 2 * half] = -rows[:, :half], weight[:, :half]
    packed = pack(weight, None, has_pairs=has_pairs)
    alone = torch.cat([packed.times(row) for row in rows.split(1)])
    for count in (*range(2, 20), 31, 63, 64, 65, 129, 255, 300):
        for first in {0, 1, 5, 300 - count} & set(range(301 - count)):
            among = packed.times(rows[first : first + count])
            assert torch.equal(among, alone[first : first + count]), (count, first)


@every_way
def test_threads_share_blocks_and_rows_and_leave_no_trace(
    dtype: torch.dtype, has_pairs: bool
) -> None:
    packed = pack(drawn(900, 256, dtype=dtype), drawn(900, dtype=dtype), has_pairs=has_pairs)
    rows = drawn(200, 256, dtype=dtype, seed=1)
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append([packed.times(rows), packed.times(rows[:1])])
    for whole, first in results:
        assert torch.equal(whole, results[0][0])
        assert torch.equal(first, whole[:1])


def test_rows_may_lie_apart_and_be_none() -> None:
    packed, wide = pack(drawn(64, 32), None), drawn(5, 96, seed=1)
    assert packed.times(torch.empty(0, 32)).shape == (0, 64)
    for rows in (wide[:, 32:64], wide.T[:32].contiguous().T, wide[::2, :32]):
        assert torch.equal(packed.times(rows), packed.times(rows.clone().contiguous()))


@every_way
def test_what_is_no_number_stays_in_its_row(dtype: torch.dtype, has_pairs: bool) -> None:
    packed = pack(drawn(70, 64, dtype=dtype), None, has_pairs=has_pairs)
    rows = drawn(8, 64, dtype=dtype, seed=1)
    expected = packed.times(rows)
    rows[3, 5], rows[6, 63] = float("nan"), float("inf")
    got = packed.times(rows)
    assert got[3].isnan().all()
    assert not got[6].isfinite().any()
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@every_way
def test_a_gated_product_is_its_two_products_the_activation_and_their_product(
    dtype: torch.dtype, has_pairs: bool, has_bias: bool, activation: str
) -> None:
    if has_pairs != (dtype == torch.bfloat16 and has_pair_products()):
        pytest.skip("gated products are multiplied as the CPU can")
    gate, up = (
        pack(
            drawn(192, 64, dtype=dtype, seed=seed) / 8,
            drawn(192, dtype=dtype, seed=seed + 2) if has_bias else None,
        )
        for seed in (1, 2)
    )
    rows = drawn(70, 64, dtype=dtype)
    both = pack_gated(gate, up, activation)
    got = both.times(rows)
    act = F.silu if activation == "silu" else lambda x: F.gelu(x, approximate="tanh")
    expected = act(gate.times(rows).float()).to(dtype) * up.times(rows)
    # The activation's last bit may be another.
    torch.testing.assert_close(got, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert torch.equal(torch.cat([both.times(row) for row in rows.split(1)]), got)


def test_only_products_of_the_same_sizes_are_gated() -> None:
    gate = pack(drawn(128, 64), None)
    assert can_gate(gate, pack(drawn(128, 64), None))
    assert not can_gate(gate, pack(drawn(192, 64), None))
    assert not can_gate(gate, pack(drawn(128, 32), None))
    assert not can_gate(gate, pack(drawn(128, 64), drawn(128)))
    assert not can_gate(gate, pack(drawn(128, 64, dtype=torch.float16), None))
    assert not can_gate(pack(drawn(97, 64), None), pack(drawn(97, 64), None))


@pytest.mark.parametrize(
    ("in_features", "out_features", "dtype", "can"),
    [
        (64, 64, torch.bfloat16, True),
        (63, 64, torch.bfloat16, False),
        (63, 64, torch.float32, True),
        (63, 64, torch.float16, True),
        (64, 63, torch.float32, False),
        (64, 64, torch.float64, False),
    ],
)
def test_which_sizes_and_types_it_takes(
    in_features: int, out_features: int, dtype: torch.dtype, can: bool
) -> None:
    assert can_multiply(in_features, out_features, dtype) is can
