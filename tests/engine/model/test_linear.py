"""Packed linears: the same products as ``F.linear``, and in exact mode the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.tiling import has_wide_registers
from engine.kernels.triton.row_ops import row_product
from engine.machine import can_pack, is_packable
from engine.model import linear as linear_module
from engine.model.linear import (
    TILES,
    Call,
    LinearProduct,
    PackedLinear,
    RowSpan,
    SteadyProducts,
    choose_call,
    fixed_order_product,
    library_product,
    one_order_product,
    pack_linears,
    products_for,
    steady_call,
    usual_product,
)
from worlds.interpreted import patching_once

torch.set_num_threads(1)

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
# Beyond 1024 inputs oneDNN changes its kernel with the row count on CPUs without AMX; odd sizes have
# kernels of their own for what is left over.
SHAPES = [(64, 97), (256, 768), (768, 256), (40, 7), (1100, 33), (1536, 64), (2048, 96)]
MOST_ROWS = 600


def make_linear(
    in_features: int,
    out_features: int,
    bias: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> nn.Linear:
    """Weights repeat in pairs (see ``cancelling_rows``)."""
    generator = torch.Generator().manual_seed(in_features)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype)
    half = in_features // 2
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    weight[:, half : 2 * half] = weight[:, :half].flip(1)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias:
        values = torch.randn(out_features, generator=generator).to(dtype)
        linear.bias = nn.Parameter(values, requires_grad=False)
    return linear


def cancelling_rows(
    count: int, in_features: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Rows whose products with ``make_linear``'s weights cancel in pairs: what is left are rounding
    errors, so that a sum in any other order shows even after rounding to bf16."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, in_features, generator=generator).to(dtype)
    half = in_features // 2
    rows[:, half : 2 * half] = -rows[:, :half].flip(1)
    return rows


@every_dtype
@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_packed_products_equal_f_linear(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype
) -> None:
    linear = make_linear(in_features, out_features, bias, dtype)
    inputs = torch.randn(2, 9, in_features).to(dtype)
    expected = F.linear(
        inputs.double(), linear.weight.double(), linear.bias.double() if bias else None
    )
    own = F.linear(inputs, linear.weight, linear.bias)
    for exact in (False, True):
        call = steady_call(in_features, out_features, 64, dtype) if exact else None
        packed = PackedLinear(linear, call)
        output = packed(inputs)
        assert output.shape == (2, 9, out_features)
        assert output.dtype == dtype
        error, own_error = ((each.double() - expected).abs().max() for each in (output, own))
        # Rounding to the type is all there is: half a unit in the last of its bits; in fp32, what each
        # addition leaves.
        units = in_features**0.5 if dtype == torch.float32 else 0.5
        assert error <= max(1.01 * own_error, expected.abs().max() * torch.finfo(dtype).eps * units)


@every_dtype
@torch.inference_mode()
@pytest.mark.parametrize("products", [None, (library_product,)], ids=["usual", "library"])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_an_exact_layer_gives_a_row_the_same_bits_alone_and_among_600(
    in_features: int, out_features: int, products: Any, dtype: torch.dtype
) -> None:
    call = steady_call(in_features, out_features, MOST_ROWS, dtype, products=products)
    if call is None:  # the probe claims nothing, and this is what the engine hears
        model = nn.Sequential(make_linear(in_features, out_features, dtype=dtype))
        assert pack_linears(model, MOST_ROWS, True, products).failures
        return
    layer = PackedLinear(make_linear(in_features, out_features, dtype=dtype), call)
    rows = cancelling_rows(MOST_ROWS, in_features, dtype)
    assert rows.unique(dim=0).shape[0] == MOST_ROWS
    alone = torch.cat([layer(rows[index : index + 1]) for index in range(MOST_ROWS)])
    for count in (*range(2, 36), 47, 63, 64, 65, 100, 129, 255, 257, 400, 512, 513, MOST_ROWS):
        for first in (0, (MOST_ROWS - count) // 2):
            among = layer(rows[first : first + count])
            assert torch.equal(among, alone[first : first + count]), (count, first)


@every_dtype
def test_where_weights_are_packed_no_type_is_left_without_exact_calls(dtype: torch.dtype) -> None:
    """Else the assertions above could say nothing on a machine where they ought to."""
    if is_packable(CPU, dtype):
        assert all(steady_call(*shape, 64, dtype) for shape in SHAPES)


def fussy_kernel(*limits: int) -> Callable[[PackedLinear, torch.Tensor], torch.Tensor]:
    """A kernel that sums in another order from each of these row counts on, as oneDNN's do."""

    def apply(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, self.in_features).double()
        assert rows.shape[0] > 0
        shift = float(sum(rows.shape[0] >= limit for limit in limits))
        result = rows.sum(-1, keepdim=True).expand(-1, self.out_features) + shift
        return result.to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)

    return apply


