"""Products with weights in few bits by Triton's programs: what they compute, that a row's bits are its
own, and that packing loses nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from engine.kernels.grouped_weight import GroupedWeight, UnpackableError
from engine.kernels.triton import code_ops
from engine.kernels.triton.code_ops import code_tile, look_up, product
from engine.kernels.triton.packed_codes import PackedCodes, can_join, format_of, join, pack
from worlds.grouped_weights import SCHEMES, channels_of, drawn_weight
from worlds.interpreted import DEVICE, compiled_ahead, drawn, patching_once
from worlds.lanes import examples

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
CHUNK = 128
FLOATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
EVERY = [*SCHEMES, *FLOATS]
IN_FULL, IN_PART = 512, 288
"""Inputs that fill their units and chunks, and that do not."""


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, patching_once():
        patch.setattr(code_ops, "_CHUNKS", (CHUNK,))
        yield


def weight_of(scheme: str, channels: int, features: int, seed: int = 0) -> GroupedWeight:
    """Features that are no multiple of 256 are those of a longer row."""
    if scheme in FLOATS:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randn(channels, features, generator=generator).to(FLOATS[scheme])
        scales = torch.rand(channels, -(-features // 128), generator=generator)
        weight = GroupedWeight(codes, 8, 0, 128, scales)
    else:
        weight = drawn_weight(scheme, channels, -(-features // 256) * 256, seed)
        weight = weight._replace(codes=weight.codes[:, :features].contiguous())
    moved = {
        name: each.to(DEVICE)
        for name, each in weight._asdict().items()
        if isinstance(each, torch.Tensor)
    }
    return weight._replace(**moved)


def packed_of(weight: GroupedWeight, bias: torch.Tensor | None = None) -> PackedCodes:
    """In parts, as layers are."""
    channels = len(weight.codes)
    parts = [channels_of(weight, 0, channels // 2), channels_of(weight, channels // 2, channels)]
    return pack(parts, *weight.codes.shape, bias)


def dequantized(weight: GroupedWeight) -> torch.Tensor:
    """In float64, where nothing is rounded."""
    return weight.dequantized().double()


def assert_is_product(
    got: torch.Tensor, rows: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None
) -> None:
    """Within the rounding of sums to float32 and of the result to its type. Codes and minima are added
    apart, so that what rounding may cost follows the size of both."""
    values = dequantized(weight)
    exact, size = rows.double() @ values.T, rows.double().abs() @ values.abs().T
    if weight.minima is not None:
        without = dequantized(weight._replace(minima=None, inner_minima=None)).abs()
        size = size + 2 * rows.double().abs() @ without.T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    kind = torch.finfo(got.dtype)
    allowed = TOLERANCE[got.dtype] * exact.abs() + 2e-6 * size + kind.smallest_normal * kind.eps
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("scheme", EVERY)
def test_products_are_those_of_the_weights_that_are_meant(scheme: str, dtype: torch.dtype) -> None:
    for in_features, num_rows in ((IN_FULL, 3), (IN_PART, 20)):
        weight, bias = weight_of(scheme, 70, in_features), drawn(dtype, 70, seed=1)
        rows = drawn(dtype, num_rows, in_features, seed=2)
        for own in (None, bias):
            got = product(rows, packed_of(weight, own), dtype)
            assert got.shape == (num_rows, 70)
            assert_is_product(got, rows, weight, own)


@settings(deadline=None, max_examples=examples(15))
@given(
    num_rows=st.one_of(st.integers(1, 5), st.integers(14, 18), st.integers(30, 70)),
    out_features=st.sampled_from([1, 31, 65]),
    in_features=st.sampled_from([32, 64, CHUNK, IN_PART, IN_FULL]),
    scheme=st.sampled_from(EVERY),
    dtype=st.sampled_from(list(TOLERANCE)),
    is_busy=st.booleans(),
    data=st.data(),
)
def test_a_row_has_the_bits_that_it_has_alone(
    num_rows: int,
    out_features: int,
    in_features: int,
    scheme: str,
    dtype: torch.dtype,
    is_busy: bool,
    data: Any,
) -> None:
    """Wherever it lies, and whatever lies beside it, in narrow and in wide tiles, on a device that few
    programs keep busy and on one that they do not."""
    weight = weight_of(scheme, out_features, in_features)
    packed = pack([weight], *weight.codes.shape, drawn(dtype, out_features, seed=1))
    rows = drawn(dtype, num_rows, in_features, seed=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_ops, "_enough_programs", lambda _: 0 if is_busy else 1000)
        among = product(rows, packed, dtype)
        patch.setattr(code_ops, "_enough_programs", lambda _: 1000)
        picked = data.draw(st.integers(0, num_rows - 1))
        assert torch.equal(product(rows[picked, None], packed, dtype)[0], among[picked])
        assert torch.equal(product(rows[picked:], packed, dtype), among[picked:])
        if num_rows > 1:
            strangers = drawn(dtype, num_rows, in_features, seed=3) * 30
            strangers[0] = torch.nan
            strangers[-1] = rows[0]
            assert torch.equal(product(strangers, packed, dtype)[-1], among[0])


def test_sums_that_cancel_leave_the_same_errors_however_work_is_divided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adding all inputs in one chunk shows that others would be seen."""
    weight = weight_of("Q8_0", 24, IN_FULL)
    codes = torch.cat([weight.codes[:, :256]] * 2, 1)
    scales = torch.cat([weight.scales[:, :8]] * 2, 1)  # type: ignore[index]
    packed = packed_of(weight._replace(codes=codes, scales=scales))
    half = drawn(torch.float32, 20, 256)
    rows = torch.cat([half, -half], 1)
    outputs = []
    for count, chunk in ((0, CHUNK), (1000, CHUNK), (0, IN_FULL)):
        monkeypatch.setattr(code_ops, "_enough_programs", lambda _, count=count: count)
        monkeypatch.setattr(code_ops, "_CHUNKS", (chunk,))
        outputs.append(product(rows, packed, torch.float32))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_chunks_are_the_layers_alone() -> None:
    plain = format_of(weight_of("Q4_0", 1, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(code_ops, "_CHUNKS", (2048, 1024, 512, 256))
        for sizes, chunk in (
            ((4096, 4096), 1024), ((4096, 1024), 256), ((4096, 14336), 2048), ((576, 64), 256),
        ):  # fmt: skip
            kind = plain._replace(in_features=sizes[0])
            tiles = [code_tile(kind, count, sizes[1]).constants for count in (1, 16, 17, 300)]
            assert {each["CHUNK"] for each in tiles} == {chunk}
            assert [each["ROWS"] for each in tiles] == [16, 16, 32, 32]


@pytest.mark.parametrize("scheme", EVERY)
def test_what_is_packed_is_read_again_to_the_bit(scheme: str) -> None:
    weight = weight_of(scheme, 40, IN_PART)
    packed = packed_of(weight)
    channels = torch.tensor([[3, 39], [0, 3]], device=DEVICE)
    found = packed.weight_of(channels.flatten())
    expected = channels_of(weight, 0, 40)._replace(table=())
    wanted = weight.values if scheme not in FLOATS else weight.codes.view(torch.uint8)
    assert torch.equal(found.codes.view(torch.uint8), wanted[channels.flatten()])
    for name in ("scales", "zeros", "minima", "inner_scales", "inner_minima", "channel_scales"):
        number = getattr(expected, name)
        if number is None:
            assert getattr(found, name) is None
        else:
            assert getattr(found, name).dtype == number.dtype
            assert torch.equal(getattr(found, name), number[channels.flatten()])
    rows = look_up(packed, channels, torch.bfloat16)
    assert rows.shape == (2, 2, IN_PART)
    assert torch.equal(rows, weight.dequantized().bfloat16()[channels])


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        ("Q4_0", 4.5), ("Q4_1", 5), ("Q4_K", 4.625), ("Q5_0", 8.5), ("Q6_K", 8.5625), ("Q8_0", 8.5),
        ("IQ4_NL", 8.5), ("AWQ", 4 + 24 / 128), ("compressed-tensors", 4.25), ("e4m3", 8.25),
        ("by channel", 4 + 32 / 512), ("W8A8", 8 + 32 / 512),
    ],
)  # fmt: skip
def test_weights_take_their_bits(scheme: str, bits: float) -> None:
    packed = packed_of(weight_of(scheme, 40, IN_FULL))
    assert sum(each.nbytes for each in packed.tensors.values()) == 40 * IN_FULL * bits / 8


