"""Loops over rows, compiled by numba for the machine they run on.

``lanes`` is what they are written in, ``records`` what they are told, ``compiled`` how they are compiled
and run by torch's own threads; a kernel's file begins with what it computes, in plain Python. Kernels are
imported through ``find_kernel`` and where they are used: numba takes a while, and need not be there.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from engine.transfer import is_host

LANES = 16
"""Floats that kernels take at a time: what rows' features and keys are multiples of."""
FLOAT32, BFLOAT16, FLOAT16, FLOAT8 = 0, 1, 2, 3
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""Types of rows' floats in memory, by the numbers that kernels know them by."""
STORED_KINDS = {**KINDS, torch.float8_e4m3fn: FLOAT8}
"""Types that keys and values may lie in, besides."""


@cache
def find_kernel(name: str) -> Any:
    """The module of this folder; None where numba is not installed."""
    return None if find_spec("numba") is None else import_module(f"{__name__}.{name}")


def host_kernel(name: str, device: torch.device) -> Any:
    """The kernel for tensors on ``device``; None: torch's operations do it there."""
    return find_kernel(name) if is_host(device) else None
