"""Arithmetic for the plain loops that kernels are checked against."""

from __future__ import annotations

import torch


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Returns ``a * b + c`` of float32, rounded once. A product of two float32 is a float64; their sum
    with a third is rounded to odd there, so that the second rounding is as if it were the only one (Boldo
    and Melquiond, "Emulation of FMA and correctly rounded sums", 2008)."""
    product, added = a.double() * b.double(), c.double()
    total = product + added
    part = total - product
    error = (product - (total - part)) + (added - part)
    is_even = total.view(torch.int64) % 2 == 0
    away = torch.where(error > 0, torch.inf, -torch.inf).double()
    odd = torch.where((error != 0) & is_even, torch.nextafter(total, away), total)
    return odd.float()
