"""Which of torch's functions of rows kernels compute instead, on a CPU.

torch computes the rest of a length that vectors do not divide in another way, and adds a row's numbers in
an order that may follow how many rows there are. The kernels do neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import KINDS, find_kernel

_NAMES = {
    "approximate",
    "dim",
    "dtype",
    "inplace",
    "k",
    "keepdim",
    "largest",
    "sorted",
    "_stacklevel",
}
"""Arguments that are read, or of no effect; torch has other names for some, too."""
_MOST_TOP = 64
"""More are chosen faster by torch."""

Result = Any
"""That of the function; None: it is left to torch."""


def replaced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    """Returns what a kernel makes of it."""
    compute = _KERNELS.get(func)
    values = args[0] if compute is not None and args else None
    if compute is None or not isinstance(values, Tensor) or values.dtype not in KINDS:
        return None
    if not kwargs.keys() <= _NAMES:
        return None
    is_dense = values.layout is torch.strided and values.device.type == "cpu" and values.numel()
    return compute(*args, **kwargs) if is_dense and values.dim() else None


def _elementwise(name: str, values: Tensor, *more: Any, inplace: bool = False) -> Result:
    kernel = find_kernel("elementwise")
    if more:
        return None
    found = kernel.computed(getattr(kernel, name), values)
    return values.copy_(found) if inplace else found


def _gelu(values: Tensor, approximate: str = "none") -> Result:
    return _elementwise("GELU_TANH", values) if approximate == "tanh" else None


def _total(
    is_mean: bool,
    values: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Result:
    if dim not in _lasts(values) or dtype not in (None, values.dtype):
        return None
    sums = find_kernel("row_numbers").sums(values, values.shape[-1] if is_mean else 1)
    return sums if keepdim else sums.squeeze(-1)


def _softmax(values: Tensor, dim: int, dtype: torch.dtype | None = None) -> Result:
    if dim not in _lasts(values) or (dtype or values.dtype) not in KINDS:
        return None
    return find_kernel("row_numbers").softmax(values, dtype or values.dtype)


def _functional_softmax(
    values: Tensor,
    dim: int | None = None,
    _stacklevel: int = 3,
    dtype: torch.dtype | None = None,
) -> Result:
    return None if dim is None else _softmax(values, dim, dtype)


def _top(
    values: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Result:
    del sorted  # it may be
    if dim not in _lasts(values) or not largest or not 0 < k <= min(_MOST_TOP, values.shape[-1]):
        return None
    return torch.return_types.topk(find_kernel("row_numbers").largest(values, k))


def _lasts(values: Tensor) -> tuple[Any, ...]:
    """Returns how the last dimension is named."""
    last = values.dim() - 1
    return -1, last, (-1,), (last,), [-1], [last]


_SIGMOID = partial(_elementwise, "LOGISTIC")
_TANH = partial(_elementwise, "TANH")
_EXPONENTIAL = partial(_elementwise, "EXPONENTIAL")
_INVERSE_ROOT = partial(_elementwise, "INVERSE_ROOT")
_MEAN, _SUM = partial(_total, True), partial(_total, False)

_KERNELS: dict[Any, Callable[..., Result]] = {
    torch.sigmoid: _SIGMOID,
    Tensor.sigmoid: _SIGMOID,
    F.silu: partial(_elementwise, "SILU"),
    F.gelu: _gelu,
    F.softplus: partial(_elementwise, "SOFTPLUS"),
    torch.exp: _EXPONENTIAL,
    Tensor.exp: _EXPONENTIAL,
    torch.tanh: _TANH,
    Tensor.tanh: _TANH,
    torch.rsqrt: _INVERSE_ROOT,
    Tensor.rsqrt: _INVERSE_ROOT,
    torch.mean: _MEAN,
    Tensor.mean: _MEAN,
    torch.sum: _SUM,
    Tensor.sum: _SUM,
    F.softmax: _functional_softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    torch.topk: _top,
    Tensor.topk: _top,
}
REPLACED = frozenset(_KERNELS)
