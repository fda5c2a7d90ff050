"""Packed linears: the same products as ``F.linear``, and in exact mode the same bits in any company."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels.float_product import PackedFloats
from engine.kernels.triton.row_ops import row_product
from engine.machine import can_pack
from engine.model import linear as linear_module
from engine.model.layers import PackedLinear
from engine.model.linear import (
    DeviceWeight,
    OneDnnWeight,
    PaddedFloats,
    keeps_bits,
    onednn_keeps_bits,
    pack_floats,
    pack_linears,
    pack_weight,
)
from worlds.interpreted import ON_CPU, patching_once

CPU = torch.device("cpu")
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
needs_onednn = pytest.mark.skipif(
    not can_pack(CPU, torch.bfloat16), reason="this CPU has no bf16 instructions"
)
# Few and odd channels and features, which the kernel does not take as they are. Beyond 1024 inputs oneDNN
# changes its kernel with the row count on CPUs without AMX.
SHAPES = [(64, 97), (256, 768), (40, 7), (41, 64), (1100, 33), (1, 1), (2048, 96)]
MOST_ROWS = 600


@pytest.fixture(autouse=True)
def _probing_anew() -> Iterator[None]:
    yield
    onednn_keeps_bits.cache_clear()


def make_linear(
    in_features: int, out_features: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16
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


def packed(linear: nn.Linear, most_rows: int = MOST_ROWS, exact: bool = True) -> Any:
    model = nn.Sequential(linear)
    assert pack_linears(model, most_rows, exact) == set()
    return model[0]


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
    output = packed(linear)(inputs)
    assert output.shape == (2, 9, out_features)
    assert output.dtype == dtype
    error, own_error = ((each.double() - expected).abs().max() for each in (output, own))
    # Rounding to the type is all there is: half a unit in the last of its bits; in fp32, what each
    # addition leaves.
    units = in_features**0.5 if dtype == torch.float32 else 0.5
    assert error <= max(1.01 * own_error, expected.abs().max() * torch.finfo(dtype).eps * units)


@every_dtype
@torch.inference_mode()
@pytest.mark.parametrize("has_amx", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_layer_gives_a_row_the_same_bits_alone_and_among_600(
    in_features: int,
    out_features: int,
    has_amx: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if has_amx and not can_pack(CPU, dtype):
        pytest.skip("oneDNN serves bf16 where the CPU has instructions for it")
    monkeypatch.setattr(linear_module, "has_tiles", lambda: has_amx)
    layer = packed(make_linear(in_features, out_features, dtype=dtype))
    rows = cancelling_rows(MOST_ROWS, in_features, dtype)
    alone = torch.cat([layer(row) for row in rows.split(1)])
    for count in (*range(2, 36), 47, 63, 64, 65, 100, 129, 255, 257, 400, 512, 513, MOST_ROWS):
        for first in (0, (MOST_ROWS - count) // 2):
            among = layer(rows[first : first + count])
            assert torch.equal(among, alone[first : first + count]), (count, first)


# --- which product a layer gets ---


@every_dtype
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("has_tiles", "onednn_packs"), [(False, True), (True, True), (True, False)]
)
def test_what_a_layer_gets_is_a_rule(
    dtype: torch.dtype,
    has_tiles: bool,
    onednn_packs: bool,
    exact: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With AMX types of 16 bits are oneDNN's, where it may use it; a vocabulary-sized head is probed for
    few rows alone, and kept to them."""
    monkeypatch.setattr(linear_module, "_LARGE_WEIGHT", 64 * 97)
    monkeypatch.setattr(linear_module, "has_tiles", lambda: has_tiles)
    can_pack_floats = onednn_packs and dtype != torch.float32
    monkeypatch.setattr(linear_module, "onednn_packs", lambda _: can_pack_floats)
    monkeypatch.setattr(linear_module, "OneDnnWeight", lambda *given: given)
    monkeypatch.setattr(linear_module, "onednn_keeps_bits", lambda *_: True)
    weight = torch.randn(97, 64).to(dtype)
    found = pack_weight(weight, None, 2000, exact)
    if has_tiles and can_pack_floats:
        assert found == ((weight, None, 2, 1024) if exact else (weight, None))
        *_, most = pack_weight(torch.cat([weight, weight]), None, 2000, True)  # type: ignore[misc]
        assert most == 64
    else:
        assert isinstance(found, PackedFloats)