@pytest.mark.parametrize("scheme", EVERY)
def test_layers_side_by_side_have_the_bits_that_they_have_alone(scheme: str) -> None:
    weights = [weight_of(scheme, count, IN_PART, seed=count) for count in (40, 7, 33)]
    bias = drawn(torch.bfloat16, 7)
    alone = [packed_of(weights[0]), packed_of(weights[1], bias), packed_of(weights[2])]
    assert can_join(alone)
    rows = drawn(torch.bfloat16, 4, IN_PART)
    together = product(rows, join(alone), torch.bfloat16)
    assert torch.equal(together, torch.cat([product(rows, each, rows.dtype) for each in alone], 1))
    assert not can_join([alone[0], packed_of(weight_of("Q8_0", 40, IN_FULL))])


def test_what_would_be_rounded_or_is_no_number_is_not_packed() -> None:
    weight = weight_of("Q4_0", 8, 96)
    scales = torch.ones(8, 4, dtype=torch.float16)
    with pytest.raises(UnpackableError, match="groups of 24 features"):
        packed_of(weight._replace(span=24, scales=scales))
    for name, code in (("e4m3", 0xFF), ("e5m2", 0x7C)):
        weight = weight_of(name, 8, 96)
        weight.codes.view(torch.uint8)[7, 95] = code
        with pytest.raises(UnpackableError, match="not finite"):
            packed_of(weight)
    with pytest.raises(UnpackableError, match="several schemes"):
        pack([weight_of("Q4_0", 8, 96), weight_of("Q4_1", 8, 96)], 16, 96)


