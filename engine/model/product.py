"""Products with quantized weights, which layers that read one input may share, and the kernels for them
on CPUs and other devices.

On CPUs inputs are rounded to 8 bits in groups of 32 (``engine.kernels.grouped_product``), or keep their
floats. Sums within a group are integers; groups are added in ascending order, with one rounding each.
So a row's result has the same bits whatever rows are computed with it: one loop for few rows and many.
On GPUs inputs keep their floats, and sums have one order, too
(``engine.kernels.triton.code_programs``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from engine.kernels import KINDS, find_kernel, is_host
from engine.kernels.triton.packed_codes import PackedCodes
from engine.weights.layer import scaled

if TYPE_CHECKING:
    from engine.kernels.packing import PackedGroups
    from engine.kernels.routes import Routes
    from engine.kernels.row_records import Gate
    from engine.kernels.triton.row_ops import Sums

    Packed = PackedGroups | PackedCodes


class Kernels(NamedTuple):
    """Functions that pack quantized weights, join them side by side, multiply, look up rows, sort rows by
    experts and add these up. ``gates``: products gate what they read."""

    pack: Callable[..., Any]
    join: Callable[..., Any]
    can_join: Callable[..., bool]
    product: Callable[..., torch.Tensor]
    look_up: Callable[..., torch.Tensor]
    route: Callable[..., Any]
    weighted_sum: Callable[..., torch.Tensor]
    gates: bool


@cache
def _kernels(where: str) -> Kernels:
    is_host = where == "host"
    names = ("packing", "grouped_product", "look_up", "routes")
    if not is_host:
        operations = "triton.code_ops"
        names = ("triton.packed_codes", operations, operations, "triton.expert_ops")
    packing, products, rows, experts = map(find_kernel, names)
    packs = packing.pack, packing.join, packing.can_join
    routing = experts.route, experts.weighted_sum
    return Kernels(*packs, products.product, rows.look_up, *routing, is_host)


def kernels_for(device: torch.device) -> Kernels:
    """Returns those for weights on a device."""
    return _kernels("host" if is_host(device) else "device")


def kernels_of(packed: Any) -> Kernels:
    """Returns those for weights that are packed; floats are a host's."""
    return _kernels("device" if isinstance(packed, PackedCodes) else "host")


class GroupedProduct:
    """Products of rows with ``packed`` weights, of one layer or of ``num_layers`` side by side.
    ``dtype``: of the result. ``order``: which feature each column of the weights is for, where that is
    not their own order. ``keeps_inputs``: rows are not rounded to 8 bits."""

    def __init__(
        self,
        packed: Packed,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
        num_layers: int = 1,
        keeps_inputs: bool = False,
    ) -> None:
        self._multiply = kernels_of(packed).product
        self.packed, self.dtype = packed, dtype
        self.order = None if order is None else order.to(packed.blocks.device)
        self.round_inputs(not keeps_inputs)
        self.out_features, self.in_features = packed.out_features, packed.in_features
        self._num_layers = num_layers
        self._inputs: torch.Tensor | None = None
        self._result: torch.Tensor | None = None
        self._num_read = 0

    def round_inputs(self, rounds: bool) -> None:
        """Says whether rows are rounded to 8 bits, where they can be."""
        self.keeps_inputs = not (rounds and self.packed.rounds_inputs)

    def __call__(
        self, rows: torch.Tensor, gate: Gate | None = None, routes: Routes | None = None
    ) -> torch.Tensor:
        """``rows`` ``[num_rows, in_features]``, or twice as many features that ``gate`` makes one half
        of; returns ``[num_rows, out_features]``, with ``routes`` to experts ``[num_pairs,
        out_features]``."""
        if self.order is not None and gate is not None:
            from engine.kernels.row_records import gate_rows

            rows, gate = gate_rows(rows, gate), None
        rows = self._read(rows)
        return self._multiply(rows, self.packed, self.dtype, gate, self.keeps_inputs, routes)

    def sums(self, rows: torch.Tensor, routes: Any = None) -> Sums:
        """Returns the same, on a device, as what comes next may add it up."""
        from engine.kernels.triton.code_ops import sums

        assert isinstance(self.packed, PackedCodes)
        return sums(self._read(rows), self.packed, self.dtype, routes)

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows if rows.dtype in KINDS else rows.float()
        return rows if self.order is None else rows.index_select(1, self.order)

    def weight(self, first: int, count: int) -> torch.Tensor:
        """Returns the weights of ``count`` outputs from ``first`` on, ``[count, in_features]``."""
        outputs = torch.arange(first, first + count, device=self.packed.blocks.device)
        columns = kernels_of(self.packed).look_up(self.packed, outputs, self.dtype)
        if self.order is None:
            return columns
        return torch.empty_like(columns).index_copy_(1, self.order, columns)

    def shared(self, inputs: torch.Tensor) -> torch.Tensor:
        """Takes the ``inputs`` ``[.., in_features]`` of one of the layers; returns ``[.., out_features]``
        of all of them, computed when the first one asks and kept until all have. A layer that has
        another input than the one before it computes the product anew."""
        result = self._result
        if result is None or inputs is not self._inputs:
            flat = inputs.reshape(-1, inputs.shape[-1])
            result = self(flat)
            result = result.view(*inputs.shape[:-1], result.shape[-1])  # of no rows, too
            self._inputs, self._result, self._num_read = inputs, result, 0
        self._num_read += 1
        if self._num_read == self._num_layers:
            self._inputs = self._result = None
        return result


class GroupedEmbedding(nn.Module):
    """In ``nn.Embedding``'s place: rows of packed weights, which the output head may be, too. ``dtype``:
    of what it returns; ``scale``: what that is multiplied with."""

    def __init__(
        self, packed: Any, dtype: torch.dtype, scheme: str, method: str, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = packed.out_features, packed.in_features
        self.packed, self._dtype, self._look_up = packed, dtype, kernels_of(packed).look_up
        self.scheme, self.method, self._scale = scheme, method, scale

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``token_ids`` ``[..]`` int64; returns ``[.., embedding_dim]``."""
        return scaled(self._look_up(self.packed, token_ids, self._dtype), self._scale)


def join_products(products: Sequence[GroupedProduct]) -> GroupedProduct:
    """Returns the products of several layers as one. Those for which ``can_join`` says so."""
    first = products[0]
    return GroupedProduct(
        kernels_of(first.packed).join([each.packed for each in products]),
        first.dtype,
        first.order,
        len(products),
        first.keeps_inputs,
    )


def can_join(products: Sequence[GroupedProduct]) -> bool:
    """Whether one product may compute several: of one format, one order of features, whole blocks."""
    first = products[0]
    return kernels_of(first.packed).can_join([each.packed for each in products]) and all(
        (each.order is None) == (first.order is None)
        and (each.order is None or torch.equal(each.order, first.order))  # type: ignore[arg-type]
        and (each.dtype, each.keeps_inputs) == (first.dtype, first.keeps_inputs)
        for each in products
    )
