"""Products with weights in few bits: bits are those of the loop that the kernel says it is, whatever
rows, sizes, threads and instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from engine.kernels import byte_products, integers
from engine.kernels.grouped_product import product, reference
from engine.kernels.grouped_weight import GroupedWeight
from engine.kernels.instructions import has_feature
from engine.kernels.integers import can_multiply
from engine.kernels.lanes import ACTIVATIONS
from engine.kernels.look_up import look_up
from engine.kernels.packing import UnpackableError, can_join, join, normalized, pack
from engine.kernels.row_records import Gate, gate_rows
from engine.weights.rounding.int8 import quantize_by_channel, quantize_weight
from worlds.grouped_weights import SCHEMES, channels_of, drawn_weight
from worlds.random_tensors import drawn
from worlds.threads import threads

# The instructions, not the probe: what computes something else must fail here, and not be skipped.
needs_kernel = pytest.mark.skipif(not can_multiply(), reason="this CPU has no AVX2")
ROUNDINGS = {"by group": quantize_weight, "by channel": quantize_by_channel}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Product:
    """A weight's, packed."""

    def __init__(
        self,
        weight: GroupedWeight,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.packed = pack([weight], len(weight.codes), weight.codes.shape[1], bias)
        self._dtype = dtype

    def __call__(
        self, rows: torch.Tensor, gate: Gate | None = None, keeps_inputs: bool = False
    ) -> torch.Tensor:
        return product(rows, self.packed, self._dtype, gate, keeps_inputs)


def product_of(
    rows: torch.Tensor,
    weight: GroupedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    keeps_inputs: bool = False,
) -> torch.Tensor:
    total = reference(rows, normalized(weight), keeps_inputs)
    return (total if bias is None else total + bias).to(dtype)


def with_largest_codes(weight: GroupedWeight) -> GroupedWeight:
    """Returns it with channels whose codes are all as large as can be."""
    weight.codes[:40] = torch.tensor(weight.table).argmax() if weight.table else 2**weight.bits - 1
    return weight


def with_outliers(*shape: int, seed: int = 0) -> torch.Tensor:
    rows = drawn(*shape, seed=seed)
    rows[:, ::37] *= 60
    return rows


@pytest.mark.slow(by="scheme")
@needs_kernel
@pytest.mark.parametrize("keeps_inputs", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bits_of_every_scheme_are_those_of_the_loop(scheme: str, keeps_inputs: bool) -> None:
    weight, rows = drawn_weight(scheme, 104, 512), with_outliers(61, 512, seed=2)
    got = Product(weight)
    expected = product_of(rows, weight, None, torch.float32, keeps_inputs)
    for count in (*range(1, 9), 13, 16, 17, 19, *range(23, 28), 32, 61):
        assert torch.equal(got(rows[:count], None, keeps_inputs), expected[:count]), count
    assert torch.equal(got(rows[7:8], None, keeps_inputs), expected[7:8])


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_they_are_near_those_of_the_weights_that_codes_mean(scheme: str) -> None:
    weight, rows = drawn_weight(scheme, 64, 512), drawn(8, 512, seed=2)
    exact = rows.double() @ weight.dequantized().double().T
    got = Product(weight)
    kept = (got(rows, None, True) - exact).norm() / exact.norm()
    rounded = (got(rows) - exact).norm() / exact.norm()
    assert kept < 1e-5
    assert kept < rounded < 0.02


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_looked_up_are_the_weights(scheme: str) -> None:
    weight = drawn_weight(scheme, 104, 512)
    ids = torch.tensor([[0, 103, 7], [31, 32, 7]])
    packed = Product(weight).packed
    assert torch.equal(look_up(packed, ids, torch.float32), weight.dequantized()[ids])
    rounded = look_up(packed, ids, torch.bfloat16)
    assert torch.equal(rounded, weight.dequantized()[ids].bfloat16())


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_and_layers_side_by_side_are_packed_like_the_whole(scheme: str) -> None:
    weight, bias = drawn_weight(scheme, 160, 512), drawn(160, seed=1)
    rows = drawn(3, 512, seed=2)
    expected = Product(weight, bias)(rows)
    parts = [channels_of(weight, *each) for each in ((0, 64), (64, 160))]
    assert torch.equal(product(rows, pack(parts, 160, 512, bias), torch.float32), expected)
    ends = ((0, 64), (64, 128), (128, 160))
    layers = [
        Product(channels_of(weight, *each), bias[slice(*each)] if each[0] else None).packed
        for each in ends
    ]
    assert can_join(layers)
    got = product(rows, join(layers), torch.float32)
    assert torch.equal(got[:, 64:], expected[:, 64:])
    assert torch.equal(got[:, :64], Product(weight)(rows)[:, :64])


@needs_kernel
def test_weights_of_two_kinds_or_with_half_a_block_are_not_joined() -> None:
    one, other = (Product(drawn_weight(scheme, 64, 512)).packed for scheme in ("Q4_0", "Q4_1"))
    short = Product(drawn_weight("Q4_0", 40, 512)).packed
    assert not can_join([one, other])
    assert not can_join([short, one])
    assert can_join([one, short])


def test_what_would_be_rounded_or_has_no_kernel_is_not_packed() -> None:
    weight = drawn_weight("compressed-tensors", 32, 512)
    digits = 1 + torch.rand(weight.scales.shape)  # type: ignore[union-attr]
    for wrong in (
        weight._replace(scales=digits),
        weight._replace(bits=3),
        weight._replace(span=16, scales=torch.ones(32, 32).half()),
        drawn_weight("Q6_K", 32, 512)._replace(minima=torch.ones(32, 2).half()),
    ):
        with pytest.raises(UnpackableError):
            pack([wrong], 32, 512)


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("scheme", ROUNDINGS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (1040, 80), (16, 16), (320, 1056), (40, 33), (129, 7)])
def test_so_are_those_of_every_size_and_type(
    shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, scheme: str
) -> None:
    in_features, out_features = shape
    weight = ROUNDINGS[scheme](with_outliers(out_features, in_features))
    bias = drawn(out_features, seed=1) if has_bias else None
    rows = with_outliers(29, in_features, seed=2).to(dtype)
    rows[3] = 0
    rows[5, : in_features // 2], rows[5, -1] = 0, 1e-20  # so small that its scale is the smallest
    got = Product(weight, bias, dtype)
    expected = product_of(rows, weight, bias, dtype)
    for count in (*range(1, 15), 29):
        assert torch.equal(got(rows[:count]), expected[:count]), count
    assert torch.equal(got(rows[7:8]), expected[7:8])
    kept = product_of(rows[:2], weight, bias, dtype, keeps_inputs=True)
    assert torch.equal(got(rows[:2], None, True), kept)


@needs_kernel
@pytest.mark.parametrize("scheme", ROUNDINGS)
@pytest.mark.parametrize("in_features", [1024, 8192])
def test_so_are_those_of_sums_that_no_float_holds(in_features: int, scheme: str) -> None:
    codes = torch.full((32, in_features), 255, dtype=torch.uint8)
    codes[:, :32] -= torch.eye(32, dtype=torch.uint8)
    groups = torch.ones(32, in_features // 32, dtype=torch.float16)
    span, scales = (32, groups) if scheme == "by group" else (in_features, None)
    weight = GroupedWeight(codes, 8, 128, span, scales, channel_scales=torch.ones(32))
    rows = torch.full((40, in_features), 127.0)
    rows[:, 8:48] -= torch.eye(40)
    rows[1] *= -1
    got = Product(weight)(rows)
    assert torch.equal(got, product_of(rows, weight, None, torch.float32))
    exact = rows.double() @ weight.dequantized().double().T
    assert exact.abs().max() > 2**23
    assert ((got - exact).abs() <= 2.0**-20 * exact.abs()).all()


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("instruction", ["NARROW", "PAIRS"])
def test_narrow_instructions_have_the_same_bits(tmp_path: Path, instruction: str) -> None:
    if instruction == "NARROW" and not integers.has_integer_products():
        pytest.skip("this CPU has no VNNI")
    schemes = ("Q4_0", "Q4_K", "Q5_1", "Q6_K", "Q8_0", "MXFP4", "W8A8")
    weights = [with_largest_codes(drawn_weight(scheme, 80, 512)) for scheme in schemes]
    rows = with_outliers(29, 512, seed=2)
    rows[4], rows[9] = 1.0, -1.0
    torch.save(([tuple(each) for each in weights], rows), tmp_path / "given.pt")
    here = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "worlds.narrow_products", str(tmp_path), instruction]
    subprocess.run(command, env=os.environ | here, check=True)
    products, instructions = torch.load(tmp_path / "got.pt")
    expected = {integers.BYTE_SUMS, getattr(byte_products, instruction)}
    if instruction == "PAIRS":
        expected.add(byte_products.BYTE_PAIRS)
    wide = has_feature("avx512bw")  # MXFP4's table
    expected.add("llvm.x86.avx512.pshuf.b.512" if wide else "llvm.x86.avx2.pshuf.b")
    assert instructions == sorted(expected)
    for weight, got in zip(weights, products, strict=True):
        assert torch.equal(got, product_of(rows, weight, None, torch.float32))


# --- gated ---

STEP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SMALLEST = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-24}
GATES = [Gate(activation, is_first) for activation in ACTIVATIONS for is_first in (True, False)]


def gated_by_torch(rows: torch.Tensor, gate: Gate) -> torch.Tensor:
    first, second = rows.chunk(2, 1)[:: 1 if gate.is_first else -1]
    if gate.activation == "silu":
        return F.silu(first) * second
    return F.gelu(first, approximate="tanh") * second


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (7, 2080), (300, 512)])
def test_gated_values_are_torchs_but_for_a_step_and_the_same_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, gate: Gate
) -> None:
    rows = (2 * drawn(*shape, seed=2)).to(dtype)
    got, expected = gate_rows(rows, gate), gated_by_torch(rows, gate)
    assert (got.dtype, got.shape) == (dtype, expected.shape)
    # Of the activation, which is rounded before it is a factor; below 0 it may be what 1 - 1 left.
    factor = rows.chunk(2, 1)[1 if gate.is_first else 0].float().abs()
    tolerance = 2 * STEP[dtype] * expected.float().abs() + 1e-6 * factor + SMALLEST[dtype]
    assert ((got.float() - expected.float()).abs() <= tolerance).all()
    if dtype != torch.float32:  # values next to a step's edge are few
        assert (got == expected).float().mean() > 0.97
    assert torch.equal(torch.cat([gate_rows(row, gate) for row in rows.split(1)]), got)
    with threads(3):
        assert torch.equal(gate_rows(torch.cat([rows, rows], 1)[:, : shape[1]], gate), got)


