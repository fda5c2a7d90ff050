"""Gated networks in two passes, in 8 bits and of packed floats: what they replace is seen in what it
does, and rows keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.int8_product import Gate, gate_rows
from engine.model import gated
from engine.model import linear as linear_module
from engine.model.gated import GatedFeedForward, GatedFloats, fuse_gated
from engine.model.int8 import Int8Linear, Int8Product, SharedProduct, is_exact, quantize_weight
from engine.model.linear import PackedLinear, pack_floats, pack_linears
from engine.model.quantization import num_bytes, quantize_model
from worlds.tiny_models import own_logits, random_ids, tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STEP = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
IDS = random_ids(2, 28)
FEW = 96
"""About as many rows as steps have that decode."""
needs_int8 = pytest.mark.skipif(not is_exact(), reason="this CPU has no VNNI")
in_every_kind = pytest.mark.parametrize("kind", [pytest.param("int8", marks=needs_int8), "floats"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX, too."""
    monkeypatch.setattr(linear_module, "has_tiles", lambda: False)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def networks(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, GatedFeedForward | GatedFloats)]


def ready(name: str, kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose layers are of a kind."""
    model = tiny_model(name, dtype, intermediate_size=128)
    if kind == "int8":
        quantize_model(model)
    else:
        pack_linears(model, 64, exact=False)
    return model


@every_dtype
@in_every_kind
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_networks_of_a_model_are_found_and_write_the_same(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    model = ready(name, kind, dtype)
    expected, held = own_logits(model, IDS).float(), num_bytes(model)
    assert fuse_gated(model) == len(networks(model)) == model.config.num_hidden_layers
    got = own_logits(model, IDS).float()
    activation = "gelu_tanh" if name == "gemma2" else "silu"
    assert {each.extra_repr() for each in networks(model)} == {activation}
    assert num_bytes(model) == held
    assert (got - expected).abs().mean() < gated._TOLERANCE[dtype] * expected.std()


@needs_int8
@pytest.mark.parametrize("name", ["phi3", "deepseek_v3"])
def test_joint_layers_and_shared_experts_are_found_too(name: str) -> None:
    """Of the dense layer, and beside the routed ones."""
    model = ready(name, "int8")
    expected = own_logits(model, IDS)
    assert fuse_gated(model) == 2
    torch.testing.assert_close(own_logits(model, IDS), expected, rtol=0.05, atol=0.05)


@needs_int8
def test_models_that_have_none_stay_as_they_are() -> None:
    plain = tiny_model("llama")
    assert fuse_gated(plain) == 0  # torch's own layers
    gpt2 = tiny_model("gpt2")
    quantize_model(gpt2)
    assert fuse_gated(gpt2) == 0  # no gate
    assert not networks(plain)
    assert not networks(gpt2)


# --- networks that were put together here ---


class Network(nn.Module):
    """Of a kind of layers; in 8 bits gate and up are one product. ``compute`` is told the network, and
    rows."""

    def __init__(
        self,
        kind: str,
        compute: Callable[[Any, torch.Tensor], torch.Tensor],
        activation: nn.Module,
        dtype: torch.dtype = torch.float32,
        *,
        scale: float = 0.1,
        is_gate_last: bool = False,
        width: int = 128,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        halves = [scale * drawn(width, 64, seed=seed) for seed in (1, 2)]
        biases = [drawn(width, seed=seed).to(dtype) if has_bias else None for seed in (3, 4)]
        make = _in_8_bits if kind == "int8" else _of_floats
        # Declared in no order that says anything.
        (self.down,) = make([drawn(64, width, seed=5)], [None], dtype)
        first, second = make(halves, biases, dtype)
        self.gate, self.up = (second, first) if is_gate_last else (first, second)
        self.activation = activation
        self._compute = compute

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._compute(self, rows)


def _in_8_bits(weights: list[torch.Tensor], biases: list[Any], dtype: torch.dtype) -> list[Any]:
    product = Int8Product([quantize_weight(each) for each in weights], biases, dtype)
    shared, size = SharedProduct(product, len(weights)), len(weights[0])
    return [Int8Linear(shared, size * index, size) for index in range(len(weights))]


def _of_floats(weights: list[torch.Tensor], biases: list[Any], dtype: torch.dtype) -> list[Any]:
    return [
        PackedLinear(weight.shape[1], weight.shape[0], pack_floats(weight.to(dtype), bias))
        for weight, bias in zip(weights, biases, strict=True)
    ]


def usual(net: Any, rows: torch.Tensor) -> torch.Tensor:
    return net.down(net.activation(net.gate(rows)) * net.up(rows))  # type: ignore[no-any-return]


def fused(network: nn.Module) -> Any:
    model = nn.Sequential(network)
    assert fuse_gated(model) == len(networks(model))
    return next(iter(networks(model)), None)


class Silu(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        exact = rows.float()
        return (exact * exact.sigmoid()).to(rows.dtype)


class Quick(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * (1.702 * rows).sigmoid()


class Learned(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(1))


class Pairs(nn.Module):
    def forward(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return rows * others


@every_dtype
@in_every_kind
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_gate_last", [False, True])
@pytest.mark.parametrize(
    "activation", [nn.SiLU(), Silu(), nn.GELU(approximate="tanh")], ids=["silu", "own", "gelu"]
)
def test_the_half_with_the_activation_is_told_from_the_other(
    activation: nn.Module, is_gate_last: bool, has_bias: bool, dtype: torch.dtype, kind: str
) -> None:
    network = Network(kind, usual, activation, dtype, is_gate_last=is_gate_last, has_bias=has_bias)
    found = fused(network)
    assert found is not None
    # Gates far below and far above nothing, too.
    for rows in (drawn(2, 9, 64, seed=7).to(dtype), (40 * drawn(9, 64, seed=8)).to(dtype)):
        expected = network(rows)
        assert found(rows).shape == expected.shape
        assert gated.is_near(found(rows), expected)


@in_every_kind
@pytest.mark.parametrize(
    "activation",
    [nn.GELU(), nn.ReLU(), nn.Identity(), nn.Tanh(), Quick(), Learned(), Pairs(), nn.Softmax(-1)],
)
def test_other_activations_are_left_alone(activation: nn.Module, kind: str) -> None:
    compute = usual if not isinstance(activation, Pairs) else gates_by_itself
    assert fused(Network(kind, compute, activation)) is None


def gates_by_itself(net: Any, rows: torch.Tensor) -> torch.Tensor:
    return net.down(net.activation(net.gate(rows), net.up(rows)))  # type: ignore[no-any-return]


OTHERS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "clamps": lambda net, x: net.down(net.activation(net.gate(x).clamp(max=7)) * net.up(x)),
    "clamps high": lambda net, x: net.down(net.activation(net.gate(x)) * net.up(x).clamp(-64, 64)),
    "scales": lambda net, x: 1.1 * usual(net, x),
    "scales the gate": lambda net, x: net.down(net.activation(1.1 * net.gate(x)) * net.up(x)),
    "adds": lambda net, x: usual(net, x) + x,
    "adds one": lambda net, x: net.down(net.activation(net.gate(x)) * (net.up(x) + 1)),
    "no gate": lambda net, x: net.down(net.activation(net.gate(x)) + net.up(x)),
    "twice": lambda net, x: net.down(net.activation(net.gate(x)) * net.activation(net.up(x))),
    "other type": lambda net, x: usual(net, x).double(),
    "a pair": lambda net, x: (usual(net, x), x),
    "raises": lambda net, x: net.nothing(x),
}


@in_every_kind
@pytest.mark.parametrize("scale", [0.002, 0.1, 2.0])
@pytest.mark.parametrize("name", OTHERS)
def test_networks_that_do_something_else_are_left_alone(name: str, scale: float, kind: str) -> None:
    assert fused(Network(kind, OTHERS[name], nn.SiLU(), scale=scale)) is None
    assert fused(Network(kind, usual, nn.SiLU(), scale=scale)) is not None


@in_every_kind
def test_sizes_and_parts_that_do_not_fit_are_left_alone(kind: str) -> None:
    """A width that is no whole number of the kernel's blocks; a part more; another kind of layer."""
    assert fused(Network(kind, usual, nn.SiLU(), width=72)) is None
    more = Network(kind, usual, nn.SiLU())
    more.dropout = nn.Dropout()
    assert fused(more) is None
    cut = Network(kind, usual, nn.SiLU())
    cut.down = nn.Linear(128, 64)
    assert fused(cut) is None


def test_weights_of_the_first_two_layers_are_not_kept_twice() -> None:
    layers = list(fused(Network("floats", usual, nn.SiLU())).modules())
    assert [type(each) for each in layers] == [GatedFloats, PackedLinear]


@needs_int8
def test_what_is_called_with_more_than_rows_is_still_the_networks() -> None:
    class Branches(Network):
        def forward(self, rows: torch.Tensor, by: float = 1.0) -> torch.Tensor:
            return by * super().forward(rows)

    network = Branches("int8", usual, nn.SiLU())
    found = fused(network)
    rows = drawn(3, 64)
    assert torch.equal(found(rows, 2.0), network(rows, 2.0))
    assert torch.equal(found(rows=rows), network(rows))


@in_every_kind
def test_a_second_time_there_is_nothing_left_to_replace(kind: str) -> None:
    model = nn.Sequential(Network(kind, usual, nn.SiLU()))
    assert fuse_gated(model) == 1
    before, expected = list(model.modules()), model(drawn(3, 64))
    assert fuse_gated(model) == 0
    assert list(model.modules()) == before
    assert torch.equal(model(drawn(3, 64)), expected)


# --- rows ---


@every_dtype
@in_every_kind
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(approximate="tanh")])
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    activation: nn.Module, dtype: torch.dtype, kind: str
) -> None:
    found = fused(Network(kind, usual, activation, dtype))
    rows = (3 * drawn(2 * FEW + 5, 64)).to(dtype)
    every = found(rows)
    for count in (1, 2, 3, 5, FEW - 1, FEW, FEW + 1, 2 * FEW):
        for first in (0, 1, 4):
            part = slice(first, first + count)
            assert torch.equal(found(rows[part]), every[part]), (count, first)
    for row in (FEW - 1, FEW, FEW + 1, len(rows) - 1):
        assert torch.equal(found(rows[row]), every[row])
        assert torch.equal(found(rows[None, row : row + 1])[0, 0], every[row])


