"""Rounds a weight matrix to 4 bits so that its products, not its numbers, change little.

GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022): features are rounded in order, and later features compensate for each rounding
error in the layer's output, as far as their inputs are correlated. The sums of products of the inputs
("Hessian") give the correlation.

torchao's GPTQ writes 4 bits by kernels for GPUs alone, and has no zero points; other libraries of it
need CUDA. So the arithmetic is here: it is a page.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.grouped_weight import GroupedWeight

BITS = 4
SPAN = 32
"""Features of an output channel that share a scale and a zero point, as in ``int8``."""
_LARGEST = 2**BITS - 1
_DAMPING = 0.01
"""Added to the Hessian's diagonal, as a share of its mean: the paper's."""
_MORE_DAMPING = 10
_AT_ONCE = 128
"""Features whose errors reach those behind them in one product."""
_SHARES = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried at either end; above 1, since what is made up for inside the
group widens it."""
_FEW_SHARES = (1.0, 0.9)
_SMALLEST_SCALE = 2.0**-24


class Grid(NamedTuple):
    """The meaning of a group's codes in each channel: ``scales`` and ``minima``, ``[channels]``
    float32, exactly representable in their stored type."""

    scales: torch.Tensor
    minima: torch.Tensor

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` ``[.., channels]``; returns the nearest codes, as float32."""
        return ((values - self.minima) / self.scales).round_().clamp_(0, _LARGEST)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        return codes * self.scales + self.minima


@torch.no_grad()
def round_by_inputs(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    has_minima: bool = False,
    shares: tuple[float, ...] = _SHARES,
) -> GroupedWeight:
    """Rounds ``weight`` ``[out_features, in_features]`` by ``hessian`` ``[in_features, in_features]``
    float32, the sum of ``outer(x, x)`` over the layer's inputs. ``has_minima``: groups begin at any
    number, not at a whole multiple of their steps; a weight then takes 5 bits instead of 4.75.
    ``shares``: shares of a group's range to try at either end; the pair with the least weighted error is
    taken.

    Features that no input had are rounded to the nearest.
    """
    # Features first: what the loop below works on lies together.
    rest = weight.T.float().contiguous()
    factor = _inverse_factor(hessian)
    codes = torch.empty_like(rest, dtype=torch.uint8)
    grids: list[Grid] = []
    for first in range(0, len(rest), _AT_ONCE):
        end = min(first + _AT_ONCE, len(rest))
        errors = rest.new_empty(end - first, rest.shape[1])
        for feature in range(first, end):
            if feature % SPAN == 0:
                group = slice(feature, min(feature + SPAN, end))
                importance = factor.diagonal()[group].square().reciprocal()
                grids.append(_best_grid(rest[group], importance, has_minima, shares))
            row = factor[feature, feature:end]
            chosen = grids[-1].codes(rest[feature])
            codes[feature] = chosen
            error = (rest[feature] - grids[-1].values(chosen)) / row[0]
            rest[feature + 1 : end].addr_(row[1:], error, alpha=-1)
            errors[feature - first] = error
        rest[end:].addmm_(factor[first:end, end:].T, errors, alpha=-1)
    scales = torch.stack([grid.scales for grid in grids], 1)
    minima = torch.stack([grid.minima for grid in grids], 1)
    found = GroupedWeight(codes.T.contiguous(), BITS, 0, SPAN, scales.half())
    if has_minima:
        return found._replace(minima=minima.half())
    return found._replace(zeros=(-minima / scales).to(torch.uint8))


@torch.no_grad()
def round_to_nearest(
    weight: torch.Tensor, shares: tuple[float, ...] = _FEW_SHARES
) -> GroupedWeight:
    """Rounds each weight of ``[out_features, in_features]`` by its own group alone, for weights whose
    inputs are too many kinds to look at: of each expert few. ``shares`` as above."""
    out_features, in_features = weight.shape
    groups = F.pad(weight.float(), (0, -in_features % SPAN)).unflatten(1, (-1, SPAN))
    values = groups.permute(2, 0, 1).flatten(1)
    grid = _best_grid(values, values.new_ones(SPAN), False, shares)
    codes = grid.codes(values).to(torch.uint8).T.reshape(out_features, -1)[:, :in_features]
    scales, minima = (each.view(out_features, -1) for each in grid)
    zeros = (-minima / scales).to(torch.uint8)
    return GroupedWeight(codes, BITS, 0, SPAN, scales.half(), zeros=zeros)


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Returns the upper triangular U with ``U.T @ U`` equal to the damped Hessian's inverse: the
    Cholesky factor of the features in descending order, inverted, so that nothing is inverted twice."""
    damped = hessian.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1
    added = _DAMPING * float(diagonal.mean())
    while True:
        diagonal += added
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            break
        added *= _MORE_DAMPING
    upper = lower.flip(0, 1)
    eye = torch.eye(len(upper), device=upper.device)
    found: torch.Tensor = torch.linalg.solve_triangular(upper, eye, upper=True)
    return found


def _best_grid(
    values: torch.Tensor, importance: torch.Tensor, has_minima: bool, shares: tuple[float, ...]
) -> Grid:
    """``values`` ``[features, channels]`` of a group, ``importance`` ``[features]`` of their squared
    errors; returns the grid with the least error."""
    least, largest = values.amin(0), values.amax(0)
    if not has_minima:  # zero points are codes: a range without zero has none
        least, largest = least.clamp_max_(0), largest.clamp_min_(0)
    middle = (least + largest) / 2 if has_minima else least.new_zeros(())
    best: Grid | None = None
    for low in shares:
        for high in shares:
            grid = _grid(
                middle + low * (least - middle), middle + high * (largest - middle), has_minima
            )
            if best is None and len(shares) == 1:
                return grid
            error = (grid.values(grid.codes(values)) - values).square_()
            found = importance @ error
            if best is None:
                best, fewest = grid, found
                continue
            better = found < fewest
            fewest = torch.where(better, found, fewest)
            best = Grid(*(torch.where(better, *each) for each in zip(grid, best, strict=True)))
    assert best is not None
    return best


def _grid(least: torch.Tensor, largest: torch.Tensor, has_minima: bool) -> Grid:
    if has_minima:
        minima = least.half().float()
        return Grid(_steps((largest - minima) / _LARGEST), minima)
    # Readers hold scales in either type of 16 bits, the model's.
    scales = _steps(((largest - least) / _LARGEST).bfloat16())
    return Grid(scales, (least / scales).round_().clamp_(-_LARGEST, 0) * scales)


def _steps(exact: torch.Tensor) -> torch.Tensor:
    return exact.half().float().clamp_min_(_SMALLEST_SCALE)