@needs_kernel
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rows_have_the_bits_of_gating_first(dtype: torch.dtype, gate: Gate) -> None:
    weight, bias = quantize_weight(drawn(80, 1040)), drawn(80, seed=1)
    multiply = Product(weight, bias, dtype)
    rows = drawn(40, 2080, seed=2).to(dtype)
    gated = gate_rows(rows, gate)
    expected = product_of(gated, weight, bias, dtype)
    for count in (1, 2, 3, 4, 5, 11, 40):
        assert torch.equal(multiply(rows[:count], gate), expected[:count]), count
        assert torch.equal(multiply(gated[:count]), expected[:count]), count
    assert torch.equal(multiply(rows[7:8], gate), expected[7:8])


# --- of rows as they are, and gated first ---

EVERY_WAY = pytest.mark.parametrize("gate", [None, *GATES])


def rows_for(gate: Gate | None, *shape: int) -> torch.Tensor:
    num_rows, num_features = shape
    return drawn(num_rows, num_features * (2 if gate else 1), seed=2)


def plain(rows: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """Returns the rows that are multiplied."""
    return gate_rows(rows.contiguous(), gate) if gate else rows.contiguous()


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("gate", [None, Gate("silu", True)])
def test_threads_do_not_change_them(gate: Gate | None, num_threads: int) -> None:
    weight = quantize_weight(drawn(448, 512))
    multiply = Product(weight)
    rows = rows_for(gate, 40 if gate else 9, 512)
    expected = product_of(plain(rows, gate), weight, None, torch.float32)
    with threads(num_threads):
        for _ in range(50):
            assert torch.equal(multiply(rows, gate), expected)


@pytest.mark.slow
@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 3])
def test_neither_do_they_where_threads_share_blocks_and_rows(num_threads: int) -> None:
    weight = drawn_weight("Q4_1", 80, 1600)
    multiply = Product(weight, dtype=torch.bfloat16)
    rows = with_outliers(800, 1600, seed=2)
    expected = product_of(rows, weight, None, torch.bfloat16)
    with threads(num_threads):
        for count in (31, 384, 800):
            assert torch.equal(multiply(rows[:count]), expected[:count]), count
            assert torch.equal(multiply(rows[800 - count :]), expected[800 - count :]), count


