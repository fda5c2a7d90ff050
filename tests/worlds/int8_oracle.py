"""Products in 8 bits as ``engine.kernels.int8_product`` says that they are computed, in torch's float64.

A fused multiply-add is rounded once: the product of two float32 is exact in float64, and the sum is made
odd where it is not, so that the second rounding cannot go wrong (Boldo and Melquiond 2008).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.kernels.int8_rows import HEADER_BYTES, ZERO_POINT
from engine.model.int8 import GROUP, Int8Weight


class Rows(NamedTuple):
    """``values`` ``[rows, groups, group]`` whole numbers in float32; ``scales`` ``[rows, groups]``."""

    values: torch.Tensor
    scales: torch.Tensor


def quantized(rows: torch.Tensor, group: int) -> Rows:
    """``rows`` ``[rows, in_features]``."""
    parts = F.pad(rows.float(), (0, -rows.shape[1] % group)).unflatten(1, (-1, group))
    scales = (parts.abs().amax(2) / 127).clamp_min(1e-12)
    return Rows((parts * (1 / scales)[:, :, None]).round(), scales)


def read_records(records: torch.Tensor, group: int) -> tuple[Rows, torch.Tensor]:
    """What the kernel wrote, and corrections ``[rows, groups]``."""
    parts = records.unflatten(1, (-1, HEADER_BYTES + group))
    scales = parts[..., :4].contiguous().view(torch.float32)[..., 0]
    corrections = parts[..., 4:8].contiguous().view(torch.int32)[..., 0]
    values = parts[..., HEADER_BYTES:].contiguous().view(torch.int8)
    return Rows(values.float(), scales), corrections


def expected_corrections(rows: Rows) -> torch.Tensor:
    return (-ZERO_POINT * rows.values.sum(2)).to(torch.int32)


def product(
    rows: torch.Tensor, weight: Int8Weight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``[rows, out_features]``: the loop of the kernel's first lines, for all rows and channels."""
    in_features = weight.values.shape[1]
    group = GROUP if weight.group_scales is not None else in_features + -in_features % GROUP
    values, scales = quantized(rows, group)
    weights = F.pad(weight.values.double(), (0, -in_features % group)).unflatten(1, (-1, group))
    total = torch.zeros(len(rows), len(weights))
    for index in range(values.shape[1]):
        whole = (values[:, index].double() @ weights[:, index].T).float()
        if weight.group_scales is not None:
            whole = whole * weight.group_scales[:, index].float()
        total = fma(whole, scales[:, index, None], total)
    total = total * weight.scales
    return (total if bias is None else total + bias).to(dtype)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32, rounded once."""
    exact, added = a.double() * b.double(), c.double()
    total = exact + added
    rest = total - exact
    error = (exact - (total - rest)) + (added - rest)
    is_even = total.view(torch.int64) % 2 == 0
    away = torch.where(error > 0, torch.inf, -torch.inf).double()
    odd = torch.where((error != 0) & is_even, torch.nextafter(total, away), total)
    return odd.float()
