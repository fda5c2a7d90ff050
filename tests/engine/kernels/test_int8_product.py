"""Products of few rows in 8 bits: bits are those of oneDNN's, whatever rows, sizes and threads."""

from __future__ import annotations

import numba
import pytest
import torch

from engine.kernels.int8_product import can_multiply
from engine.kernels.int8_rows import ACTIVATIONS, Gate, gate_rows
from engine.model import int8
from engine.model.int8 import (
    Int8Product,
    Int8Weight,
    find_agreeing_kernel,
    quantize_rows,
    quantize_weight,
)

needs_kernel = pytest.mark.skipif(
    find_agreeing_kernel(64, 64) == "none", reason="this CPU has no AVX-512 VNNI"
)


def forget() -> None:
    find_agreeing_kernel.cache_clear()
    int8._is_exact.cache_clear()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(
    in_features: int, out_features: int, dtype: torch.dtype, has_bias: bool
) -> tuple[Int8Product, Int8Product]:
    """With the kernel, and without."""
    weight = quantize_weight(drawn(out_features, in_features))
    bias = drawn(out_features, seed=1) if has_bias else None
    without = Int8Product([weight], [bias], dtype, "none")
    return Int8Product([weight], [bias], dtype), without


@needs_kernel
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(64, 64), (1040, 80), (16, 16), (320, 1056)])
def test_bits_are_those_of_onednn(
    shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> None:
    kernel, onednn = both(*shape, dtype, has_bias)
    rows = drawn(64, shape[0], seed=2).to(dtype)
    expected = onednn(rows)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 64):
        assert torch.equal(kernel(rows[:count]), expected[:count]), count
    assert torch.equal(kernel(rows[7:8]), expected[7:8])


@needs_kernel
@pytest.mark.parametrize("in_features", [1024, 3072, 8192])
def test_so_are_those_of_sums_that_no_float_holds(in_features: int) -> None:
    weight = torch.full((32, in_features), 127, dtype=torch.int8)
    weight[:, :32] -= torch.eye(32, dtype=torch.int8)
    rows = torch.full((40, in_features), 127.0)
    rows[:, 8:48] -= torch.eye(40)
    products = [
        Int8Product([Int8Weight(weight, torch.ones(32))], [None], torch.float32, *kernel)
        for kernel in ((), ("none",))
    ]
    kernel, onednn = (product(rows) for product in products)
    assert onednn.min() > 2**23
    assert torch.equal(kernel, onednn)


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_them(num_threads: int) -> None:
    kernel, onednn = both(128, 448, torch.float32, False)
    rows = drawn(9, 128, seed=2)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(50):
            assert torch.equal(kernel(rows), onednn(rows))
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_rows_in_a_wider_tensor_and_columns_as_rows() -> None:
    kernel, onednn = both(64, 32, torch.float32, False)
    for rows in (drawn(5, 96)[:, 16:80], drawn(64, 5).T):
        assert torch.equal(kernel(rows), onednn(rows))


@needs_kernel
def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice() -> None:
    kernel, _ = both(64, 32, torch.float32, False)
    rows = drawn(3, 64)
    alone = kernel(rows)
    rows[1, 5] = torch.nan
    got = kernel(rows)
    assert got[1].isnan().all()
    assert torch.equal(got[::2], alone[::2])


@pytest.mark.parametrize(("in_features", "out_features"), [(40, 64), (64, 40)])
def test_other_sizes_are_left_to_onednn(in_features: int, out_features: int) -> None:
    assert not can_multiply(in_features, out_features)
    assert find_agreeing_kernel(in_features, out_features) == "none"


def test_where_numba_compiles_for_another_machine_it_is_left_to_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not can_multiply(64, 64)


def test_weights_that_are_packed_otherwise_are_left_to_onednn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.onednn, "qlinear_prepack", lambda values, _: values)
    forget()
    assert find_agreeing_kernel(64, 64) == "none"
    forget()


@needs_kernel
def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = int8.find_kernel("int8_product").PackedWeights
    times = kernel.times
    monkeypatch.setattr(kernel, "times", lambda *told: times(*told) * 1.0000002)
    forget()
    assert find_agreeing_kernel(64, 64) == "none"
    forget()
    rows = drawn(2, 64)
    weight = quantize_weight(drawn(64, 64))
    expected = Int8Product([weight], [None], torch.float32, "none").of_int8(quantize_rows(rows))
    monkeypatch.undo()
    assert torch.equal(Int8Product([weight], [None], torch.float32)(rows), expected)


# --- rows that are gated first ---

GATES = [Gate(activation, is_first) for activation in ACTIVATIONS for is_first in (True, False)]


@needs_kernel
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gated_rows_have_the_bits_of_gating_first_and_of_onednn(
    dtype: torch.dtype, gate: Gate
) -> None:
    kernel, onednn = both(1040, 80, dtype, True)
    rows = drawn(int8._FEW_ROWS + 2, 2080, seed=2).to(dtype)
    gated = gate_rows(rows, gate)
    expected = onednn(gated)
    assert torch.equal(onednn(rows, gate), expected)
    for count in (1, 2, 3, 4, 5, 11, int8._FEW_ROWS, int8._FEW_ROWS + 1, len(rows)):
        assert torch.equal(kernel(rows[:count], gate), expected[:count]), count
        assert torch.equal(kernel(gated[:count]), expected[:count]), count
    assert torch.equal(kernel(rows[7:8], gate), expected[7:8])


@needs_kernel
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_those_either(num_threads: int) -> None:
    kernel, onednn = both(1024, 64, torch.float32, False)
    rows, gate = drawn(40, 2048, seed=2), Gate("silu", True)
    expected = onednn(gate_rows(rows, gate))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for _ in range(50):
            assert torch.equal(kernel(rows, gate), expected)
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("gate", GATES)
def test_gated_rows_in_a_wider_tensor_and_columns_as_rows(gate: Gate) -> None:
    kernel, onednn = both(64, 32, torch.float32, False)
    for rows in (drawn(5, 160)[:, 16:144], drawn(128, 5).T):
        assert torch.equal(kernel(rows, gate), onednn(gate_rows(rows.contiguous(), gate)))


@needs_kernel
def test_gated_rows_that_are_no_numbers_leave_their_neighbours_alone() -> None:
    kernel, _ = both(64, 32, torch.float32, False)
    rows, gate = drawn(3, 128), Gate("gelu_tanh", False)
    alone = kernel(rows, gate)
    rows[1, 70] = torch.nan
    got = kernel(rows, gate)
    assert got[1].isnan().all()
    assert torch.equal(got[::2], alone[::2])
