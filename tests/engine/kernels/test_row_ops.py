"""Products and norms by Triton's programs: what they compute, and that a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from engine.kernels.triton import row_ops
from engine.kernels.triton.row_ops import row_norm, row_product
from engine.model.linear import cancelling
from worlds.interpreted import DEVICE, drawn, patching_once
from worlds.lanes import examples

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
CHUNK = 128
IN_TWO = CHUNK + 21
"""Inputs of two chunks, the second one not full."""


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(row_ops, "_CHUNK", CHUNK)
        yield


@settings(deadline=None, max_examples=examples(20))
@given(
    num_rows=st.one_of(st.integers(1, 5), st.integers(60, 70), st.integers(1, 150)),
    out_features=st.sampled_from([1, 7, 48, 65]),
    in_features=st.sampled_from([1, 40, 64, CHUNK, IN_TWO, 3 * CHUNK]),
    dtype=st.sampled_from(list(TOLERANCE)),
    has_bias=st.booleans(),
    is_turned=st.booleans(),
    is_busy=st.booleans(),
    data=st.data(),
)
def test_a_row_has_the_bits_that_it_has_alone_and_they_are_those_of_its_sums(
    num_rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    has_bias: bool,
    is_turned: bool,
    is_busy: bool,
    data: Any,
) -> None:
    """Wherever it lies, and whatever lies beside it, on a device that few programs keep busy and on one
    that they do not."""
    weight, bias = drawn(dtype, out_features, in_features), drawn(dtype, out_features, seed=1)
    if is_turned:
        weight = weight.T.contiguous().T
    given_bias = bias if has_bias else None
    rows = drawn(dtype, num_rows, in_features, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_ops, "_enough_programs", lambda _: 0 if is_busy else 1000)
        among = row_product(rows, weight, given_bias)
        patch.setattr(row_ops, "_enough_programs", lambda _: 1000)
        picked = data.draw(st.sets(st.integers(0, num_rows - 1), min_size=1, max_size=3))
        for row in picked:
            assert torch.equal(row_product(rows[row], weight, given_bias), among[row])
        first = data.draw(st.integers(0, num_rows - 1))
        assert torch.equal(row_product(rows[first:], weight, given_bias), among[first:])
        if num_rows > 1:
            strangers = drawn(dtype, num_rows, in_features, seed=3) * 30
            strangers[0] = torch.nan
            strangers[-1] = rows[0]
            assert torch.equal(row_product(strangers, weight, given_bias)[-1], among[0])
    exact = rows.double() @ weight.double().T
    size = rows.double().abs() @ weight.double().abs().T
    if has_bias:
        exact, size = exact + bias.double(), size + bias.double().abs()
    # Sums are rounded to float32 at every step, and once to the type.
    allowed = TOLERANCE[dtype] * exact.abs() + 2e-6 * size
    assert ((among.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_sums_that_cancel_leave_the_same_errors_however_work_is_divided(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding hides no other order there: adding all inputs in one chunk shows."""
    usual = 2 * CHUNK  # several times what a program takes at once
    weight, rows = cancelling(3 * usual, 24, dtype, DEVICE)
    outputs = []
    for count, chunk in ((0, usual), (1000, usual), (0, 4 * usual)):
        monkeypatch.setattr(row_ops, "_enough_programs", lambda _, count=count: count)
        monkeypatch.setattr(row_ops, "_CHUNK", chunk)
        outputs.append(row_product(rows, weight, None))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_has_one_way_whatever_its_size(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide tiles, narrow ones and chunks of two lengths: each gives a row its own bits, and the sum."""
    monkeypatch.setattr(row_ops, "_ENOUGH_PARTS", 2)
    ways = set()
    for in_features, out_features in ((CHUNK, 40), (IN_TWO, 100), (3 * CHUNK, 300)):
        tile = row_ops.product_tile(dtype, in_features, out_features)
        ways.add((tile.constants["FEATURES"], tile.constants["CHUNK"]))
        weight = drawn(dtype, out_features, in_features)
        rows = drawn(dtype, 3, in_features, seed=1)
        outputs = []
        for count in (0, 1000):
            monkeypatch.setattr(row_ops, "_enough_programs", lambda _, count=count: count)
            outputs.append(row_product(rows, weight, None))
        assert torch.equal(*outputs)
        assert torch.equal(row_product(rows[1:2], weight, None), outputs[0][1:2])
        expected = rows.double() @ weight.double().T
        size = rows.double().abs() @ weight.double().abs().T
        allowed = TOLERANCE[dtype] * expected.abs() + 2e-6 * size
        assert ((outputs[0].double() - expected).abs() <= allowed).all()
    wide = {(32, CHUNK), (128, CHUNK), (128, 2 * CHUNK)}
    assert ways == (wide if dtype == torch.bfloat16 else {(64, CHUNK)})


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device adds up in an order of its own")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_interpreter_adds_up_one_input_after_another(dtype: torch.dtype) -> None:
    """Whatever library numpy multiplies with."""
    weight, rows = drawn(dtype, 40, 32), drawn(dtype, 19, 32, seed=1)
    total = torch.zeros(19, 40)
    for column, factors in zip(rows.float().T, weight.float().T, strict=True):
        total = total + column[:, None] * factors
    assert torch.equal(row_product(rows, weight, None), total.to(dtype))


def test_shapes_come_out_as_linear_layers_give_them() -> None:
    weight, bias = drawn(torch.float32, 5, 8), drawn(torch.float32, 5)
    for sizes in ((8,), (3, 8), (2, 3, 8), (0, 8), (2, 0, 8)):
        rows = drawn(torch.float32, *sizes)
        expected = torch.nn.functional.linear(rows, weight, bias)
        torch.testing.assert_close(row_product(rows, weight, bias), expected)
    spread = drawn(torch.float32, 6, 8)[::2]
    assert torch.equal(row_product(spread, weight, bias), row_product(spread.clone(), weight, bias))
    turned = drawn(torch.float32, 8, 6).T
    assert torch.equal(row_product(turned, weight, bias), row_product(turned.clone(), weight, bias))


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_norms_are_those_of_their_definition_row_by_row(
    dtype: torch.dtype, is_rounded: bool
) -> None:
    rows, factors = drawn(dtype, 2, 70, 96), drawn(torch.float32, 96, seed=1)
    every = row_norm(rows, factors, 1e-6, is_rounded)
    exact = rows.double() * (rows.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    exact = exact * factors.double()
    close = {"rtol": 3 * TOLERANCE[dtype], "atol": 0.0}
    torch.testing.assert_close(every.double(), exact, **close)
    for place in ((0, 0), (0, 63), (1, 69)):
        assert torch.equal(row_norm(rows[place], factors, 1e-6, is_rounded), every[place])
    few = rows.transpose(0, 1)[5:9]
    assert torch.equal(row_norm(few, factors, 1e-6, is_rounded)[:, 1], every[1, 5:9])
    assert row_norm(rows[:, :0], factors, 1e-6, is_rounded).shape == (2, 0, 96)


def test_a_tracer_sees_one_call_each() -> None:
    weight, factors = drawn(torch.float32, 5, 8), drawn(torch.float32, 8)

    def forward(rows: torch.Tensor) -> torch.Tensor:
        return row_product(row_norm(rows, factors, 1e-6, True), weight, None)

    rows = drawn(torch.float32, 2, 3, 8)
    traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(rows)
    named = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert named == ["slipstream.row_norm.default", "slipstream.row_product.default"]
    assert torch.equal(traced(rows), forward(rows))