@needs_int8
@every_dtype
@pytest.mark.parametrize("count", [3, FEW + 3])
def test_rows_have_the_bits_of_gating_first_and_multiplying_then(
    count: int, dtype: torch.dtype
) -> None:
    """The values that are quantised are those of ``gate_rows``, rounded to the type."""
    network = Network("int8", usual, nn.SiLU(), dtype)
    rows = drawn(count, 64).to(dtype)
    both = torch.cat([network.gate(rows), network.up(rows)], -1)
    expected = network.down(gate_rows(both, Gate("silu", True)))
    assert torch.equal(fused(network)(rows), expected)


@needs_int8
@every_dtype
def test_they_are_within_a_step_of_what_they_were(dtype: torch.dtype) -> None:
    network = Network("int8", usual, nn.SiLU(), dtype)
    rows = drawn(50, 64, seed=9).to(dtype)
    got, expected = fused(network)(rows).float(), network(rows).float()
    largest = (F.silu(network.gate(rows)) * network.up(rows)).float().abs().amax(1, keepdim=True)
    weight = drawn(64, 128, seed=5).abs().amax()
    # A value may fall to either side of a step of the type, or of the 8 bits.
    assert (
        (got - expected).abs() <= 3 * weight * largest / 127 + STEP[dtype] * expected.abs()
    ).all()


@in_every_kind
@pytest.mark.parametrize("count", [3, FEW + 3])
def test_rows_that_are_no_numbers_stay_so_and_their_neighbours_do_not_notice(
    count: int, kind: str
) -> None:
    found = fused(Network(kind, usual, nn.SiLU()))
    rows = drawn(count, 64)
    alone = found(rows)
    rows[1, 5] = torch.nan
    got = found(rows)
    assert got[1].isnan().all()
    assert torch.equal(torch.cat([got[:1], got[2:]]), torch.cat([alone[:1], alone[2:]]))