@torch.inference_mode()
@pytest.mark.parametrize(
    ("limits", "most", "span"),
    [
        ((2,), MOST_ROWS, (2, MOST_ROWS)),
        ((2, 33), MOST_ROWS, (2, 32)),
        ((3,), MOST_ROWS, (4, MOST_ROWS)),
        ((2, 3, 5), MOST_ROWS, TILES),
        ((13,), MOST_ROWS, TILES),
        ((33,), MOST_ROWS, (1, 32)),
        ((10_000,), MOST_ROWS, (1, MOST_ROWS)),
        ((10_000,), 8, (1, 8)),
        ((2,), 1, (1, 1)),
    ],
)
def test_the_probe_finds_which_row_counts_share_bits_and_the_layer_stays_among_them(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, ...], most: int, span: tuple[int, int]
) -> None:
    monkeypatch.setattr(PackedLinear, "_apply_packed", fussy_kernel(*limits))
    assert steady_call(64, 8, most) == Call(span)
    layer = PackedLinear(make_linear(64, 8), Call(RowSpan(*span)))
    rows = cancelling_rows(70, 64)
    alone = torch.cat([layer(row[None]) for row in rows])
    for count in (1, 2, 3, 4, 5, 33, 65, 70):
        assert torch.equal(layer(rows[:count]), alone[:count])


@torch.inference_mode()
def test_where_bits_follow_a_row_s_place_the_probe_says_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As MKL's products with AVX2: no span and no tile keeps a row's bits, and that is reported."""

    def apply(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        place = torch.arange(inputs.shape[0])[:, None]
        sums = inputs.double().sum(-1, keepdim=True) + place % 3
        return sums.expand(-1, self.out_features).to(inputs.dtype)

    monkeypatch.setattr(PackedLinear, "_apply_packed", apply)
    assert steady_call(64, 8, MOST_ROWS) is None
    packed = pack_linears(nn.Sequential(make_linear(64, 8)), MOST_ROWS, exact=True)
    assert packed.failures == {"products of 64 by 8"}
    assert not pack_linears(nn.Sequential(make_linear(64, 8)), MOST_ROWS, exact=False).failures


# --- several products to choose from ---


def follows_company(rows: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
    del bias
    return F.linear(rows, weight) + rows.shape[0]


def follows_place(rows: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
    del bias
    return F.linear(rows, weight) + torch.arange(rows.shape[0])[:, None]


def in_order(rows: torch.Tensor, weight: torch.Tensor, bias: object) -> torch.Tensor:
    del bias
    products = rows[:, None].double() * weight.double()
    return products.cumsum(-1)[..., -1].to(rows.dtype)


@pytest.mark.parametrize(
    ("products", "costs", "chosen"),
    [
        ((follows_company, in_order), {follows_company: 2.0, in_order: 1.9}, (TILES, follows_company)),
        ((follows_company, in_order), {follows_company: 2.0, in_order: 1.5}, ((1, 64), in_order)),
        ((in_order, follows_company), {follows_company: 1.0, in_order: 9.0}, (TILES, follows_company)),
        ((follows_place, in_order), {}, ((1, 64), in_order)),
        ((follows_place,), {}, None),
    ],
)  # fmt: skip
def test_of_products_that_keep_bits_the_clearly_faster_one_is_taken(
    products: Any, costs: Any, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only where there are several is anything timed."""
    monkeypatch.setattr(linear_module, "_cost", lambda call, *_: costs[call.product])
    weight, rows = linear_module.cancelling(64, 8, torch.float32, CPU)
    bound = [(each, linear_module._bound(each, weight, None)) for each in products]
    assert choose_call(bound, rows, 64) == chosen


def test_the_cost_of_a_call_is_that_of_all_its_pieces() -> None:
    """At each of the timed row counts, as often as it is timed."""
    seen: list[int] = []

    def product(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape[0])
        return rows

    linear_module._cost(Call(RowSpan(4, 8)), product, torch.zeros(4, 16), 20)
    assert seen == [*[4] * 7, *[8, 8] * 7, *[8, 8, 4] * 7]


def test_on_a_cpu_there_is_nothing_to_time() -> None:
    assert products_for(CPU) == (library_product,)


