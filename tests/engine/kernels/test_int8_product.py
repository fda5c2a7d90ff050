"""Products in 8 bits: bits are those of the loop that the kernel says it is, whatever rows, sizes and
threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch
import torch.nn.functional as F

from engine.kernels import integers
from engine.kernels.instructions import has_feature
from engine.kernels.int8_product import Gate, can_multiply, gate_rows, reference
from engine.kernels.lanes import ACTIVATIONS
from engine.model.int8 import (
    GROUP,
    Int8Product,
    Int8Weight,
    quantize_by_channel,
    quantize_weight,
)
from worlds.threads import threads

# The instruction, not the probe: what computes something else must fail here, and not be skipped.
needs_kernel = pytest.mark.skipif(not can_multiply(), reason="this CPU has no VNNI")
SCHEMES = {"by group": quantize_weight, "by channel": quantize_by_channel}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product_of(
    rows: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    in_features = weight.values.shape[1]
    group = GROUP if weight.group_scales is not None else in_features + -in_features % GROUP
    total = reference(rows, *weight, group)
    return (total if bias is None else total + bias).to(dtype)


def with_outliers(*shape: int, seed: int = 0) -> torch.Tensor:
    rows = drawn(*shape, seed=seed)
    rows[:, ::37] *= 60
    return rows


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (1040, 80), (16, 16), (320, 1056), (40, 33), (129, 7)])
def test_bits_are_those_of_the_loop(
    shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, scheme: str
) -> None:
    in_features, out_features = shape
    weight = SCHEMES[scheme](with_outliers(out_features, in_features))
    bias = drawn(out_features, seed=1) if has_bias else None
    rows = with_outliers(29, in_features, seed=2).to(dtype)
    rows[3] = 0
    rows[5, : in_features // 2], rows[5, -1] = 0, 1e-20  # so small that its scale is the smallest
    product = Int8Product([weight], [bias], dtype)
    expected = product_of(rows, weight, bias, dtype)
    for count in (*range(1, 15), 29):
        assert torch.equal(product(rows[:count]), expected[:count]), count
    assert torch.equal(product(rows[7:8]), expected[7:8])


@needs_kernel
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("in_features", [1024, 8192])
def test_so_are_those_of_sums_that_no_float_holds(in_features: int, scheme: str) -> None:
    values = torch.full((32, in_features), 127, dtype=torch.int8)
    values[:, :32] -= torch.eye(32, dtype=torch.int8)
    groups = torch.ones(32, in_features // 32, dtype=torch.float16)
    weight = Int8Weight(values, torch.ones(32), groups if scheme == "by group" else None)
    rows = torch.full((40, in_features), 127.0)
    rows[:, 8:48] -= torch.eye(40)
    rows[1] *= -1
    got = Int8Product([weight], [None], torch.float32)(rows)
    assert torch.equal(got, product_of(rows, weight, None, torch.float32))
    exact = rows.double() @ values.double().T
    assert exact.abs().max() > 2**23
    assert ((got - exact).abs() <= 2.0**-20 * exact.abs()).all()


@needs_kernel
def test_the_narrow_instruction_has_the_same_bits(tmp_path: Path) -> None:
    if not has_feature("avxvnni") and not has_feature("avx512vl"):
        pytest.skip("this CPU has no narrow one")
    weights = [scheme(with_outliers(80, 320)) for scheme in SCHEMES.values()]
    rows = with_outliers(13, 320, seed=2)
    torch.save(([tuple(each) for each in weights], rows), tmp_path / "given.pt")
    here = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "worlds.narrow_products", str(tmp_path)]
    subprocess.run(command, env=os.environ | here, check=True)
    products, instructions = torch.load(tmp_path / "got.pt")
    assert instructions == [integers.NARROW]
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
    product = Int8Product([weight], [bias], dtype)
    rows = drawn(40, 2080, seed=2).to(dtype)
    gated = gate_rows(rows, gate)
    expected = product_of(gated, weight, bias, dtype)
    for count in (1, 2, 3, 4, 5, 11, 40):
        assert torch.equal(product(rows[:count], gate), expected[:count]), count
        assert torch.equal(product(gated[:count]), expected[:count]), count
    assert torch.equal(product(rows[7:8], gate), expected[7:8])


# --- of rows as they are, and gated first ---

EVERY_WAY = pytest.mark.parametrize("gate", [None, *GATES])


def rows_for(gate: Gate | None, *shape: int) -> torch.Tensor:
    num_rows, num_features = shape
    return drawn(num_rows, num_features * (2 if gate else 1), seed=2)


def plain(rows: torch.Tensor, gate: Gate | None) -> torch.Tensor:
    """What is multiplied."""
    return gate_rows(rows.contiguous(), gate) if gate else rows.contiguous()


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("gate", [None, Gate("silu", True)])
def test_threads_do_not_change_them(gate: Gate | None, num_threads: int) -> None:
    weight = quantize_weight(drawn(448, 512))
    product = Int8Product([weight], [None], torch.float32)
    rows = rows_for(gate, 40 if gate else 9, 512)
    expected = product_of(plain(rows, gate), weight, None, torch.float32)
    with threads(num_threads):
        for _ in range(50):
            assert torch.equal(product(rows, gate), expected)


@needs_kernel
@EVERY_WAY
def test_rows_in_a_wider_tensor_and_columns_as_rows(gate: Gate | None) -> None:
    weight = quantize_weight(drawn(32, 64))
    product = Int8Product([weight], [None], torch.float32)
    wide = rows_for(gate, 5, 64)
    for rows in (torch.cat([wide, wide, wide], 1)[:, 16 : 16 + wide.shape[1]], wide.T.clone().T):
        expected = product_of(plain(rows, gate), weight, None, torch.float32)
        assert torch.equal(product(rows, gate), expected)


@needs_kernel
@EVERY_WAY
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice(
    scheme: str, gate: Gate | None
) -> None:
    product = Int8Product([SCHEMES[scheme](drawn(32, 64))], [None], torch.float32)
    rows = rows_for(gate, 3, 64)
    alone = product(rows, gate)
    for value in (torch.nan, torch.inf):
        rows[1, 5] = value
        if gate:
            rows[1, 5 + 64] = value
        got = product(rows, gate)
        assert not got[1].isfinite().any()
        assert torch.equal(got[::2], alone[::2])


def test_where_numba_compiles_for_another_machine_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not can_multiply()
