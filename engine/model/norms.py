"""Gives a model's root mean square norms one compiled pass each, in place.

transformers writes them as seven operations, which for a few rows cost more than what they compute. On
GPUs one of these, the mean of the squares, divides a row among threads by how many rows there are, so
that its bits follow them; our pass has one order for rows of a length. Which modules are such norms is
seen in what they do with random rows, not in what they are called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.kernels import LANES
from engine.kernels.triton import missing_for
from engine.kernels.triton.row_ops import row_norm
from engine.model.replacing import replace_modules

_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_PROBED_ROWS = 8
# Of the largest value: a step of the type, which sums in another order may take.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}


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


class FusedNorm(nn.Module):
    """In such a module's place. ``offset``: added to its weights (Gemma). ``is_rounded``: rows are
    rounded to their type before they are weighed (Llama)."""

    def __init__(
        self,
        weight: nn.Parameter,
        epsilon: float,
        offset: float,
        is_rounded: bool,
        compute: RowNorm,
    ) -> None:
        super().__init__()
        self.weight, self.epsilon, self.is_rounded = weight, epsilon, is_rounded
        self.offset = offset
        self._factors = (weight.detach().float() + offset).contiguous()
        self._compute = compute

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._compute(hidden_states, self._factors, self.epsilon, self.is_rounded)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.epsilon}, one pass"


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> int:
    """Replaces them by what there is for the device they are on; returns how many."""
    return replace_modules(model, FusedNorm, _fused)


def _fused(module: nn.Module) -> FusedNorm | None:
    """Returns what computes the same; None: nothing here does."""
    weight, epsilon = _parts(module)
    if weight is None or epsilon is None:
        return None
    compute = row_norm_for(weight.device, weight.shape[0])
    if compute is None:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_PROBED_ROWS, weight.shape[0], generator=generator) * 3
    rows = rows.to(weight.device, weight.dtype)
    try:
        expected = module(rows)
    except Exception:  # it takes something else than rows
        return None
    if not isinstance(expected, torch.Tensor) or expected.dtype != rows.dtype:
        return None
    found = [
        FusedNorm(weight, epsilon, offset, is_rounded, compute)
        for offset in (0.0, 1.0)
        for is_rounded in (True, False)
    ]
    nearest = min(found, key=lambda each: float((each(rows) - expected).abs().float().mean()))
    return nearest if _is_near(nearest(rows), expected) else None


def _parts(module: nn.Module) -> tuple[nn.Parameter | None, float | None]:
    """Returns weight and epsilon of what may be a norm: a module of one vector and nothing else."""
    own = dict(module.named_parameters())
    weight = own.get("weight")
    has_more = any(True for _ in module.children()) or any(True for _ in module.buffers())
    if len(own) != 1 or weight is None or has_more:
        return None, None
    if weight.dim() != 1 or weight.dtype not in _TOLERANCE:
        return None, None
    found = (getattr(module, name, None) for name in _EPSILONS)
    return weight, next((float(each) for each in found if isinstance(each, float)), None)


def _is_near(got: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (got.float() - expected.float()).abs()
    tolerance = _TOLERANCE[expected.dtype] * expected.float().abs() + 1e-6
    return got.shape == expected.shape and bool((difference <= tolerance).all())
