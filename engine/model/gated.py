"""Gives a model's gated feed-forward networks two compiled passes each, in place.

Such a network is down(activation(gate(x)) * up(x)). In 8 bits gate and up are one product already;
activation and product of the halves are done where the second product's rows are quantised. Of packed
floats gate and up become one product (``engine.kernels.float_product``), which does both where its sums
are rounded. Networks are found by their parts, and by what they do with random rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.kernels import KINDS, LANES
from engine.model.int8 import Int8Linear, Int8Product
from engine.model.linear import PackedLinear
from engine.model.replacing import replace_modules

_PROBED_ROWS = 8
_LARGEST = (4.0, 100.0)
"""Largest values of gate (and up) in probed rows: some networks cut large values off."""
_ACTIVATION_TOLERANCE = 2e-6
# Of the root mean square; values next to a step of the type, or of the 8 bits, may fall to either side.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class GatedFeedForward(nn.Module):
    """A network in 8 bits. ``parts`` is the network that it replaces; ``is_first``: of the two halves
    that ``both`` makes the first is the gate."""

    def __init__(
        self,
        parts: nn.Module,
        both: Int8Product,
        down: Int8Product,
        is_first: bool,
        activation: str,
    ) -> None:
        from engine.kernels.int8_product import Gate

        super().__init__()
        self.parts = parts
        self._both, self._down, self._gate = both, down, Gate(activation, is_first)

    def forward(self, *given: Any, **named: Any) -> Any:
        """``[.., hidden_size]`` to the same; with more than that, what the network does with it."""
        if len(given) != 1 or named:
            return self.parts(*given, **named)
        hidden_states = given[0]
        both = self._both(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return self._down(both, self._gate).view(*hidden_states.shape[:-1], -1)

    def extra_repr(self) -> str:
        return self._gate.activation


class GatedFloats(nn.Module):
    """A network of packed floats, of which ``down`` is the last layer."""

    def __init__(
        self, gate: PackedLinear, up: PackedLinear, down: PackedLinear, activation: str
    ) -> None:
        from engine.kernels.float_product import pack_gated

        super().__init__()
        self.down = down
        self._both, self._activation = pack_gated(gate.packed, up.packed, activation), activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[.., hidden_size]`` to the same."""
        gated = self._both.times(hidden_states.reshape(-1, hidden_states.shape[-1]))
        down: torch.Tensor = self.down(gated)
        return down.view(hidden_states.shape)

    def extra_repr(self) -> str:
        return self._activation


@torch.inference_mode()
def fuse_gated(model: nn.Module) -> int:
    """Replaces them, once linear layers are packed or have 8 bits; returns how many."""
    return replace_modules(model, (GatedFeedForward, GatedFloats), _fused)


class _Candidate(NamedTuple):
    """A way in which a network may be put together. ``first``: its first product, of rows of so many
    features and of a type; ``fused``: makes what is to replace it, given the activation's name."""

    first: Callable[[torch.Tensor], torch.Tensor]
    in_features: int
    dtype: torch.dtype
    fused: Callable[[str], nn.Module]


def _fused(module: nn.Module) -> nn.Module | None:
    """Returns what computes the same as the module; None: nothing here does."""
    children = list(module.children())
    layers = [each for each in children if isinstance(each, Int8Linear | PackedLinear)]
    if len(children) != len(layers) + 1:
        return None
    candidates = [*_in_8_bits(module, layers), *_of_floats(layers)]
    (other,) = (each for each in children if each not in layers)
    activation = activation_of(other) if candidates else None
    if activation is None:
        return None
    rows = _probe(candidates[0])
    try:
        expected = module(rows)
    except Exception:  # it takes something else than rows
        return None
    fused = (each.fused(activation) for each in candidates)
    return next((each for each in fused if is_near(each(rows), expected)), None)


def _in_8_bits(module: nn.Module, layers: Sequence[nn.Module]) -> Iterator[_Candidate]:
    shared = {id(each.shared): each.shared for each in layers if isinstance(each, Int8Linear)}
    products = [each.product for each in shared.values()]
    if len(products) != 2:
        return
    # Products come in the order in which layers are declared, which says nothing.
    for both, down in permutations(products):
        fits = both.out_features == 2 * down.in_features and both.dtype in KINDS
        if fits and down.in_features % LANES == 0:
            for is_first in (True, False):
                fused = partial(GatedFeedForward, module, both, down, is_first)
                yield _Candidate(both, both.in_features, both.dtype, fused)


def _of_floats(layers: Sequence[nn.Module]) -> Iterator[_Candidate]:
    from engine.kernels.float_product import PackedFloats, can_gate

    packed = [each for each in layers if isinstance(each, PackedLinear)]
    if len(packed) != 3 or not all(isinstance(each.packed, PackedFloats) for each in packed):
        return
    for gate, up, down in permutations(packed):
        fits = (down.in_features, down.out_features) == (gate.out_features, gate.in_features)
        if fits and can_gate(gate.packed, up.packed):
            fused = partial(GatedFloats, gate, up, down)
            yield _Candidate(gate, gate.in_features, gate.packed.weights.dtype, fused)


def activation_of(module: nn.Module) -> str | None:
    """Returns the name of an activation; None: it is none that kernels know."""
    from engine.kernels.int8_product import Gate, gate_rows
    from engine.kernels.lanes import ACTIVATIONS

    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    values = torch.linspace(-12.0, 12.0, 64 * LANES)[None]
    try:
        expected = module(values)
    except Exception:  # it takes something else
        return None
    if not isinstance(expected, torch.Tensor) or expected.shape != values.shape:
        return None
    for name in ACTIVATIONS:
        alone = gate_rows(torch.cat([values, torch.ones_like(values)], 1), Gate(name, True))
        difference = (alone - expected).abs()
        if bool((difference <= _ACTIVATION_TOLERANCE * (1 + expected.abs())).all()):
            return name
    return None


def _probe(candidate: _Candidate) -> torch.Tensor:
    """Returns ``[1, num_rows, hidden_size]``, of small and of large products."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_PROBED_ROWS, candidate.in_features, generator=generator)
    by = 1 / candidate.first(drawn.to(candidate.dtype)).abs().amax().float()
    return torch.cat([largest * by * drawn for largest in _LARGEST]).to(candidate.dtype)[None]


def is_near(got: torch.Tensor, expected: object) -> bool:
    """Whether they are the same within rounding, row by row."""
    if not isinstance(expected, torch.Tensor):
        return False
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    error = (got.float() - expected.float()).norm(dim=-1)
    return bool((error <= _TOLERANCE[got.dtype] * expected.float().norm(dim=-1)).all())