@pytest.mark.parametrize("kind", list(FLOATS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_every_float_of_8_bits_is_what_it_says(kind: str, dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(FLOATS[kind]).to(DEVICE)
    every = every[every.float().isfinite()]
    codes = torch.zeros(len(every), 32, device=DEVICE).to(FLOATS[kind])
    codes[:, 5] = every
    packed = packed_of(GroupedWeight(codes, 8, 0, 32, torch.ones(len(every), 1, device=DEVICE)))
    rows = torch.zeros(1, 32, dtype=dtype, device=DEVICE)
    rows[0, 5] = 1
    assert torch.equal(product(rows, packed, dtype)[0], every.to(dtype))


@pytest.mark.parametrize(
    ("capability", "variants"),
    [
        (80, ["Q4_0", "Q4_K, more rows", "fp8", "experts"]),
        (
            90,
            [
                "Q4_0",
                "Q4_K, more rows",
                "Q4_K, fp32",
                "Q6_K",
                "AWQ",
                "part of a unit",
                "fp8",
                "experts",
                "experts, more rows",
            ],
        ),
        (100, ["Q4_K", "Q4_K, more rows", "W8A8", "experts", "experts, more rows"]),
    ],
)
def test_programs_are_compiled_for_devices_that_are_not_here(
    capability: int, variants: list[str], tmp_path: Path
) -> None:
    """They spill no registers, and tiles of few rows and of more multiply by one instruction."""
    told = compiled_ahead(capability, [f"codes, {each}" for each in variants], tmp_path)
    assert told.count("compiled multiply_codes") == len(variants)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize("place", range(4))
def test_a_devices_instructions_make_of_two_codes_what_they_stand_for(
    dtype: torch.dtype, name: str, place: int
) -> None:
    """Worked out here by the text of the instructions, which no interpreter has."""
    from engine.kernels.triton import code_programs

    for zero in (0, 7, 8, 15):
        asm = code_programs.widening_asm(name, place, zero)
        shift, mask, large, one, less = (
            int(each, 0)
            for each in re.fullmatch(  # type: ignore[union-attr]
                r"\{ .reg .b32 t, o, z; shr.u32 t, \$1, (\d+); lop3.b32 t, t, (0x\w+), (0x\w+), 0xEA; "
                r"mov.b32 o, (0x\w+); mov.b32 z, (0x\w+); fma.rn.\w+x2 \$0, t, o, z; \}",
                asm,
            ).groups()
        )
        codes = torch.arange(256)
        words = sum((codes * 37 + at) % 16 << 4 * at for at in range(4))
        pairs = words[:128] | words[128:] << 16

        def number(bits: torch.Tensor) -> torch.Tensor:
            return (bits & 0xFFFF).to(torch.uint16).view(dtype)

        t = (pairs >> shift) & mask | large
        ones, lesses = number(torch.tensor(one)), number(torch.tensor(less))
        found = [number(half) * ones + lesses for half in (t, t >> 16)]
        expected = (codes * 37 + place) % 16 - zero
        assert torch.equal(torch.cat(found), expected.to(dtype))


def test_calls_without_rows_and_a_tracer_see_one_operator() -> None:
    packed = packed_of(weight_of("Q4_K", 40, IN_FULL))
    assert product(drawn(torch.float32, 0, IN_FULL), packed, torch.float32).shape == (0, 40)
    rows = drawn(torch.bfloat16, 6, IN_FULL)

    def forward(given: torch.Tensor) -> torch.Tensor:
        return product(given[::2], packed, torch.float32)

    traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(rows)
    named = [str(node.target) for node in traced.graph.nodes if node.op == "call_function"]
    assert named[-1] == "slipstream.code_product.default"
    assert torch.equal(traced(rows), forward(rows))
    assert forward(rows).dtype == torch.float32
