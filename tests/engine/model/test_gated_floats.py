"""Gated feed-forward networks of packed layers, as two compiled passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.kernels.tiling import has_wide_registers
from engine.model import linear as linear_module
from engine.model.gated import is_near
from engine.model.gated_floats import GatedFloats, fuse_gated_floats
from engine.model.linear import PackedLinear, pack_linears

pytestmark = pytest.mark.skipif(
    not has_wide_registers(), reason="this CPU has no registers for so many sums"
)

every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


class Network(nn.Module):
    """down(act(gate(x)) * up(x)), with the layers declared in an order that says nothing."""

    def __init__(self, act: nn.Module | None = None, wide: int = 192, narrow: int = 64) -> None:
        super().__init__()
        self.down = nn.Linear(wide, narrow)
        self.up = nn.Linear(narrow, wide)
        self.act = act or nn.SiLU()
        self.gate = nn.Linear(narrow, wide)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.act(self.gate(rows)) * self.up(rows))
        return result


class Clamping(Network):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = self.gate(rows).clamp(max=7.0)
        result: torch.Tensor = self.down(self.act(gate) * self.up(rows))
        return result


class Model(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(rows)
        return result


@pytest.fixture(autouse=True)
def without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AMX, too."""
    monkeypatch.setattr(linear_module, "has_tiles", lambda: False)


def packed(network: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = Model(network.to(dtype)).requires_grad_(False)
    pack_linears(model, 64, exact=False)
    return model


@torch.inference_mode()
@every_dtype
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(approximate="tanh")], ids=["silu", "gelu"])
def test_a_network_is_replaced_by_one_that_computes_the_same(
    act: nn.Module, dtype: torch.dtype
) -> None:
    model = packed(Network(act), dtype)
    rows = torch.randn(2, 35, 64).to(dtype)
    expected = model(rows)
    assert fuse_gated_floats(model) == 1
    assert isinstance(model.network, GatedFloats)
    got = model(rows)
    assert got.shape == expected.shape
    assert is_near(got, expected)
    assert fuse_gated_floats(model) == 0
    alone = torch.cat([model(row) for row in rows.view(-1, 64).split(1)])
    assert torch.equal(alone.view_as(got), got)


@torch.inference_mode()
@pytest.mark.parametrize(
    "network",
    [
        Network(nn.GELU()),
        Network(nn.ReLU()),
        Network(wide=200),
        Clamping(),
        nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)),
    ],
    ids=["gelu by erf", "relu", "part of a block", "clamps", "no gate"],
)
def test_what_computes_something_else_stays(network: nn.Module) -> None:
    model = packed(network)
    rows = torch.randn(3, 64)
    expected = model(rows)
    assert fuse_gated_floats(model) == 0
    assert model.network is network
    assert torch.equal(model(rows), expected)


def test_networks_of_torch_s_own_layers_stay() -> None:
    model = Model(Network())
    assert fuse_gated_floats(model) == 0


@torch.inference_mode()
def test_weights_of_the_first_two_layers_are_not_kept_twice() -> None:
    model = packed(Network())
    fuse_gated_floats(model)
    layers = [each for each in model.modules() if isinstance(each, PackedLinear)]
    assert [(each.in_features, each.out_features) for each in layers] == [(192, 64)]


@torch.inference_mode()
def test_it_takes_the_place_of_silu_as_torch_computes_it() -> None:
    """Within rounding: of gates far below and far above nothing."""
    model = packed(Network())
    gate, up, down = (getattr(model.network, name) for name in ("gate", "up", "down"))
    fuse_gated_floats(model)
    rows = 40 * torch.randn(16, 64)
    assert is_near(model(rows), down(F.silu(gate(rows)) * up(rows)))
