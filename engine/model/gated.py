"""Gives a model's gated feed-forward networks in 8 bits two compiled passes each, in place.

Such a network is down(activation(gate(x)) * up(x)). Gate and up are one product already; activation and
product of the halves are done where the second product's rows are quantised, instead of in passes of
their own over what may be the widest rows of a model. Networks are found by their parts, and by what they
do with random rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.kernels import KINDS, LANES, find_kernel
from engine.model.int8 import Int8Linear, Int8Product
from engine.model.replacing import replace_modules

if TYPE_CHECKING:
    from engine.kernels.int8_rows import Gate

_PROBED_ROWS = 8
_LARGEST = (4.0, 100.0)
"""Of what gate and up make of probed rows: some networks cut large values off."""
_ACTIVATION_TOLERANCE = 2e-6
# Of the root mean square; values next to a step of the type, or of the 8 bits, may fall to either side.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class GatedFeedForward(nn.Module):
    """In such a network's place; ``parts`` is the network."""

    def __init__(self, parts: nn.Module, both: Int8Product, down: Int8Product, gate: Gate) -> None:
        super().__init__()
        self.parts = parts
        self._both, self._down, self._gate = both, down, gate

    def forward(self, *given: Any, **named: Any) -> Any:
        """``[.., hidden_size]`` to the same; with more than that, what the network does with it."""
        if len(given) != 1 or named:
            return self.parts(*given, **named)
        hidden_states = given[0]
        both = self._both(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return self._down(both, self._gate).view(*hidden_states.shape[:-1], -1)

    def extra_repr(self) -> str:
        return self._gate.activation


@torch.inference_mode()
def fuse_gated(model: nn.Module) -> int:
    """Replace them; returns how many. None without 8 bits, and without numba."""
    if find_kernel("int8_rows") is None:
        return 0
    return replace_modules(model, GatedFeedForward, _fused)


def _fused(module: nn.Module) -> GatedFeedForward | None:
    """What computes the same; None: nothing here does."""
    products, others = _parts(module)
    if len(products) != 2 or len(others) != 1:
        return None
    # Products come in the order in which layers are declared, which says nothing.
    for both, down in (products, products[::-1]):
        fits = both.out_features == 2 * down.in_features and both.dtype in KINDS
        if fits and down.in_features % LANES == 0:
            activation = activation_of(others[0])
            return None if activation is None else _with_gate(module, both, down, activation)
    return None


def _parts(module: nn.Module) -> tuple[list[Int8Product], list[nn.Module]]:
    """Products of its layers, each once, and its other children."""
    products: dict[int, Int8Product] = {}
    others = []
    for child in module.children():
        if isinstance(child, Int8Linear):
            products[id(child.shared)] = child.shared.product
        else:
            others.append(child)
    return list(products.values()), others


def activation_of(module: nn.Module) -> str | None:
    """Its name; None: it is none that kernels know."""
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    kernel = find_kernel("int8_rows")
    values = torch.linspace(-12.0, 12.0, 64 * LANES)[None]
    try:
        expected = module(values)
    except Exception:  # it takes something else
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != values.shape:
        return None
    for name in kernel.ACTIVATIONS:
        alone = kernel.gate_rows(
            torch.cat([values, torch.ones_like(values)], 1), kernel.Gate(name, True)
        )
        difference = (alone - expected).abs()
        if bool((difference <= _ACTIVATION_TOLERANCE * (1 + expected.abs())).all()):
            return str(name)
    return None


def _with_gate(
    module: nn.Module, both: Int8Product, down: Int8Product, activation: str
) -> GatedFeedForward | None:
    kernel = find_kernel("int8_rows")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_PROBED_ROWS, both.in_features, generator=generator)
    by = 1 / both(drawn.to(both.dtype)).abs().amax().float()
    rows = torch.cat([largest * by * drawn for largest in _LARGEST]).to(both.dtype)[None]
    try:
        expected = module(rows)
    except Exception:  # it takes something else than rows
        return None
    for is_first in (True, False):
        fused = GatedFeedForward(module, both, down, kernel.Gate(activation, is_first))
        if is_near(fused(rows), expected):
            return fused
    return None


def is_near(got: torch.Tensor, expected: object) -> bool:
    """Row by row."""
    if not isinstance(expected, torch.Tensor):
        return False
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    error = (got.float() - expected.float()).norm(dim=-1)
    return bool((error <= _TOLERANCE[got.dtype] * expected.float().norm(dim=-1)).all())