# --- the kernel of one order ---

with_kernel = pytest.mark.skipif(
    not has_wide_registers(), reason="this CPU has no registers for so many sums"
)


def usual(in_features: int, out_features: int, dtype: torch.dtype) -> LinearProduct:
    return usual_product(in_features, out_features, dtype, CPU)


@with_kernel
@every_dtype
@pytest.mark.parametrize("has_tiles", [False, True])
def test_what_a_layer_gets_is_a_rule(
    dtype: torch.dtype, has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With AMX types of 16 bits stay with the library."""
    monkeypatch.setattr(linear_module, "has_tiles", lambda: has_tiles)
    monkeypatch.setattr(linear_module, "_cost", None)  # nothing is timed
    stays = has_tiles and dtype != torch.float32
    product = library_product if stays else one_order_product
    assert usual(64, 97, dtype) is product
    if not stays:
        assert steady_call(64, 97, 64, dtype) == Call(None, one_order_product)
    for exact in (False, True):
        model = nn.Sequential(make_linear(64, 97, dtype=dtype))
        pack_linears(model, 64, exact)
        assert (model[0].floats is None) is stays


@with_kernel
def test_sizes_that_the_kernel_does_not_take_stay_with_the_library() -> None:
    assert usual(40, 7, torch.float32) is library_product
    assert usual(41, 64, torch.bfloat16) is library_product
    assert usual(41, 64, torch.float32) is one_order_product


def test_other_devices_and_machines_without_numba_stay_with_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert usual_product(64, 64, torch.float32, torch.device("meta")) is library_product
    monkeypatch.setattr(linear_module, "find_kernel", {}.get)
    assert usual(64, 64, torch.float32) is library_product


@with_kernel
@torch.inference_mode()
def test_a_kernel_that_fails_its_probe_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = PackedLinear._apply_packed

    def follows_company(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        result = apply(self, inputs)
        return result if self.floats is None else result + len(inputs)

    monkeypatch.setattr(PackedLinear, "_apply_packed", follows_company)
    call = steady_call(64, 97, 64, torch.float32)
    assert call is not None
    assert call.product is library_product


@with_kernel
@every_dtype
@torch.inference_mode()
def test_a_layer_of_one_order_has_the_bits_of_its_product(dtype: torch.dtype) -> None:
    linear = make_linear(64, 97, True, dtype)
    layer = PackedLinear(linear, Call(None, one_order_product))
    rows = cancelling_rows(9, 64, dtype)
    expected = one_order_product(rows, linear.weight, linear.bias)
    assert torch.equal(layer(rows), expected)
    assert torch.equal(layer(rows.view(3, 3, 64)), expected.view(3, 3, 97))


@torch.inference_mode()
def test_a_model_multiplies_by_the_product_that_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers and weights outside of layers, some of which lie transposed; under the interpreter, with
    few rows in the probe."""
    monkeypatch.setattr(linear_module, "_ENOUGH_SUMS", 160)
    model = nn.Sequential(make_linear(256, 256, True, torch.float32), Experts(torch.float32))
    rows = cancelling_rows(12, 256, torch.float32)
    expected = model(rows)
    with patching_once():
        packed = pack_linears(model, 5, True, (fixed_order_product,))
        every = model(rows)
        assert packed == (1, set())
        torch.testing.assert_close(every, expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(torch.cat([model(row) for row in rows.split(3)]), every)
        by_tensor = model[0](rows)
    assert torch.equal(by_tensor, row_product(rows, model[0].packed, model[0].bias))


class Experts(nn.Module):
    """Weights that are no layers, as routers and experts have them, multiplied in three ways."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weights = [make_linear(256, 40, dtype=dtype).weight for _ in range(2)]
        self.lying = nn.Parameter(torch.stack(weights), requires_grad=False)
        self.turned = nn.Parameter(torch.stack([each.T for each in weights]), requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        turned = rows @ self.turned[0] + torch.matmul(rows, self.turned[1])
        return torch.cat([F.linear(rows, self.lying[1]), turned], dim=-1)


@every_dtype
@torch.inference_mode()
def test_weights_outside_of_layers_give_a_row_the_same_bits_too(dtype: torch.dtype) -> None:
    model = nn.Sequential(Experts(dtype))
    expected = model(cancelling_rows(70, 256, dtype)).double()
    packed = pack_linears(model, MOST_ROWS, exact=True)
    assert packed == (0, set())
    rows = cancelling_rows(70, 256, dtype)
    alone = torch.cat([model(row) for row in rows.split(1)])
    torch.testing.assert_close(alone.double(), expected, rtol=0, atol=0.05)
    if packed.failures:  # told, and not asserted
        return
    for count in (1, 2, 3, 5, 13, 16, 31, 33, 70):
        assert torch.equal(model(rows[:count]), alone[:count])
        assert torch.equal(model(rows[None, 70 - count :])[0], alone[70 - count :])


def test_products_that_cannot_be_cut_are_reported() -> None:
    """The probe's answer is no, not silence, where a model multiplies in a way that is not probed."""

    class Batched(Experts):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.bmm(rows.expand(2, -1, -1), self.turned)

    model = nn.Sequential(Batched(torch.float32))
    packed = pack_linears(model, MOST_ROWS, exact=True)
    model(torch.zeros(3, 256))
    assert packed.failures == {"products by bmm"}


@torch.inference_mode()
def test_products_outside_of_layers_can_fail_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def follows_place(rows: torch.Tensor, *_: object) -> torch.Tensor:
        return rows.double().sum(-1, keepdim=True) + torch.arange(rows.shape[0])[:, None]

    failures: set[str] = set()
    products = SteadyProducts(64, failures)
    monkeypatch.setattr(F, "linear", follows_place)
    products._linear(torch.zeros(3, 256), torch.zeros(1, 256))
    assert failures == {"products of 256 by 1"}


@torch.inference_mode()
def test_tiles_have_one_shape_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def apply(self: PackedLinear, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs.numel() // self.in_features)
        return inputs[..., :1].expand(*inputs.shape[:-1], self.out_features)

    monkeypatch.setattr(PackedLinear, "_apply_packed", apply)
    layer = PackedLinear(make_linear(64, 8), Call(TILES))
    for count in (1, 4, 7, 600):
        inputs = torch.arange(count, dtype=torch.bfloat16)[None, :, None].expand(1, count, 64)
        output = layer(inputs)
        assert output.shape == (1, count, 8)
        assert torch.equal(output[0, :, 0], inputs[0, :, 0])
    assert set(seen) == {4}


class Toy(nn.Module):
    """Two linears of one shape, a tied head, and something that only looks like a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.layers = nn.ModuleList([make_linear(64, 64), make_linear(64, 64, True)])
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.special = nn.Bilinear(64, 64, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = F.silu(layer(hidden)) * 0.1
        result: torch.Tensor = self.head(hidden)
        return result


@torch.inference_mode()
def test_packing_replaces_every_linear_and_leaves_the_tied_embedding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    toy = Toy().to(torch.bfloat16)
    ids = torch.arange(10)
    expected = toy(ids).float()
    embedding = toy.embedding.weight.clone()
    probed: list[tuple[int, int]] = []

    def probe(in_features: int, out_features: int, *rest: Any) -> Call | None:
        probed.append((in_features, out_features))
        return steady_call(in_features, out_features, *rest)

    monkeypatch.setattr(linear_module, "steady_call", probe)
    assert pack_linears(toy, 64, exact=True).num_layers == 3
    assert sorted(probed) == [(64, 50), (64, 64)]  # once per shape
    kinds = [type(module) for module in toy.modules()]
    assert kinds.count(PackedLinear) == 3
    assert nn.Linear not in kinds
    assert nn.Bilinear in kinds
    assert torch.equal(toy.embedding.weight, embedding)
    torch.testing.assert_close(toy(ids).float(), expected, rtol=0.02, atol=0.02)


def test_a_vocabulary_sized_head_is_probed_for_few_rows_and_kept_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def probe(in_features: int, out_features: int, most: int, *_: object) -> Call:  # noqa: ARG001
        asked.append(most)
        return Call(RowSpan(1, most))

    monkeypatch.setattr(linear_module, "steady_call", probe)
    monkeypatch.setattr(linear_module, "_LARGE_WEIGHT", 64 * 50)
    toy = nn.ModuleDict({"small": nn.Linear(64, 50), "large": nn.Linear(64, 51)})
    toy.to(torch.bfloat16)
    pack_linears(toy, 1024, exact=True)
    assert asked == [1024, 64]
    assert [layer.span for layer in toy.values()] == [(1, 1024), (1, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_bf16_on_a_cpu_is_packed_for_speed_alone(dtype: torch.dtype) -> None:
    assert not can_pack(CPU, dtype)
    assert not is_packable(torch.device("meta"), dtype)
    assert not can_pack(torch.device("meta"), torch.bfloat16)
