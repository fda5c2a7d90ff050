"""Replacements for modules' forwards (``fusing``), and how to tell them apart."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from engine.kernels import KINDS, LANES
from engine.kernels.triton import missing_for
from engine.kernels.triton.row_ops import Sums, row_norm, sum_norm
from engine.model.layers import AdaptsRows, LayerShape

PROBED_ROWS = 8
# Of the root mean square; values next to a step of the type, or of the 8 bits, may fall to either side.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}


class Fused:
    """Stands in the place of a module's forward."""


Find = Callable[[nn.Module], Fused | None]
"""Returns what may stand in the place of the module's forward; None: it is of another kind."""


class FusedParts(Fused):
    """Passes that stand for layers, too. ``parts``: names within the module, and shapes, of these, in
    order: those whose product is one, and what reads that product's rows unless it is still a layer."""

    def __init__(self) -> None:
        self.parts: dict[str, LayerShape] = {}
        self.adapted: Sequence[AdaptsRows] = ()
        """The same, where adapters may change them."""

    @property
    def is_adapted(self) -> bool:
        """Whether the forward that is under way has rows with adapters."""
        return bool(self.adapted) and self.adapted[0].is_wanted

    def adapt(self, rows: torch.Tensor, joint: torch.Tensor) -> None:
        """Adds what adapters make of ``rows`` to a ``joint`` product, which may be one layer's."""
        first = 0
        for layer in self.adapted:
            if first < joint.shape[1]:
                layer.add(rows, joint.narrow(1, first, layer.shape.out_features))
                first += layer.shape.out_features


def fused_forward(module: nn.Module) -> Fused | None:
    """Returns what stands in the place of the module's forward; None: it is its own."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, Fused) else None


def computed(function: Callable[..., Any], *given: Any) -> Any:
    """Returns what the function makes of what it is given; None: it takes something else."""
    try:
        return function(*given)
    except Exception:
        return None


_ACTIVATION_TOLERANCE = 2e-6


def activation_of(
    module: nn.Module,
    names: Iterable[str],
    gate: Callable[[torch.Tensor, str], torch.Tensor],
    device: torch.device,
) -> str | None:
    """Returns which of the ``names`` is the module's activation as kernels know it; None: it is none.
    ``gate``: gives the named activation of the first half of each row, times the other."""
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        return None
    values = torch.linspace(-12.0, 12.0, 64 * LANES, device=device)[None]
    expected = computed(module, values)
    if not isinstance(expected, torch.Tensor) or expected.shape != values.shape:
        return None
    for name in names:
        difference = (gate(torch.cat([values, torch.ones_like(values)], 1), name) - expected).abs()
        if bool((difference <= _ACTIVATION_TOLERANCE * (1 + expected.abs())).all()):
            return name
    return None


def is_near(got: torch.Tensor, expected: object) -> bool:
    """Whether they are the same within rounding, row by row."""
    if not isinstance(expected, torch.Tensor):
        return False
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    error = (got.float() - expected.float()).norm(dim=-1)
    return bool((error <= _TOLERANCE[got.dtype] * expected.float().norm(dim=-1)).all())


# --- root mean square norms ---

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
# Of the largest value: a step of the type, which sums in another order may take.
_NORM_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}

RowNorm = Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
"""Takes rows, float32 weights, an epsilon, and whether rows are rounded before they are weighed."""


def row_norm_for(device: torch.device, length: int) -> RowNorm | None:
    """Returns one pass over rows of a length; None: there is none for the device."""
    if device.type == "cuda":
        return row_norm if missing_for(device) is None else None
    if device.type != "cpu" or length % LANES:
        return None
    from engine.kernels.rms_norm import rms_norm

    return rms_norm


class FusedNorm(Fused):
    """A norm in one pass. ``offset``: added to its weights (Gemma). ``is_rounded``: rows are rounded to
    their type before they are weighed (Llama)."""

    def __init__(
        self,
        weight: torch.Tensor,
        epsilon: float,
        offset: float,
        is_rounded: bool,
        compute: RowNorm,
    ) -> None:
        self.offset, self.is_rounded = offset, is_rounded
        self.epsilon, self._compute = epsilon, compute
        self.factors = (weight.detach().float() + offset).contiguous()
        self._ready: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] is hidden_states:
            return ready[1]
        return self._compute(hidden_states, self.factors, self.epsilon, self.is_rounded)

    def of_sum(self, product: Sums, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of a product and ``residual`` ``[.., length]``, and that sum's norm."""
        told = self.factors, self.epsilon, self.is_rounded
        return sum_norm(product, residual, *told)

    def summed(self, product: Sums, residual: torch.Tensor) -> torch.Tensor:
        """Returns that sum. Its norm is what the next call gets that is given this very sum."""
        self._ready = self.of_sum(product, residual)
        return self._ready[0]


def find_norm(module: nn.Module) -> FusedNorm | None:
    weight, epsilon = _norm_parts(module)
    compute = None if weight is None else row_norm_for(weight.device, len(weight))
    if weight is None or epsilon is None or compute is None:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PROBED_ROWS, len(weight), generator=generator) * 3
    rows = rows.to(weight.device, weight.dtype)
    expected = computed(module, rows)
    if not isinstance(expected, torch.Tensor) or expected.dtype != rows.dtype:
        return None
    found = [
        FusedNorm(weight, epsilon, offset, is_rounded, compute)
        for offset in (0.0, 1.0)
        for is_rounded in (True, False)
    ]
    nearest = min(found, key=lambda each: float((each(rows) - expected).abs().float().mean()))
    return nearest if _is_within_a_step(nearest(rows), expected) else None


def _norm_parts(module: nn.Module) -> tuple[torch.Tensor | None, float | None]:
    """Returns weight and epsilon of what may be a norm: a module of one vector and nothing else."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    has_more = any(True for _ in module.children()) or any(True for _ in module.buffers())
    if len(own) != 1 or weight is None or has_more:
        return None, None
    if weight.dim() != 1 or weight.dtype not in KINDS:
        return None, None
    if len(inspect.signature(module.forward).parameters) > 1:  # it also takes a gate
        return None, None
    found = (getattr(module, name, None) for name in _EPSILONS)
    return weight, next((float(each) for each in found if isinstance(each, float)), None)


def _is_within_a_step(got: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (got.float() - expected.float()).abs()
    tolerance = _NORM_TOLERANCE[expected.dtype] * expected.float().abs() + 1e-6
    return got.shape == expected.shape and bool((difference <= tolerance).all())