def test_sizes_that_the_kernel_does_not_take_are_padded_and_other_devices_have_a_program() -> None:
    for shape in ((7, 40), (64, 41)):
        assert isinstance(pack_weight(torch.randn(shape), None, 64, True), PaddedFloats)
    assert isinstance(pack_weight(torch.empty(64, 64, device="meta"), None, 64, True), DeviceWeight)


def test_where_a_device_has_no_programs_exact_products_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(make_linear(64, 64))
    parameters = [SimpleNamespace(device=torch.device("cuda"))]
    monkeypatch.setattr(model, "parameters", lambda: parameters)
    monkeypatch.setattr(linear_module, "missing_for", lambda _: "it needs triton")
    failures = pack_linears(model, 64, exact=True)
    assert failures == {"products by torch's library: it needs triton"}


# --- the probe of oneDNN ---


class Fussy:
    """Sums in another order from each of these row counts on, as oneDNN's kernels do; of rows ``places``
    apart each in another."""

    def __init__(self, *limits: int, places: int = 1) -> None:
        self._limits, self._places = limits, places

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        shift = float(sum(len(rows) >= limit for limit in self._limits))
        place = torch.arange(len(rows))[:, None] % self._places
        return rows.double().sum(-1, keepdim=True) + shift + place


@pytest.mark.parametrize(
    ("product", "most", "keeps"),
    [
        (Fussy(), MOST_ROWS, True),
        (Fussy(10_000), MOST_ROWS, True),
        (Fussy(33), 32, True),
        (Fussy(33), 33, False),
        (Fussy(2), MOST_ROWS, False),
        (Fussy(MOST_ROWS), MOST_ROWS, False),
        (Fussy(places=3), MOST_ROWS, False),
        (Fussy(places=3), 1, True),
    ],
)
def test_the_probe_says_whether_rows_keep_their_bits(
    product: Fussy, most: int, keeps: bool
) -> None:
    assert keeps_bits(product, torch.randn(5, 64), most) is keeps


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize(("limit", "kind"), [(2, OneDnnWeight), (3, PackedFloats)])
def test_onednn_serves_where_only_a_single_row_differs_and_else_our_kernel(
    limit: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "has_tiles", lambda: True)
    monkeypatch.setattr(OneDnnWeight, "_multiply", lambda _, rows: Fussy(limit).times(rows))
    assert isinstance(packed(make_linear(64, 64)).packed, kind)
    assert isinstance(packed(make_linear(64, 64), exact=False).packed, OneDnnWeight)


@needs_onednn
@torch.inference_mode()
def test_onednn_is_called_with_fewer_rows_where_those_of_large_calls_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fussy = Fussy(2, 200)
    monkeypatch.setattr(linear_module, "has_tiles", lambda: True)
    monkeypatch.setattr(OneDnnWeight, "_multiply", lambda _, rows: fussy.times(rows))
    product = pack_weight(torch.randn(64, 64).bfloat16(), None, MOST_ROWS, True)
    assert isinstance(product, OneDnnWeight)
    rows = torch.randn(MOST_ROWS, 64).bfloat16()
    alone = torch.cat([product.times(row) for row in rows.split(1)])
    assert torch.equal(product.times(rows), alone)
    assert not torch.equal(fussy.times(rows), alone)


