"""Root mean square norms of rows (Zhang and Sennrich 2019) in one pass."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from compiled.records import Counter
from engine.kernels import LANES, threads_for
from engine.kernels import lanes as v
from engine.kernels.compiled import Kernel
from engine.kernels.records import Float32s, Floats


def reference(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, is_rounded: bool
) -> torch.Tensor:
    """Returns what ``rms_norm`` does, but for the order of sums."""
    floats = rows.float()
    floats = floats * torch.rsqrt(floats.square().mean(-1, keepdim=True) + epsilon)
    floats = floats.to(rows.dtype).float() if is_rounded else floats
    return (floats * weight).to(rows.dtype)


class Arguments(NamedTuple):
    """``rows`` and ``output`` ``[num_rows, num_features]``; ``share``: one over the number of features;
    ``is_rounded``: a row is rounded to its type before it is weighed."""

    rows: Floats
    weight: Float32s
    output: Floats
    num_rows: int
    num_features: int
    epsilon: float
    share: float
    is_rounded: bool
    next_row: Counter = 0


def _normalize(a: Arguments) -> None:
    one, epsilon, share = np.float32(1.0), np.float32(a.epsilon), np.float32(a.share)
    for row in v.shared(a.next_row, a.num_rows):
        source, target = a.rows + row * a.num_features, a.output + row * a.num_features
        even = odd = v.splat(np.float32(0.0))
        at = 0
        while at + 2 * LANES <= a.num_features:
            x, y = v.load(source, at), v.load(source, at + LANES)
            even, odd = v.fma(x, x, even), v.fma(y, y, odd)
            at += 2 * LANES
        if at < a.num_features:
            x = v.load(source, at)
            even = v.fma(x, x, even)
        scale = v.splat(one / np.sqrt(v.sum_of(even + odd) * share + epsilon))
        for at in range(0, a.num_features, LANES):
            value = v.load(source, at) * scale
            if a.is_rounded:
                value = v.rounded(target, value)
            v.store(target, at, value * v.load(a.weight, at))


normalize = Kernel(_normalize)
"""Writes every row over its root mean square, times the weight."""


def rms_norm(
    rows: torch.Tensor, weight: torch.Tensor, epsilon: float, is_rounded: bool
) -> torch.Tensor:
    """``rows`` ``[.., num_features]``, of a type in ``KINDS``, features a multiple of 16; ``weight``
    float32. Returns the like of ``rows``."""
    rows = rows if rows.is_contiguous() else rows.contiguous()
    num_features = rows.shape[-1]
    output = torch.empty_like(rows)
    arguments = Arguments(
        rows=rows,
        weight=weight,
        output=output,
        num_rows=rows.numel() // num_features,
        num_features=num_features,
        epsilon=epsilon,
        share=1.0 / num_features,
        is_rounded=is_rounded,
    )
    normalize.run(arguments, threads_for(rows.numel()))
    return output