@needs_kernel
@EVERY_WAY
def test_rows_in_a_wider_tensor_and_columns_as_rows(gate: Gate | None) -> None:
    weight = quantize_weight(drawn(32, 64))
    multiply = Product(weight)
    wide = rows_for(gate, 5, 64)
    for rows in (torch.cat([wide, wide, wide], 1)[:, 16 : 16 + wide.shape[1]], wide.T.clone().T):
        expected = product_of(plain(rows, gate), weight, None, torch.float32)
        assert torch.equal(multiply(rows, gate), expected)


@needs_kernel
@EVERY_WAY
@pytest.mark.parametrize("num_rows", [3, 33])
@pytest.mark.parametrize("scheme", [*ROUNDINGS, "Q4_1"])
def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice(
    scheme: str, num_rows: int, gate: Gate | None
) -> None:
    rounded = ROUNDINGS.get(scheme)
    multiply = Product(rounded(drawn(32, 64)) if rounded else drawn_weight(scheme, 32, 64))
    rows = rows_for(gate, num_rows, 64)
    alone = multiply(rows, gate)
    for value in (torch.nan, torch.inf):
        rows[1, 5] = value
        if gate:
            rows[1, 5 + 64] = value
        got = multiply(rows, gate)
        assert not got[1].isfinite().any()
        assert torch.equal(got[::2], alone[::2])
