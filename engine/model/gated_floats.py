"""Gives gated feed-forward networks two compiled passes each, in place, where our kernel multiplies.

Such a network is down(activation(gate(x)) * up(x)). Gate and up become one product
(``engine.kernels.float_product``), which applies the activation and multiplies the two where its sums are
rounded. Networks are found by their parts, and by what they do with random rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.kernels import find_kernel
from engine.model.gated import activation_of, is_near
from engine.model.linear import PackedLinear
from engine.model.replacing import replace_modules

if TYPE_CHECKING:
    from engine.kernels.float_product import PackedFloats

_PROBED_ROWS = 8
_LARGEST = (4.0, 100.0)
"""Of what gate makes of probed rows: some networks cut large values off."""


class GatedFloats(nn.Module):
    """In such a network's place, of which ``down`` is the last layer."""

    def __init__(self, both: PackedFloats, down: PackedLinear, activation: str) -> None:
        super().__init__()
        self.down = down
        self._both, self._activation = both, activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[.., hidden_size]`` to the same."""
        gated = self._both.times(hidden_states.reshape(-1, hidden_states.shape[-1]))
        down: torch.Tensor = self.down(gated)
        return down.view(hidden_states.shape)

    def extra_repr(self) -> str:
        return self._activation


@torch.inference_mode()
def fuse_gated_floats(model: nn.Module) -> int:
    """Replace them, once linear layers are packed; returns how many. None without numba."""
    if find_kernel("float_product") is None:
        return 0
    return replace_modules(model, GatedFloats, _fused)


def _fused(module: nn.Module) -> GatedFloats | None:
    """What computes the same; None: nothing here does."""
    children = list(module.children())
    layers = [each for each in children if isinstance(each, PackedLinear)]
    others = [each for each in children if not isinstance(each, PackedLinear)]
    if len(others) != 1:
        return None
    orders = _orders(layers)
    activation = activation_of(others[0]) if orders else None
    if activation is None:
        return None
    rows = _probe(orders[0][0])
    try:
        expected = module(rows)
    except Exception:  # it takes something else than rows
        return None
    for gate, up, down in orders:
        both = find_kernel("float_product").pack_gated(gate.floats, up.floats, activation)
        fused = GatedFloats(both, down, activation)
        if is_near(fused(rows), expected):
            return fused
    return None


def _orders(layers: Sequence[PackedLinear]) -> list[tuple[PackedLinear, ...]]:
    """Which may be gate, up and down: the order in which they are declared says nothing."""
    can_gate = find_kernel("float_product").can_gate
    if len(layers) != 3 or any(each.floats is None for each in layers):
        return []
    return [
        (gate, up, down)
        for gate, up, down in permutations(layers)
        if down.in_features == gate.out_features
        and down.out_features == gate.in_features
        and can_gate(gate.floats, up.floats)
    ]


def _probe(gate: PackedLinear) -> torch.Tensor:
    """``[1, num_rows, hidden_size]``, of small and of large products."""
    dtype = gate.floats.weights.dtype
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_PROBED_ROWS, gate.in_features, generator=generator)
    by = 1 / gate(drawn.to(dtype)).abs().amax().float()
    return torch.cat([largest * by * drawn for largest in _LARGEST]).to(dtype)[None]