@needs_onednn
@torch.inference_mode()
@pytest.mark.parametrize(
    ("count", "calls"), [(1, [2]), (2, [2]), (8, [8]), (9, [8, 2]), (20, [8, 8, 4])]
)
def test_onednn_is_called_with_so_many_rows(
    count: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def multiply(_: OneDnnWeight, rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows[:, :1]

    monkeypatch.setattr(OneDnnWeight, "_multiply", multiply)
    rows = torch.arange(count, dtype=torch.bfloat16)[:, None].expand(count, 64)
    weight = OneDnnWeight(torch.randn(64, 64).bfloat16(), None, 2, 8)
    assert torch.equal(weight.times(rows), rows[:, :1])
    assert seen == calls


# --- whole models ---


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
def test_packing_replaces_every_linear_and_leaves_the_tied_embedding() -> None:
    toy = Toy().to(torch.bfloat16)
    ids = torch.arange(10)
    expected = toy(ids).float()
    embedding = toy.embedding.weight.clone()
    biases = [layer.bias for layer in toy.layers]
    assert pack_linears(toy, 64, exact=True) == set()
    kinds = [type(module) for module in toy.modules()]
    assert kinds.count(PackedLinear) == 3
    assert nn.Linear not in kinds
    assert nn.Bilinear in kinds
    assert torch.equal(toy.embedding.weight, embedding)
    # Mamba's mixer multiplies with a layer's weight and adds its bias later.
    assert toy.layers[0].bias is biases[0] is None
    assert torch.equal(toy.layers[1].bias, biases[1])
    torch.testing.assert_close(toy(ids).float(), expected, rtol=0.02, atol=0.02)


class Experts(nn.Module):
    """Weights that are no layers, as routers and experts have them, multiplied in three ways."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        weights = [make_linear(256, 40, dtype=dtype).weight for _ in range(2)]
        turned = torch.stack([each.T for each in weights])
        self.router = nn.Parameter(weights[0], requires_grad=False)
        self.turned = nn.Parameter(turned, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        turned = rows @ self.turned[0] + torch.matmul(rows, self.turned[torch.tensor(1)])
        return torch.cat([F.linear(rows, self.router), turned], dim=-1)


class Batched(Experts):
    """All experts at once, as Llama 4 has them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.reshape(-1, rows.shape[-1])
        products = torch.bmm(rows.expand(self.turned.shape[0], -1, -1), self.turned)
        return torch.cat([products[0], products[1], F.linear(rows, self.router)], dim=-1)


@every_dtype
@torch.inference_mode()
@pytest.mark.parametrize("kind", [Experts, Batched])
def test_weights_outside_of_layers_give_a_row_the_same_bits_too(
    kind: type[Experts], dtype: torch.dtype
) -> None:
    model = nn.Sequential(kind(dtype))
    rows = cancelling_rows(70, 256, dtype)
    expected = model(rows).double()
    assert pack_linears(model, MOST_ROWS, exact=True) == set()
    alone = torch.cat([model(row) for row in rows.split(1)])
    assert len(list(model.parameters())) == (2 if kind is Experts else 1)
    torch.testing.assert_close(alone.double(), expected, rtol=0, atol=0.05)
    for count in (1, 2, 3, 5, 13, 16, 31, 33, 70):
        assert torch.equal(model(rows[:count]), alone[:count])
        behind = model(rows[None, 70 - count :]).view(count, -1)
        assert torch.equal(behind, alone[70 - count :])


class Largest(TorchDispatchMode):
    """The most elements of what any operation makes."""

    num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.num_elements = max(self.num_elements, found.numel())
        return found


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [8, 64])
def test_a_routers_weight_is_packed_once(num_experts: int, dtype: torch.dtype) -> None:
    """In every step of every layer it costs more than its product. Some routers add as float32."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = make_linear(256, num_experts, dtype=dtype).weight

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return F.linear(rows.type(torch.float32), self.weight.type(torch.float32))

    model, row = nn.Sequential(Router()), torch.randn(1, 256, dtype=dtype)
    assert pack_linears(model, MOST_ROWS, exact=True) == set()
    expected = model(row)
    with Largest() as largest:
        assert torch.equal(model(row), expected)
    assert largest.num_elements <= 256


@every_dtype
@pytest.mark.parametrize("sizes", [(256, 40), (63, 130), (64, 64), (17, 3)])
def test_a_weight_can_be_read_again(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Routers ask for its type, or multiply with it themselves."""
    linear = make_linear(*sizes, True, dtype)
    for packed in (
        pack_floats(linear.weight, linear.bias),
        pack_weight(linear.weight, None, 64, True),
    ):
        layer = PackedLinear(*sizes, packed)
        assert torch.equal(layer.weight, linear.weight)
        assert layer.weight is layer.weight


@torch.inference_mode()
def test_a_module_that_multiplies_with_a_layer_s_weight_keeps_rows_bits() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = make_linear(256, 40, False, torch.float32)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return F.linear(rows, self.layer.weight)

    model, rows = nn.Sequential(Router()), cancelling_rows(70, 256, torch.float32)
    expected = model(rows)
    assert pack_linears(model, MOST_ROWS, exact=True) == set()
    torch.testing.assert_close(model(rows), expected, rtol=0, atol=0.05)
    alone = torch.cat([model(row) for row in rows.split(1)])
    for count in (2, 13, 33, 70):
        assert torch.equal(model(rows[:count]), alone[:count])


class Tailed(nn.Module):
    """Functions of single elements, by themselves and in modules, whose widths no vector divides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = make_linear(16, 10, True, torch.float32)
        self.alike = nn.ModuleList([nn.GELU(), nn.GELU()])

    def forward(self, rows: torch.Tensor, chosen: int = 0) -> torch.Tensor:
        halves = self.linear(rows).chunk(2, dim=-1)
        gated = F.softplus(halves[0]) * halves[1].sigmoid() + F.elu(halves[1])
        activated: torch.Tensor = self.alike[chosen](gated)
        return activated + gated.tanh()


@torch.inference_mode()
def test_elements_have_the_same_bits_wherever_in_a_call_they_stand() -> None:
    model, rows = nn.Sequential(Tailed()), torch.randn(70, 16) * 4
    expected = model(rows)
    pack_linears(model, MOST_ROWS, exact=True)
    torch.testing.assert_close(model(rows), expected)
    for chosen in (0, 1):  # The first forward has not met the second.
        alone = torch.cat([model[0](row, chosen) for row in rows.split(1)])
        for count in (2, 3, 7, 31, 70):
            assert torch.equal(model[0](rows[:count], chosen), alone[:count])
            assert torch.equal(model[0](rows[None, -count:], chosen)[0], alone[-count:])


def test_products_that_have_no_order_of_their_own_are_reported() -> None:
    """The answer is no, not silence, where a model multiplies in a way that is not known."""

    class Summed(Experts):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            products = torch.bmm(rows.expand(2, -1, -1), self.turned * 2)
            return torch.einsum("ij,kjl->ikl", rows, self.turned) + products[0][:, None]

    model = nn.Sequential(Summed(torch.float32))
    failures = pack_linears(model, MOST_ROWS, exact=True)
    model(torch.zeros(3, 256))
    assert failures == {"products by bmm", "products by einsum"}


@ON_CPU
@torch.inference_mode()
def test_a_model_on_a_device_multiplies_by_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and weights outside of layers, some of which lie transposed; under the interpreter."""
    monkeypatch.setattr(linear_module, "pack_floats", DeviceWeight)
    model = nn.Sequential(make_linear(256, 256, True, torch.float32), Experts(torch.float32))
    rows = cancelling_rows(12, 256, torch.float32)
    expected = model(rows)
    with patching_once():
        assert pack_linears(model, 5, True) == set()
        every = model(rows)
        torch.testing.assert_close(every, expected, rtol=1e-4, atol=1e-3)
        assert torch.equal(torch.cat([model(row) for row in rows.split(3)]), every)
        layer = model[0]
        by_tensor = row_product(rows, layer.packed.weight, layer.packed.bias)
        assert torch.equal(layer(rows), by_tensor)


def test_only_bf16_on_a_cpu_is_packed_for_speed_alone() -> None:
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(CPU, torch.float16)
    assert not can_pack(torch.device("meta"), torch.bfloat16)
